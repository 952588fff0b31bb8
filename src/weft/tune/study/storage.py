"""The storage of a study: Optuna's tables in SQLite or PostgreSQL, waited for while they are locked or gone.

This module alone uses the interface of Optuna's storages; what it writes, Optuna and its dashboard read as their own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from weft.errors import TuneError, nearest
from weft.tune.claim import Claim
from weft.tune.database import Database, Unavailable, reason_of
from weft.tune.method import optuna_module, quiet

PATIENCE = 120.0
"""Seconds that a database which does not answer is waited for."""

T = TypeVar("T")
_log = logging.getLogger("weft")


def default_url(directory: Path | str) -> str:
    """The storage of a study that names none: a file in its directory."""
    return f"sqlite:///{Path(directory) / 'study.db'}"


@dataclass(frozen=True, slots=True)
class Stored:
    """A study as a storage has it now."""

    name: str
    directions: tuple[str, ...]
    attrs: Mapping[str, Any]
    trials: Sequence[Any]
    """Optuna's frozen trials in order of number."""
    names: tuple[str, ...]
    """Of all studies that are there, the oldest first."""


def read_study(url: str, name: str | None = None) -> Stored:
    """Looks at a study, by default the newest, without claiming it: whoever runs it is not disturbed.

    TuneError if the storage does not answer, or has no such study.
    """
    optuna_module()
    where, rows = Database(url), None
    try:
        with quiet():
            rows = where.connect(reading=True)
            found = {one.study_name: one for one in sorted(rows.get_all_studies(), key=lambda one: int(one._study_id))}
            if not found or (name is not None and name not in found):
                asked = "study" if name is None else f"study '{name}'"
                raise TuneError(f"{where.shown} has no {asked}{nearest(name or '', found) if found else ''}")
            study = found[name or list(found)[-1]]
            directions = tuple(one.name.lower() for one in study.directions)
            trials = sorted(rows.get_all_trials(study._study_id), key=lambda one: int(one.number))
            return Stored(study.study_name, directions, dict(study.system_attrs), trials, tuple(found))
    except TuneError:
        raise
    except ImportError as error:
        raise TuneError(f"{where.shown} needs psycopg: pip install weft[postgres]") from error
    except Exception as error:
        reason = reason_of(error)
        if reason is None or "no such table" in reason:
            told = " ".join(str(error.__cause__ or error).partition("[SQL")[0].split())[:200]
            raise TuneError(f"{where.shown} holds no studies that can be read: {told}") from error
        raise where.unreachable(reason, 0) from error
    finally:
        if rows is not None:
            rows.remove_session()
            rows.engine.dispose()


