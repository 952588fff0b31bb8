"""A claim: that one living driver writes a study; it is gone with its process however that dies."""

from __future__ import annotations

import hashlib
import os
import socket
import time
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from weft import keys
from weft.errors import RunError, TuneError
from weft.runs.lock import hold

TRIES, PAUSE = 20, 0.05
"""How often a server is asked for a claim: it notices the end of a process a moment later."""


class Claim(Protocol):
    def renew(self) -> bool:
        """Whether the claim holds, taken anew where the connection that held it was lost."""

    def release(self) -> None: ...


class FileClaim:
    """By a locked file beside the database, one for each study in it."""

    def __init__(self, database: Path, study: str) -> None:
        name = hashlib.sha256(study.encode()).hexdigest()[:8]
        stack = ExitStack()
        try:
            stack.enter_context(hold(database.with_name(f"{database.name}.{name}.lock")))
        except RunError as error:
            holder = str(error).partition("in use by ")[2].partition(";")[0]
            if not holder:
                raise TuneError(f"cannot claim the study '{study}': {error}") from error
            raise taken(study, holder) from error
        except OSError as error:
            raise TuneError(
                f"cannot lock a file beside '{database}': {error.strerror}; keep it where one can"
            ) from error
        self._release = weakref.finalize(self, stack.close)  # at the latest when Python ends

    def renew(self) -> bool:
        return True

    def release(self) -> None:
        self._release()


class ServerClaim:
    """By an advisory lock of PostgreSQL, which belongs to a connection that is kept open for it."""

    def __init__(self, engine: Any, study: str) -> None:
        self._engine = engine
        self._key = keys.key("study", study)
        self._connection: Any = None
        for left in reversed(range(TRIES)):
            if self.renew():
                return
            if left:
                time.sleep(PAUSE)
        holder = self._ask(_HOLDER) or "another process"
        self.release()
        raise taken(study, str(holder).removeprefix("weft, "))

    def renew(self) -> bool:
        from sqlalchemy.exc import SQLAlchemyError

        if self._connection is not None:
            try:
                if self._ask(_MINE):
                    return True
            except SQLAlchemyError:
                self.release()
        if self._connection is None:
            self._connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        return bool(self._ask("SELECT pg_try_advisory_lock(:key)"))

    def release(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.invalidate()  # closed rather than pooled, so that the lock ends with it
            connection.close()

    def _ask(self, query: str) -> Any:
        from sqlalchemy import text

        return self._connection.execute(text(query), {"key": self._key}).scalar()


def signature() -> str:
    """How a driver is named to those who find its claim."""
    return f"weft, process {os.getpid()} on {socket.gethostname()}"[:63]


def taken(study: str, holder: str) -> TuneError:
    return TuneError(f"the study '{study}' is being run by {holder}; wait for it, stop it, or use another name")


_FOUND = "locktype = 'advisory' AND granted AND (classid::bigint << 32) | objid::bigint = :key"
_MINE = f"SELECT count(*) FROM pg_locks WHERE {_FOUND} AND pid = pg_backend_pid()"
_HOLDER = f"SELECT application_name FROM pg_stat_activity JOIN pg_locks USING (pid) WHERE {_FOUND}"
