"""Callbacks: functions that see every event of a run, such as TensorBoard's writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.errors import TrainError
from weft.runs import ScalarWriter

Event = Mapping[str, Any]
Callback = Callable[[Event], None]
"""Called with each event as it is written to ``events.jsonl``; ``event["event"]`` says which kind it is."""

_ENDS = ("finished", "stopped", "failed")


def scalars(event: Event) -> dict[str, float]:
    """The numbers of a step or validation event under the names that trackers show.

    >>> scalars({"event": "step", "step": 3, "loss": 0.5, "subnets": ["a"]})
    {'train/loss': 0.5}
    """
    if event["event"] == "step":
        return {f"train/{k}": float(v) for k, v in event.items() if isinstance(v, float) and k != "time"}
    if event["event"] == "validation":
        return {f"validation/{event['pick']}/{k}": float(v) for k, v in event["scores"].items()}
    return {}


class TensorBoard:
    """Writes scalars as TensorBoard event files; built in, needs no other package."""

    def __init__(self, folder: Path | str) -> None:
        self._folder = folder
        self._writer: ScalarWriter | None = None

    def __call__(self, event: Event) -> None:
        for tag, value in scalars(event).items():
            self._writer = self._writer or ScalarWriter(self._folder)
            self._writer.add(tag, value, int(event["step"]))
        if event["event"] in _ENDS and self._writer is not None:
            self._writer.close()
            self._writer = None


class WeightsAndBiases:
    """Sends scalars to Weights & Biases; needs ``pip install wandb``, and takes the arguments of ``wandb.init``."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._run: Any = None

    def __call__(self, event: Event) -> None:
        if event["event"] == "started":
            self._run = _imported("wandb").init(config=dict(event.get("law", {})), **self._options)
        found = scalars(event)
        if found and self._run is not None:
            self._run.log(found, step=int(event["step"]))
        if event["event"] in _ENDS and self._run is not None:
            self._run.finish(exit_code=int(event["event"] == "failed"))


class MLflow:
    """Sends scalars to MLflow; needs ``pip install mlflow``, and takes the arguments of ``mlflow.start_run``."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._mlflow: Any = None

    def __call__(self, event: Event) -> None:
        if event["event"] == "started":
            self._mlflow = _imported("mlflow")
            self._mlflow.start_run(**self._options)
            self._mlflow.log_params({k: str(v) for k, v in event.get("law", {}).items()})
        found = scalars(event)
        if found and self._mlflow is not None:
            self._mlflow.log_metrics(found, step=int(event["step"]))
        if event["event"] in _ENDS and self._mlflow is not None:
            self._mlflow.end_run("FAILED" if event["event"] == "failed" else "FINISHED")


def _imported(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise TrainError(f"this callback needs the package {name}: pip install {name}") from None
