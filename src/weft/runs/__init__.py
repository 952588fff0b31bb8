"""The record of a run: its directory, events, checkpoints and results, complete after any crash."""

from __future__ import annotations

from weft.runs.checkpoints import Checkpoint, Checkpoints
from weft.runs.events import Events
from weft.runs.index import RunSummary, list_runs
from weft.runs.run import Run
from weft.runs.shards import ShardEntry

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "Events",
    "Run",
    "RunSummary",
    "ShardEntry",
    "list_runs",
]
