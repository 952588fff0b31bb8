"""The trials of a study as records, and their storage: Optuna's tables in SQLite, PostgreSQL, or whatever else its
``RDBStorage`` takes.

This module alone uses the interface of Optuna's storages; what it writes, Optuna and its dashboard read as their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from weft.errors import TuneError, WeftError, install_extra
from weft.space import Space, Value
from weft.tune.study.optuna import STATES, State, distributions, optuna_module, optuna_state, silence_optuna

Direction = Literal["minimize", "maximize"]

_NONE: Mapping[Any, Any] = MappingProxyType({})
REPORT, RUNGS, UNSTORED = "weft:report:", "weft:rungs", "weft:unstored"
BUSY = 120.0
"""Seconds that SQLite waits for a file that another process has locked."""

T = TypeVar("T")


def default_url(directory: Path | str) -> str:
    """The storage of a study that names none: a file in its directory."""
    return f"sqlite:///{Path(directory) / 'study.db'}"


def shown_url(url: str) -> str:
    """A storage URL without its password."""
    return str(_url(url).render_as_string(hide_password=True))


class Storage:
    """One study's rows, which this process alone writes."""

    def __init__(self, url: str, study: str) -> None:
        self._name, self.shown = study, shown_url(url)
        self._optuna = optuna_module()
        self._study: int | None = None
        self._ids: dict[int, int] = {}
        self._stack = ExitStack()
        try:
            self._rows = self._call(lambda: self._connected(url))
            self._study = self._call(self._find)
        except BaseException:
            self.close()
            raise

    @property
    def exists(self) -> bool:
        """Whether the database has a study of this name."""
        return self._study is not None

    def close(self) -> None:
        self._stack.close()

    def discard(self) -> None:
        """Remove the study with all its trials. It is tried once, and no matter if it fails."""
        with suppress(Exception), silence_optuna():
            self._rows.delete_study(self._study)

    def create(self, directions: Sequence[str], names: Sequence[str] = ()) -> None:
        kinds = self._optuna.study.StudyDirection
        given = [kinds[one.upper()] for one in directions]
        self._study = self._call(lambda: int(self._rows.create_new_study(given, self._name)))
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

        def add() -> bool:
            with suppress(KeyError):
                self._id(number)
                return False
            found = self._ids[number] = self._rows.create_new_trial(self._study, trial)
            return bool(self._rows.get_trial(found).number == number)

        if not self._call(add):
            raise TuneError(f"trial {number} of the study '{self._name}' was written by someone else; use another name")

    def start(self, number: int) -> None:
        """A waiting trial becomes a running one."""
        self._set(number, lambda id: self._rows.set_trial_state_values(id, self._optuna.trial.TrialState.RUNNING))

    def report(self, number: int, step: int, value: float) -> None:
        self._set(number, lambda id: self._rows.set_trial_intermediate_value(id, step, value))

    def set_attrs(self, number: int, attrs: Mapping[str, Any]) -> None:
        """What Optuna or the study needs of a trial; not shown to people."""
        for name in attrs:
            self._set(number, partial(self._rows.set_trial_system_attr, key=name, value=attrs[name]))

    def set_info(self, number: int, info: Mapping[str, Any]) -> None:
        """What people want to know of a trial."""
        for name in info:
            self._set(number, partial(self._rows.set_trial_user_attr, key=name, value=info[name]))

    def finish(self, number: int, state: State, values: Sequence[float] | None) -> None:
        written = None if values is None else list(values)
        self._set(number, lambda id: self._rows.set_trial_state_values(id, optuna_state(state), written))

    def _set(self, number: int, write: Callable[[int], object]) -> None:
        self._call(lambda: write(self._id(number)))

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

    def _connected(self, url: str) -> Any:
        where = _url(url)
        if where.drivername == "postgresql":
            where = where.set(drivername="postgresql+psycopg")  # which weft[postgres] installs
        options: dict[str, Any] = {"pool_pre_ping": True}
        if where.get_backend_name() == "sqlite":
            options["connect_args"] = {"timeout": BUSY}
        written = where.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")  # Optuna formats it
        rows = self._optuna.storages.RDBStorage(written, engine_kwargs=options)
        self._stack.callback(rows.engine.dispose)
        self._stack.callback(rows.remove_session)
        return rows

    def _call(self, operation: Callable[[], T]) -> T:
        try:
            with silence_optuna():
                return operation()
        except WeftError:
            raise
        except KeyError as error:
            raise TuneError(f"{self.shown} has lost rows of the study '{self._name}': {error}") from error
        except ImportError as error:
            hint = f": {install_extra('postgres')}" if self.shown.startswith("postgresql") else ""
            raise TuneError(f"{self.shown} needs a driver that is not installed ({_line(error)}){hint}") from error
        except Exception as error:
            if (reason := _unreachable(error)) is None:
                raise TuneError(f"{self.shown} refuses the study '{self._name}': {_line(error)}") from error
            raise TuneError(
                f"{self.shown} cannot be reached ({reason}); check the address, and who may write there; "
                "continue a study that has begun with --resume (resume=True)"
            ) from error


def _url(written: str) -> Any:
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(written)
    except (ArgumentError, ValueError):  # which may show a password
        raise TuneError("the storage is no URL; write sqlite:///study.db or postgresql://user@host/name") from None


