"""The command line: one verb for each thing a user does, each ``weft <verb> config.toml [--a.b=c] [--json]``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.cli.program import app, main

__all__ = ["app", "main"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("weft.cli.program"), name)
    raise AttributeError(f"module 'weft.cli' has no attribute '{name}'")
