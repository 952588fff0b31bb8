"""State that a fingerprint does not know of: global generators, and what code keeps beside weights and buffers."""

from __future__ import annotations

import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

NUMPY = "numpy's global generator"
PYTHON = "the generator of Python's random"
GLOBAL = (NUMPY, PYTHON)
TENSOR = " (a tensor)"
"""The end of a name of what may be no more than a result that is kept to be looked at."""

_MODULE = {*vars(nn.Module())}
_OTHERS = ("torch", "weft", "numpy", "builtins", "functools", "")
_FIXED = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, type, torch.dtype, torch.device)
_LONGEST = 1000


def generators() -> dict[str, Any]:
    """The states of the global generators but torch's, which weft seeds for every layer, so that layers may draw."""
    return {NUMPY: _frozen(np.random.mtrand._rand), PYTHON: random.getstate()}


def kept_by(*things: Any) -> dict[str, Any]:
    """What modules, functions and other objects, and the files that they are defined in, keep beside weights."""
    found: dict[str, Any] = {}
    files: dict[str, ModuleType] = {}
    for thing in things:
        parts = dict(thing.named_modules()) if isinstance(thing, nn.Module) else {"": thing}
        for path, part in parts.items():
            kinds = [kind for kind in type(part).__mro__ if _is_own(kind.__module__)]
            for name, value in (pair for owner in (*reversed(kinds), part) for pair in _attributes(owner)):
                mark = TENSOR if isinstance(value, Tensor | np.ndarray) else ""
                found[f"'{path}.{name}'".replace("'.", "'") + mark] = _frozen(value)
            homes = {getattr(part, "__module__", None) or "", *(kind.__module__ for kind in kinds)}
            files |= {home: sys.modules[home] for home in homes if _is_own(home) and home in sys.modules}
    for home, file in files.items():
        for name, value in list(vars(file).items()):
            if not name.startswith("__") and not isinstance(value, _FIXED):
                found[f"'{name}' of the module {home}"] = _frozen(value)
    return found


def moved(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The names of what has changed, tensors last."""
    found = [name for name in after if name not in before or before[name] != after[name]]
    return sorted(found, key=lambda name: name.endswith(TENSOR))


def _is_own(home: str) -> bool:
    """Whether a module is the user's own code, or at least may be."""
    return home.partition(".")[0] not in _OTHERS


def _attributes(part: Any) -> Iterator[tuple[str, Any]]:
    """What an object or a class holds, but for what every nn.Module has; of a function, what it closes over."""
    if isinstance(part, FunctionType):
        yield from zip(part.__code__.co_freevars, _cells(part), strict=True)
    for name, value in list(getattr(part, "__dict__", {}).items()):
        if name not in _MODULE and not name.startswith("__") and not isinstance(value, _FIXED):
            yield name, value


def _cells(function: FunctionType) -> list[Any]:
    def content(cell: Any) -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # a name that has no value yet
            return None

    return [content(cell) for cell in function.__closure__ or ()]


def _frozen(value: Any, depth: int = 3) -> Any:
    """Something that is equal as long as the value is the same, and does not change with it."""
    deeper: Callable[[Any], Any] = lambda part: _frozen(part, depth - 1)  # noqa: E731
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes():
            return value
        case torch.Generator():
            return value.get_state().numpy().tobytes()
        case np.random.Generator():
            return repr(value.bit_generator.state)
        case np.random.RandomState():
            return repr([part.tobytes() if isinstance(part, np.ndarray) else part for part in value.get_state()])
        case random.Random():
            return value.getstate()
        case itertools.count():
            return repr(value)
        case Tensor():
            return id(value), value._version
        case np.ndarray():
            return id(value), value.tobytes() if value.size <= _LONGEST else None
        case list() | tuple() | deque() | set() | frozenset() if depth and len(value) <= _LONGEST:
            return type(value), [deeper(part) for part in value]
        case dict() if depth and len(value) <= _LONGEST:
            return [(deeper(key), deeper(part)) for key, part in value.items()]
        case list() | tuple() | deque() | set() | frozenset() | dict():
            return id(value), len(value)
    inner = getattr(value, "__dict__", None)
    if depth and isinstance(inner, dict) and not isinstance(value, (*_FIXED, nn.Module)):
        return id(value), {name: deeper(part) for name, part in inner.items()}
    return id(value)