def _unreachable(error: BaseException | None) -> str | None:
    """Why a database does not answer; None if the error is of another kind."""
    from sqlalchemy import exc

    while error is not None:
        if isinstance(error, exc.OperationalError | exc.InterfaceError):
            return _line(error.orig)
        if isinstance(error, exc.TimeoutError):
            return _line(error)
        error = error.__cause__
    return None


def _line(error: BaseException | None) -> str:
    """What an error says, without its SQL, in one short line."""
    return " ".join(str(getattr(error, "__cause__", None) or error).partition("[SQL")[0].split())[:200]


# A record: one trial as it stands, what a later trial may see of it, and the row that keeps it.


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """``waiting`` is enqueued by hand, ``running`` is proposed and not ended; the other states are final."""

    number: int
    params: Mapping[str, Value]
    state: State
    values: tuple[float, ...] | None = None
    """One per objective; of a pruned trial those of its last report, where they are numbers."""
    reports: Mapping[int, tuple[float, ...]] = field(default_factory=lambda: _NONE)
    """By step."""
    info: Mapping[str, Any] = field(default_factory=lambda: _NONE)
    """How it ran: its fit, devices, memory, seconds, error, and so on."""
    attrs: Mapping[str, Any] = field(default_factory=lambda: _NONE, repr=False, compare=False)
    """What the sampler keeps with the trial, such as its generation."""
    pruner_state: tuple[Mapping[str, Any], ...] = field(default=(), repr=False, compare=False)
    """What the pruner keeps with it, for each objective."""

    @property
    def ended(self) -> bool:
        return self.state in ("complete", "pruned", "failed")


def must_have_ended(number: int, max_concurrent: int) -> int:
    """How many trials end before trial ``number`` is proposed: no more than ``max_concurrent`` are open at once.

    >>> must_have_ended(9, 8), must_have_ended(3, 8)
    (2, 0)
    """
    return max(number + 1 - max_concurrent, 0)


def visible(records: Sequence[TrialRecord], number: int, max_concurrent: int) -> list[TrialRecord]:
    """What trial ``number`` may know: those of the trials before it that must have ended, the others as running.

    Which of the others have ended by now depends on how fast they ran. Their values are hidden whatever their state, so
    that a proposal depends on the seed and on results alone; their parameters depend on nothing else. Of a failed trial
    only that it failed is seen: how far it came may have been a matter of time.
    """
    final = must_have_ended(number, max_concurrent)
    if any(not record.ended for record in records[:final]):
        raise TuneError(f"trial {number} is proposed, and pruned, once every trial before {final} has ended")
    seen = []
    for record in records[:number]:
        if record.number >= final or record.state == "failed":
            state: State = "running" if record.number >= final else "failed"
            record = replace(record, state=state, values=None, reports=_NONE, info=_NONE, pruner_state=())
        seen.append(record)
    return seen


def new_row(space: Space, record: TrialRecord) -> Any:
    """A trial of Optuna for one that is proposed or enqueued."""
    return optuna_module().trial.create_trial(
        state=optuna_state(record.state),
        params=dict(record.params),
        distributions=distributions(space, record.params),
        system_attrs=stored_attrs(record.attrs),
    )


def record_of(space: Space, row: Any, objectives: int) -> TrialRecord:
    """The record that a trial of Optuna stands for, with the space's own values."""
    system = dict(row.system_attrs)
    params = {name: space.choices[name].canonical(row.params[name]) for name in space.choices if name in row.params}
    if objectives == 1:
        reports: dict[int, tuple[float, ...]] = {s: (float(v),) for s, v in row.intermediate_values.items()}
    else:
        written = {name: value for name, value in system.items() if name.startswith(REPORT)}
        reports = {int(name.removeprefix(REPORT)): tuple(map(float, value)) for name, value in written.items()}
    return TrialRecord(
        number=row.number,
        params=params,
        state=next(state for state, name in STATES.items() if name == row.state.name),
        values=None if row.values is None else tuple(row.values),
        reports=dict(sorted(reports.items())),
        info=dict(row.user_attrs),
        attrs={name: value for name, value in system.items() if not name.startswith((REPORT, RUNGS))},
        pruner_state=tuple(system.get(RUNGS, ())),
    )


def stored_attrs(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """What is written of a sampler's attributes: all but the pickles of CMA-ES, of which it writes the names alone.

    A pickle from a database that others can write to is theirs to run here; a sampler's state can be had again by
    proposing the trial again.
    """
    pickles = sorted(name for name in attrs if ":optimizer:" in name)
    written = {name: value for name, value in attrs.items() if name not in pickles}
    return {**written, UNSTORED: pickles} if pickles else written


def incomplete(record: TrialRecord) -> bool:
    """Whether the record was read back without what its sampler kept in memory alone."""
    return any(name not in record.attrs for name in record.attrs.get(UNSTORED, ()))


def restored_from(records: Sequence[TrialRecord]) -> Iterator[TrialRecord]:
    """Of the records that a proposal sees, those from which CMA-ES might continue: back to the last complete one."""
    for record in reversed(records):
        if record.attrs.get(UNSTORED) or any(":optimizer:" in name for name in record.attrs):
            if record.state in ("complete", "pruned"):
                yield record
            if record.state == "complete":
                return
