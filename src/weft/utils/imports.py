"""Packages that can be called: ``weft.search`` is the package, and ``weft.search(run, ...)`` does what it is for."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any


def make_callable(module: str, function: Callable[..., Any]) -> None:
    """From here on calling the module calls the function, with its signature."""

    class CallableModule(types.ModuleType):
        __call__ = staticmethod(function)
        __signature__ = inspect.signature(function)

    sys.modules[module].__class__ = CallableModule
