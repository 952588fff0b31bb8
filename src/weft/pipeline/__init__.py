"""How it runs: the consistency of layers, the sequential law, runs of it, and what their results are worth."""

from weft.pipeline.callbacks import Callback, MLflow, TensorBoard, WeightsAndBiases
from weft.pipeline.consistency import Bounded, Consistency, Delayed, Exact, Lagged, parse
from weft.pipeline.evaluate import evaluate, recalibrated
from weft.pipeline.law import Law
from weft.pipeline.losses import accuracy, cross_entropy, distillation, mean_squared_error
from weft.pipeline.optimizer import Optimizer
from weft.pipeline.rate import make_schedule
from weft.pipeline.residency import Residency
from weft.pipeline.sequential import Sequential
from weft.pipeline.settings import Settings, Validate
from weft.pipeline.train import Trained, load_run, retrain, train

__all__ = [
    "Bounded",
    "Callback",
    "Consistency",
    "Delayed",
    "Exact",
    "Lagged",
    "Law",
    "MLflow",
    "Optimizer",
    "Residency",
    "Sequential",
    "Settings",
    "TensorBoard",
    "Trained",
    "Validate",
    "WeightsAndBiases",
    "accuracy",
    "cross_entropy",
    "distillation",
    "evaluate",
    "load_run",
    "make_schedule",
    "mean_squared_error",
    "parse",
    "recalibrated",
    "retrain",
    "train",
]
