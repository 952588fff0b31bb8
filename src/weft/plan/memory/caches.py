"""Caches of a model's code, which a trace would leave full of fake tensors."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import _lru_cache_wrapper
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

_OTHERS = ("torch", "numpy", "weft", "builtins")
"""Packages that keep no tensor in their caches."""
DEEP = 5
_NEVER = (type, FunctionType, ModuleType)


@contextmanager
def emptied(*code: Any) -> Iterator[None]:
    """Afterwards, caches of ``functools`` that got tensors without data within the block are empty: in the Python
    modules that the classes of models and the functions are from, and those that they import from. Nobody knows of
    others."""
    found = _caches({home for one in code for home in _homes(one)})
    before = [cache.cache_info().misses for cache in found]
    try:
        yield
    finally:
        for cache, misses in zip(found, before, strict=True):
            if cache.cache_info().misses != misses and _holds_fakes(cache):
                cache.cache_clear()


def _holds_fakes(cache: Any) -> bool:
    """Whether a tensor without data is in it, or in what is in it, a few levels deep."""
    level, seen = [cache], {id(cache)}
    for _ in range(DEEP):
        below = [one for one in gc.get_referents(*level) if not isinstance(one, _NEVER) and id(one) not in seen]
        if any(isinstance(one, FakeTensor) or (isinstance(one, Tensor) and one.is_meta) for one in below):
            return True
        seen.update(map(id, below))
        level = below
    return False


def _homes(code: Any) -> set[str]:
    parts = [type(part) for part in code.modules()] if isinstance(code, nn.Module) else [code]
    own = {str(getattr(part, "__module__", "")) for part in parts}
    return own | {str(getattr(value, "__module__", "")) for name in own for value in _names(name)}


def _names(home: str) -> list[Any]:
    if home not in sys.modules or home.split(".")[0] in _OTHERS:
        return []
    return [value for value in vars(sys.modules[home]).values() if isinstance(value, type) or callable(value)]


def _caches(homes: set[str]) -> list[Any]:
    values = [value for home in homes for value in _names(home)]
    # Of a class, methods too, which may be static.
    methods = [own for value in values if isinstance(value, type) for own in vars(value).values()]
    inner = [getattr(value, "__func__", value) for value in (*values, *methods)]
    return list({id(value): value for value in inner if isinstance(value, _lru_cache_wrapper)}.values())
