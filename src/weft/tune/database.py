"""A database: where a study's tables are, how they are connected to, and why they do not answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from weft.errors import TuneError
from weft.tune.claim import Claim, FileClaim, ServerClaim, signature
from weft.tune.method import optuna_module

BUSY = 5.0
"""Seconds that SQLite itself waits for a lock before it says so."""


class Database:
    """One in SQLite or PostgreSQL, by its URL."""

    def __init__(self, written: str) -> None:
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import ArgumentError

        try:
            url = make_url(written)
        except (ArgumentError, ValueError):
            raise TuneError("the storage is no URL; write sqlite:///study.db or postgresql://user@host/name") from None
        self._kind = url.get_backend_name()
        if self._kind not in ("sqlite", "postgresql"):
            raise TuneError(f"studies are stored in sqlite:/// or postgresql://, not in '{self._kind}'")
        if self._kind == "sqlite" and url.database in (None, "", ":memory:"):
            raise TuneError("a study outlives its driver, so its storage is a file: write sqlite:///study.db")
        self._url = url.set(drivername="postgresql+psycopg") if self._kind == "postgresql" else url
        host = url.host or str(url.query.get("host", "localhost"))
        self._host = f"{host}:{url.port or 5432}"
        self.shown = (
            f"sqlite:///{url.database}" if self._kind == "sqlite" else f"postgresql://{self._host}/{url.database}"
        )

    def connect(self, reading: bool = False) -> Any:
        """Optuna's storage. With ``reading`` it is one that cannot write: nothing is created, not even a file."""
        from sqlalchemy.pool import NullPool

        storages = optuna_module().storages
        if self._kind == "postgresql":
            alive = {"keepalives_idle": 15, "keepalives_interval": 5, "keepalives_count": 3}
            options = {"connect_timeout": 10, "application_name": signature(), **alive}
            if reading:
                options["options"] = "-c default_transaction_read_only=on"
            return storages.RDBStorage(
                self._url.render_as_string(hide_password=False),
                engine_kwargs={"pool_pre_ping": True, "connect_args": options},
                skip_table_creation=reading,
            )
        path = Path(str(self._url.database)).absolute()
        if not path.parent.is_dir():
            raise TuneError(f"{self.shown} cannot be: there is no folder '{path.parent}'")
        if reading:
            if not path.is_file():
                raise TuneError(f"{self.shown} cannot be: there is no file '{path}'")
            look = {"poolclass": NullPool, "creator": lambda: _sqlite(path, "ro")}
            return storages.RDBStorage("sqlite:///study.db", engine_kwargs=look, skip_table_creation=True)
        if not path.exists():
            _sqlite(path, "rwc").close()
        # A connection for each operation, and never one that would make a new file: one that is moved away and comes
        # back is waited for, and nothing is written to a file that is gone. Without a write-ahead log, since that
        # neither works on shared file systems nor survives such a move.
        options = {"poolclass": NullPool, "creator": lambda: _sqlite(path, "rw")}
        return storages.RDBStorage("sqlite:///study.db", engine_kwargs=options)  # Optuna would format braces in a path

    def claim(self, engine: Any, study: str) -> Claim:
        if self._kind == "sqlite":
            return FileClaim(Path(str(self._url.database)).absolute(), study)
        return ServerClaim(engine, study)

    def unreachable(self, reason: str, waited: float) -> TuneError:
        if self._url.password:
            reason = reason.replace(str(self._url.password), "***")
        after = f" for {waited:.0f} s" if waited else ""
        check = (
            "check the path, its permissions and who else has it open"
            if self._kind == "sqlite"
            else f"check that a server runs at {self._host}, that the database exists, and user and password"
        )
        return TuneError(f"{self.shown} cannot be reached{after} ({reason}); {check}")


class Unavailable(Exception):
    """Something to wait for that the database does not call an error."""


def reason_of(error: BaseException | None) -> str | None:
    """Why a database does not answer, in one line; None if the error is of another kind."""
    import sqlite3

    from sqlalchemy import exc

    while error is not None:
        if isinstance(error, Unavailable | sqlite3.OperationalError | exc.TimeoutError):
            return str(error).splitlines()[0]
        if isinstance(error, exc.OperationalError | exc.InterfaceError):
            return " ".join(str(error.orig).split())[:200] or "no reason given"
        error = error.__cause__
    return None


def _sqlite(path: Path, mode: str) -> Any:
    import sqlite3

    return sqlite3.connect(f"file:{quote(str(path))}?mode={mode}", uri=True, timeout=BUSY, check_same_thread=False)
