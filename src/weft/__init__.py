"""Neural architecture search and training for PyTorch, reproducible to the last bit."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.data import Data as Data
    from weft.data import Loader as Loader
    from weft.data import ShiftFlip as ShiftFlip
    from weft.data import Tensors as Tensors
    from weft.engine.consistency import Bounded as Bounded
    from weft.engine.consistency import Delayed as Delayed
    from weft.engine.consistency import Exact as Exact
    from weft.engine.consistency import Lagged as Lagged
    from weft.engine.losses import Distillation as Distillation
    from weft.engine.losses import accuracy as accuracy
    from weft.engine.losses import cross_entropy as cross_entropy
    from weft.engine.losses import mean_squared_error as mean_squared_error
    from weft.engine.optimizer import Optimizer as Optimizer
    from weft.errors import WeftError as WeftError
    from weft.memory import Estimate as Estimate
    from weft.memory import estimate as estimate
    from weft.offload.config import OffloadConfig as OffloadConfig
    from weft.runs import Run as Run
    from weft.search.api import search as search
    from weft.search.front import Front as Front
    from weft.search.gradient import GradientSearchConfig as GradientSearchConfig
    from weft.search.gradient import search_gradient as search_gradient
    from weft.space import Space as Space
    from weft.space import Stream as Stream
    from weft.space import Subnet as Subnet
    from weft.space import make_stream as make_stream
    from weft.supernet import Chain as Chain
    from weft.supernet import Choice as Choice
    from weft.supernet import Elastic as Elastic
    from weft.supernet import Optional as Optional
    from weft.supernet import Shared as Shared
    from weft.supernet import extract as extract
    from weft.supernet import initialise as initialise
    from weft.trainer.api import TrainedRun as TrainedRun
    from weft.trainer.api import load_run as load_run
    from weft.trainer.api import retrain as retrain
    from weft.trainer.api import train as train
    from weft.trainer.config import Execution as Execution
    from weft.trainer.config import RunConfig as RunConfig
    from weft.trainer.config import TrainConfig as TrainConfig
    from weft.trainer.config import Validation as Validation
    from weft.trainer.metrics_log import TensorBoard as TensorBoard
    from weft.tune.api import tune as tune
    from weft.zoo.pretrained import from_transformers as from_transformers

__version__ = "0.1.0"

# Where each public name lives. `import weft` itself stays light: torch is imported with the first name that needs it.
_NAMES = {
    "weft.data": "Data Loader ShiftFlip Tensors",
    "weft.engine.consistency": "Bounded Delayed Exact Lagged",
    "weft.engine.losses": "Distillation accuracy cross_entropy mean_squared_error",
    "weft.engine.optimizer": "Optimizer",
    "weft.errors": "WeftError",
    "weft.memory": "Estimate estimate",
    "weft.offload.config": "OffloadConfig",
    "weft.runs": "Run",
    "weft.search.front": "Front",
    "weft.search.gradient": "GradientSearchConfig search_gradient",
    "weft.space": "Space Stream Subnet make_stream",
    "weft.supernet": "Chain Choice Elastic Optional Shared extract initialise",
    "weft.trainer.api": "TrainedRun load_run retrain train",
    "weft.trainer.config": "Execution RunConfig TrainConfig Validation",
    "weft.trainer.metrics_log": "TensorBoard",
    "weft.zoo.pretrained": "from_transformers",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
_PACKAGES = ("data", "elastic", "memory", "plan", "runs", "search", "space", "supernet", "tune", "zoo")
"""`weft.plan`, `weft.search` and `weft.tune` are packages that can be called."""

__all__ = [*_HOMES, "search", "tune"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"weft.{name}")
    raise AttributeError(f"module 'weft' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*_HOMES, *_PACKAGES, "__version__"])
