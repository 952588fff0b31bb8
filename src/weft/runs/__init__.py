"""The record of a run: its directory, events, checkpoints and results, complete after any crash."""

from __future__ import annotations

from weft.runs.checkpoints import Checkpoints
from weft.runs.events import Events
from weft.runs.run import Run, list_runs

__all__ = ["Checkpoints", "Events", "Run", "list_runs"]