class Storage:
    """One study's rows. Every operation may be repeated, and is, until it succeeds or ``patience`` seconds are over."""

    def __init__(self, url: str, study: str, patience: float = PATIENCE) -> None:
        self._name, self._patience = study, patience
        self._where = Database(url)
        self._optuna = optuna_module()
        self._rows: Any = self._call(self._where.connect, opening=True)
        self._claim: Claim | None = None
        self._study: int | None = None
        self._ids: dict[int, int] = {}
        try:
            self._claim = self._where.claim(self._rows.engine, study)
            self._study = self._call(self._find)
        except BaseException:
            self.close()
            raise

    @property
    def shown(self) -> str:
        """Where it is, without a password."""
        return self._where.shown

    @property
    def exists(self) -> bool:
        """Whether the database has a study of this name."""
        return self._study is not None

    def close(self) -> None:
        if self._claim is not None:
            self._claim.release()
        self._rows.remove_session()
        self._rows.engine.dispose()

    def discard(self) -> None:
        """Remove the study with all its trials. It is tried once, and no matter if it fails."""
        with suppress(Exception), quiet():
            self._rows.delete_study(self._study)

    def create(self, directions: Sequence[str], names: Sequence[str] = ()) -> None:
        kinds = self._optuna.study.StudyDirection

        def create() -> int:
            found = self._find()  # an earlier attempt may have come through
            if found is not None:
                return found
            return int(self._rows.create_new_study([kinds[one.upper()] for one in directions], self._name))

        self._study = self._call(create)
        if names:
            study = self._call(lambda: self._optuna.load_study(study_name=self._name, storage=self._rows))
            self._call(lambda: study.set_metric_names(list(names)))

    def directions(self) -> tuple[str, ...]:
        return tuple(one.name.lower() for one in self._call(lambda: self._rows.get_study_directions(self._study)))

    def attrs(self) -> dict[str, Any]:
        return dict(self._call(lambda: self._rows.get_study_system_attrs(self._study)))

    def set_attr(self, name: str, value: Any) -> None:
        self._call(lambda: self._rows.set_study_system_attr(self._study, name, value))

    def trials(self) -> list[Any]:
        """All of them, as Optuna's frozen trials in order of number."""
        return list(self._call(lambda: self._rows.get_all_trials(self._study)))

    def add(self, number: int, trial: Any) -> None:
        """A new trial, which must come to have this number."""

        def add() -> tuple[int, dict[str, Any]]:
            try:
                found = self._id(number)
            except KeyError:
                found = self._rows.create_new_trial(self._study, trial)
            written = self._rows.get_trial(found)
            return written.number, written.params

        if self._call(add) != (number, trial.params):
            raise TuneError(f"trial {number} of the study '{self._name}' was written by someone else; use another name")

    def start(self, number: int) -> None:
        """A waiting trial becomes a running one."""
        self._set(number, lambda id: self._rows.set_trial_state_values(id, self._optuna.trial.TrialState.RUNNING))

    def report(self, number: int, step: int, value: float) -> None:
        self._set(number, lambda id: self._rows.set_trial_intermediate_value(id, step, value))

    def keep(self, number: int, attrs: Mapping[str, Any]) -> None:
        """What Optuna or we need of a trial; not shown to people."""
        for name in attrs:
            self._set(number, partial(self._rows.set_trial_system_attr, key=name, value=attrs[name]))

    def note(self, number: int, notes: Mapping[str, Any]) -> None:
        """What people want to know of a trial."""
        for name in notes:
            self._set(number, partial(self._rows.set_trial_user_attr, key=name, value=notes[name]))

    def finish(self, number: int, state: str, values: Sequence[float] | None) -> None:
        final = self._optuna.trial.TrialState[state]
        told = None if values is None else list(values)
        self._set(number, lambda id: self._rows.set_trial_state_values(id, final, told))

    def _set(self, number: int, write: Callable[[int], object]) -> None:
        def attempt() -> None:
            # Nobody else writes this study: where it is finished, an earlier attempt came through without an answer.
            with suppress(self._optuna.exceptions.UpdateFinishedTrialError):
                write(self._id(number))

        self._call(attempt)

    def _id(self, number: int) -> int:
        if number not in self._ids:
            found = self._rows.get_trial_id_from_study_id_trial_number(self._study, number)
            self._ids[number] = int(found)
        return self._ids[number]

    def _find(self) -> int | None:
        try:
            return int(self._rows.get_study_id_from_name(self._name))
        except KeyError:
            return None

    def _call(self, operation: Callable[[], T], opening: bool = False) -> T:
        begun, pause, failed = time.monotonic(), 0.02, False
        while True:
            try:
                if failed and not opening and self._claim is not None and not self._claim.renew():
                    raise Unavailable("another driver has taken the study over")
                with quiet():
                    return operation()
            except Exception as error:
                reason = reason_of(error)
                if reason is None:
                    raise self._unknown(error) from error
                waited = time.monotonic() - begun
                # A database that was never there is a mistake to be told at once, a locked one is not.
                if waited + pause > self._patience or "readonly" in reason or (opening and "locked" not in reason):
                    raise self._where.unreachable(reason, 0 if opening else waited) from error
                if not failed:
                    _log.warning("%s does not answer (%s); waiting for up to %g s", self.shown, reason, self._patience)
                failed = True
            time.sleep(pause)
            pause = min(pause * 2, 1.0)

    def _unknown(self, error: Exception) -> Exception:
        if isinstance(error, TuneError):
            return error
        if isinstance(error, KeyError):
            return TuneError(
                f"{self.shown} has lost rows of the study '{self._name}': {' '.join(map(str, error.args))}"
            )
        if isinstance(error, ImportError):
            return TuneError(f"{self.shown} needs psycopg: pip install weft[postgres]")
        told = " ".join(str(error.__cause__ or error).split())[:200]
        return TuneError(f"{self.shown} refuses the study '{self._name}': {told}")
