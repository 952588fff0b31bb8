"""The result of a study: its trials, the best of them, importances, and where the time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import TuneError
from weft.tune.study.storage import TrialRecord


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
    best_trials: Sequence[TrialRecord]
    """The best trial, or with several objectives all that no other beats; none where no trial is complete."""
    importances: Mapping[str, float]
    """Of the first objective."""
    time_breakdown: Mapping[str, float]
    """Seconds of this run of the study, added up over trials: running, waiting, starting."""
    seconds: float
    """That this run of the study took."""

    @property
    def best(self) -> TrialRecord:
        """The complete trial that is best by the first objective; TuneError where there is none."""
        if not self.best_trials:
            failed = sum(record.state == "failed" for record in self.trials)
            raise TuneError(
                f"no trial of '{self.name}' is complete ({failed} of {len(self.trials)} failed): the info of a trial "
                "says why"
            )
        sign = -1.0 if self.directions[0] == "maximize" else 1.0
        return min(self.best_trials, key=lambda record: (sign * (record.values or (0.0,))[0], record.number))

    def to_json(self) -> dict[str, Any]:
        """Plain values, as ``weft tune --json`` prints them."""
        return {
            "study": self.name,
            "path": str(self.path),
            "storage": self.storage,
            "objectives": dict(zip(self.objectives, self.directions, strict=True)),
            "best": [self._to_json(record) for record in self.best_trials],
            "trials": [self._to_json(record) for record in self.trials],
            "importances": dict(self.importances),
            "time": dict(self.time_breakdown),
            "seconds": self.seconds,
        }

    def _to_json(self, record: TrialRecord) -> dict[str, Any]:
        values = None if record.values is None else dict(zip(self.objectives, record.values, strict=False))
        return {
            "number": record.number,
            "state": record.state,
            "params": dict(record.params),
            "values": values,
            "notes": dict(record.info),
        }
