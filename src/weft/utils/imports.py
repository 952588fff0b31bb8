"""Modules and what is in them: objects named as ``module:attribute``, and packages that can be called."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, nearest


def import_object(spec: str, folder: Path) -> Any:
    """What ``module:attribute`` names, the module found from the config's folder first."""
    module_name, _, attribute = spec.partition(":")
    if not re.fullmatch(r"[A-Za-z_][\w.]*", module_name) or not re.fullmatch(r"[A-Za-z_][\w.]*", attribute):
        raise ConfigError(f"'{spec}' does not name code: write it as 'module:attribute'")
    where = str(folder.resolve())
    if where not in sys.path:
        sys.path.insert(0, where)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as problem:
        if problem.name is not None and (module_name == problem.name or module_name.startswith(problem.name + ".")):
            raise ConfigError(
                f"'{spec}': no module '{module_name}' in {folder} or among the installed packages"
            ) from None
        raise ConfigError(f"'{spec}': importing '{module_name}' fails: {problem}") from problem
    except Exception as problem:
        raise ConfigError(
            f"'{spec}': importing '{module_name}' fails: {type(problem).__name__}: {problem}"
        ) from problem
    candidates = [folder / f"{module_name.split('.')[0]}{end}" for end in (".py", "/__init__.py")]
    file = getattr(module, "__file__", None)
    if any(path.is_file() for path in candidates) and not (file and Path(file).resolve().is_relative_to(where)):
        raise ConfigError(
            f"'{spec}': the name '{module_name}' is taken by {file or 'Python itself'}: rename your module in {folder}"
        )
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise ConfigError(
                f"'{spec}': '{module_name}' has no '{part}'{nearest(part, [n for n in dir(value) if n[0] != '_'])}"
            )
        value = getattr(value, part)
    return value


def installed_version(package: str) -> str | None:
    """The version of an installed package; None for one that is absent, or is used from its sources."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def make_callable(package: str, function: Callable[..., Any]) -> None:
    """Lets a call of the package call the function, with its signature.

    ``weft.search`` names two things in a user's program: the package, as in ``from weft.search import Front``, and the
    function, as in ``weft.search(run, ...)``. Python finds the package as soon as anything has imported it, so the
    package itself must be callable. ``weft.plan`` and ``weft.tune`` are the same.
    """

    class CallableModule(types.ModuleType):
        __call__ = staticmethod(function)
        __signature__ = inspect.signature(function)

    sys.modules[package].__class__ = CallableModule
