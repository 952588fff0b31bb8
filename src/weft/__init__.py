"""weft finds neural architectures and trains them on as many devices as there are, with bit-identical results."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.data import Data, Loader, ShiftFlip, Tensors
    from weft.errors import WeftError
    from weft.pipeline import (
        Bounded,
        Delayed,
        Exact,
        Lagged,
        Optimizer,
        Residency,
        Validate,
        accuracy,
        cross_entropy,
        distillation,
    )
    from weft.pipeline.train import Trained, load_run, retrain, train
    from weft.plan.memory import Estimate, estimate
    from weft.runs import Run
    from weft.search.entry import search
    from weft.search.front import Front
    from weft.space import Space, Stream, Subnet, make_stream
    from weft.supernet import Chain, Choice, Elastic, Optional, Shared, extract, initialise
    from weft.tune.entry import tune

__version__ = "0.1.0"

# Where each public name lives. `import weft` itself stays light: torch is imported with the first name that needs it.
_HOME = {
    "weft.data": ("Data", "Loader", "ShiftFlip", "Tensors"),
    "weft.errors": ("WeftError",),
    "weft.pipeline": (
        "Bounded",
        "Delayed",
        "Exact",
        "Lagged",
        "Optimizer",
        "Residency",
        "Trained",
        "Validate",
        "accuracy",
        "cross_entropy",
        "distillation",
        "load_run",
        "retrain",
        "train",
    ),
    "weft.plan.memory": ("Estimate", "estimate"),
    "weft.runs": ("Run",),
    "weft.search": ("Front",),
    "weft.space": ("Space", "Stream", "Subnet", "make_stream"),
    "weft.supernet": ("Chain", "Choice", "Elastic", "Optional", "Shared", "extract", "initialise"),
}
_NAMES = {name: module for module, names in _HOME.items() for name in names}
_PACKAGES = {
    name: f"weft.{name}" for name in ("data", "pipeline", "plan", "runs", "search", "space", "supernet", "tune", "zoo")
}
_PACKAGES["elastic"] = "weft.supernet.elastic"


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(_PACKAGES[name])
    raise AttributeError(f"module 'weft' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*_NAMES, *_PACKAGES, "__version__"])


__all__ = [
    "Bounded",
    "Chain",
    "Choice",
    "Data",
    "Delayed",
    "Elastic",
    "Estimate",
    "Exact",
    "Front",
    "Lagged",
    "Loader",
    "Optimizer",
    "Optional",
    "Residency",
    "Run",
    "Shared",
    "ShiftFlip",
    "Space",
    "Stream",
    "Subnet",
    "Tensors",
    "Trained",
    "Validate",
    "WeftError",
    "accuracy",
    "cross_entropy",
    "distillation",
    "estimate",
    "extract",
    "initialise",
    "load_run",
    "make_stream",
    "retrain",
    "search",
    "train",
    "tune",
]
