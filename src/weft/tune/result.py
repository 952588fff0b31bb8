"""What a study came to: its trials, the best of them, what mattered, and where the time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import TuneError
from weft.tune.study.records import TrialRecord


@dataclass(frozen=True, slots=True)
class StudyResult:
    """A study that has ended, as values; its storage, which optuna-dashboard opens, holds the same."""

    name: str
    path: Path
    storage: str
    """Without a password."""
    objectives: tuple[str, ...]
    directions: tuple[str, ...]
    trials: Sequence[TrialRecord]
    """By number."""
    front: Sequence[TrialRecord]
    """The best trial, or with several objectives all that no other beats; none where no trial is complete."""
    importances: Mapping[str, float]
    """Of the first objective."""
    time: Mapping[str, float]
    """Seconds of this run of the driver, added up over trials: running, waiting, starting."""
    seconds: float
    """That this run of the driver took."""

    @property
    def best(self) -> TrialRecord:
        """The complete trial that is best by the first objective; TuneError where there is none."""
        if not self.front:
            failed = sum(record.state == "failed" for record in self.trials)
            raise TuneError(
                f"no trial of '{self.name}' is complete ({failed} of {len(self.trials)} failed): the notes of a trial "
                "say why"
            )
        sign = -1.0 if self.directions[0] == "maximize" else 1.0
        return min(self.front, key=lambda record: (sign * (record.values or (0.0,))[0], record.number))

    def to_json(self) -> dict[str, Any]:
        """Plain values, as ``weft tune --json`` prints them."""
        return {
            "study": self.name,
            "path": str(self.path),
            "storage": self.storage,
            "objectives": dict(zip(self.objectives, self.directions, strict=True)),
            "best": [self._told(record) for record in self.front],
            "trials": [self._told(record) for record in self.trials],
            "importances": dict(self.importances),
            "time": dict(self.time),
            "seconds": self.seconds,
        }

    def _told(self, record: TrialRecord) -> dict[str, Any]:
        values = None if record.values is None else dict(zip(self.objectives, record.values, strict=False))
        return {
            "number": record.number,
            "state": record.state,
            "params": dict(record.params),
            "values": values,
            "notes": dict(record.notes),
        }
