"""Callbacks: any function that takes the events of a run as they are written; one that writes them for TensorBoard."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from weft.errors import TrainError
from weft.runs.events import Event

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
    """Writes the losses and scores of a run into a folder for TensorBoard: ``callbacks=[weft.TensorBoard("logs")]``.

    Needs ``pip install tensorboard``.
    """

    def __init__(self, folder: Path | str) -> None:
        try:
            self._make = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError:
            raise TrainError("weft.TensorBoard needs the package tensorboard: pip install tensorboard") from None
        self._folder = str(folder)
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        for tag, value in scalars(event).items():
            self._writer = self._writer or self._make(self._folder)
            self._writer.add_scalar(tag, value, int(event["step"]))
        if event["event"] in _ENDS and self._writer is not None:
            self._writer.close()
            self._writer = None
