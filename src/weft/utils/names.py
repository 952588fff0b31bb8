"""Names of code in manifests: those of weft's own functions and classes do not say in which module they live."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_RENAMED = {"Taught": "InPlaceDistillation", "Validate": "Validation", "Residency": "OffloadConfig"}
"""Classes of weft that were called otherwise when older manifests were written."""


def without_modules(value: Any) -> Any:
    """A plain value, with every name of weft's own in it reduced to what is public of it.

    Manifests that were written before a module moved then compare equal to those of today.

    >>> without_modules("weft.pipeline.losses.cross_entropy")
    'weft.cross_entropy'
    >>> without_modules({"loss": "weft.engine.losses:cross_entropy", "own": "mycode.nets:loss"})
    {'loss': 'weft:cross_entropy', 'own': 'mycode.nets:loss'}
    """
    if isinstance(value, Mapping):
        return {name: without_modules(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_modules(item) for item in value]
    if not isinstance(value, str):
        return value
    short = re.sub(r"\bweft(?:\.[a-z]\w*)*([.:])(?=\w)", r"weft\1", value)
    return re.sub(r"\b(" + "|".join(_RENAMED) + r")\b(?=\()", lambda found: _RENAMED[found[1]], short)
