"""The storage of a study: Optuna's tables in SQLite, PostgreSQL, or whatever else its ``RDBStorage`` takes.

This module alone uses the interface of Optuna's storages; what it writes, Optuna and its dashboard read as their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from weft.errors import TuneError, WeftError, install_extra
from weft.runs.run import hold
from weft.tune.study.optuna import optuna_module, silence_optuna
from weft.utils import rng

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
            self._call(lambda: self._stack.enter_context(one_driver(self._rows.engine, study)))
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
        told = where.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")  # Optuna formats it
        rows = self._optuna.storages.RDBStorage(told, engine_kwargs=options)
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
                "a study that has begun goes on with --resume (resume=True)"
            ) from error


@contextmanager
def one_driver(engine: Any, study: str) -> Iterator[None]:
    """Within the block no other process drives this study; TuneError or RunError if one does.

    The lock is a file beside a SQLite database and an advisory lock in PostgreSQL. Both are gone with their process. In
    other databases there is none: there whoever comes second is refused when it adds a trial that is there already.
    """
    kind, place = engine.url.get_backend_name(), engine.url.database
    if kind == "sqlite" and place and place != ":memory:":
        name = hashlib.sha256(study.encode()).hexdigest()[:8]
        with hold(Path(f"{place}.{name}.lock")):
            yield
    elif kind == "postgresql":
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            _lock(connection, study)
            try:
                yield
            finally:
                connection.invalidate()  # closed rather than pooled: the lock ends with the connection
    else:
        yield


def _lock(connection: Any, study: str) -> None:
    from sqlalchemy import text
    from sqlalchemy.exc import OperationalError

    connection.execute(text("SET lock_timeout = '1s'"))  # a server notices a moment later that a driver was killed
    try:
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": rng.key("study", study)})
    except OperationalError:
        raise TuneError(
            f"the study '{study}' is being run by another process; wait for it, stop it, or use another name"
        ) from None


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
