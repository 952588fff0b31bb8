"""A stage's line to the process that started it: the store that they share, and the end of one with the other."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from weft.distributed.env import read_env
from weft.errors import PipelineError, TrainError, WeftError
from weft.runs.events import Callback, Event
from weft.utils.files import to_json

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

log = logging.getLogger("weft.pipeline")

PARENT = "WEFT_PARENT"
"""The variable in which `launch` gives its process id to the stages."""

ATTEMPT = "TORCHELASTIC_RESTART_COUNT"


def connect(timeout: float = 300.0) -> Store:
    """The store of all stages, empty at every restart; `timeout` in seconds holds for each wait on it.

    Under `launch` every stage is a client of the parent's store, which listens on loopback. Elsewhere (torchrun over
    many machines, srun) it is what MASTER_ADDR and MASTER_PORT name, and stage 0 opens it where nobody else has.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    wait = timedelta(seconds=timeout)
    store: Store
    if PARENT in os.environ:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=wait)
    else:
        me = read_env()
        if me is None:
            raise TrainError("a stage is started by weft, torchrun or srun, and this process by none of them")
        store = next(rendezvous("env://", me.rank, me.world, timeout=wait))[0]
    return PrefixStore(prefix(int(os.environ.get(ATTEMPT, 0))), store)


def prefix(attempt: int) -> str:
    """Before every key of this start of the stages, so that none reads what an earlier one left."""
    return f"weft/{attempt}"


def report(store: Store, outcome: Mapping[str, Any]) -> None:
    """Sets what `launch` returns: stage 0 does so once, over the store of `connect`. Plain JSON values only."""
    store.set("outcome", json.dumps(dict(outcome)))


def report_error(store: Store, problem: WeftError) -> None:
    """The error that `launch` is to raise: nothing is started again, whatever the stages exit with.

    The first report stays, since what other stages meet later mostly follows from it.
    """
    store.compare_set("error", "", json.dumps({"class": type(problem).__name__, "text": str(problem)}))


def report_death(store: Store, rank: int, problem: BaseException) -> None:
    """What a stage dies of, for the message about it: unlike `report_error` it does not keep all from a new start."""
    store.set(f"death/{rank}", f"{type(problem).__name__}: {problem}".splitlines()[0])


def get_death(store: Store, rank: int) -> str:
    key = f"death/{rank}"
    return store.get(key).decode() if store.check([key]) else ""


def report_self(store: Store, rank: int) -> None:
    """Where a stage can be found by others of its machine, should it hang."""
    store.set(f"process/{rank}", json.dumps([socket.gethostname(), os.getpid()]))


def set_hang(store: Store, rank: int, text: str) -> None:
    """What another stage has noticed. On one machine the one that hangs is ended, which a stopped process may never
    do by itself, and elastic would give it a minute for."""
    key = f"process/{rank}"
    host, pid = json.loads(store.get(key)) if store.check([key]) else ("", 0)
    if host == socket.gethostname():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # it is dead, which whoever started it has seen
    store.compare_set("hang", "", text)


def get_hang(store: Store) -> str:
    return store.get("hang").decode() if store.check(["hang"]) else ""


def reported(store: Store) -> dict[str, Any]:
    """What `report` left, or {}; raises what `report_error` left. Classes are looked up by name, nothing is
    unpickled."""
    if store.check(["error"]):
        error = json.loads(store.get("error"))
        kind = vars(sys.modules[WeftError.__module__]).get(error["class"])
        if not (isinstance(kind, type) and issubclass(kind, WeftError)):
            kind = TrainError
        raise kind(error["text"])
    if store.check(["outcome"]):
        outcome: dict[str, Any] = json.loads(store.get("outcome"))
        return outcome
    return {}


def ask_to_stop(store: Store) -> None:
    """Said by the parent before it sends SIGTERM because the user wants to stop."""
    store.set("stop", "")


def asked_to_stop(store: Store) -> bool:
    """After a SIGTERM: True if the user wants to stop, which is worth a checkpoint; False if another stage died and
    all are about to be started again, when it is best to end at once."""
    return PARENT not in os.environ or bool(store.check(["stop"]))


def refuse_inside_a_stage() -> None:
    """A script without a guard runs again in each process that is spawned from it, and must not start more."""
    if PARENT not in os.environ:
        return
    problem = TrainError(
        "several stages were asked for inside a stage, since each stage imports the script that started it: "
        "put what the script does under `if __name__ == '__main__':`"
    )
    try:
        report_error(connect(timeout=10.0), problem)
    except Exception:
        raise problem from None
    raise SystemExit(1)


def die_with_parent() -> None:
    """From here on this process is killed when the one that called `launch` ends, however that ends.

    Linux does it by itself for a direct child (of the thread that called `launch`); otherwise a thread waits for it.
    """
    parent = int(os.environ.get(PARENT, os.getppid()))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # 1 is PR_SET_PDEATHSIG
        if os.getppid() == parent:
            return
    # Under a wrapper, on another system, or where the parent was gone before the call above.
    threading.Thread(target=_follow, args=(parent,), name="weft-parent", daemon=True).start()


def _follow(parent: int) -> None:
    with suppress(ProcessLookupError):
        if hasattr(os, "pidfd_open"):  # which also sees the end of one that nobody has waited for
            select.select([os.pidfd_open(parent)], [], [])
        while not hasattr(os, "pidfd_open"):
            with suppress(PermissionError):  # which means that it lives, as another user
                os.kill(parent, 0)
            time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


# Small values that the ranks of a run exchange outside of their links, as JSON in the store that they share.


class ControlStore:
    """The store as ranks use it: every key is set once, and ``get`` waits until it is."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self.store, self.rank, self.world = store, rank, world

    @classmethod
    def alone(cls) -> ControlStore:
        """That of a run in a single process."""
        from torch.distributed import HashStore  # type: ignore[attr-defined]

        return cls(HashStore(), 0, 1)

    def set(self, key: str, value: Any) -> None:
        self.store.set(f"value/{key}", json.dumps(to_json(value)))

    def get(self, key: str) -> Any:
        return json.loads(self.store.get(f"value/{key}"))

    def gather(self, key: str, value: Any) -> list[Any]:
        """The values of all ranks, in order; everyone must call it."""
        self.set(f"{key}/{self.rank}", value)
        return [self.get(f"{key}/{rank}") for rank in range(self.world)]

    def assert_same_config(self, config: Mapping[str, Any]) -> None:
        """Raises PipelineError on every rank that was given another configuration than rank 0."""
        mine = json.loads(json.dumps(to_json(config)))
        if self.rank == 0:
            self.set("config", mine)
        first = self.get("config")
        different = [key for key in sorted({*mine, *first}) if mine.get(key) != first.get(key)]
        if different:
            values = "; ".join(f"{key} is {mine.get(key)} here and {first.get(key)} on rank 0" for key in different[:4])
            raise PipelineError(
                f"rank {self.rank} was started with another configuration: {values}. Start all with the same command"
            )

    def clone(self) -> ControlStore:
        """The same over a connection of its own, for another thread."""
        return ControlStore(self.store.clone(), self.rank, self.world)  # type: ignore[attr-defined]


# What stages say to the process that started them: their log, and the run's events.

_COUNT = "logs"


class ToParent(logging.Handler):
    """Puts what a stage logs into the store that it shares with its parent; on stderr where that is gone."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store: Store = store.clone()  # type: ignore[attr-defined]

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        try:
            number = self._store.add(_COUNT, 1)
            self._store.set(f"log/{number}", json.dumps([record.name, record.levelno, text]))
        except Exception:
            print(text, file=sys.stderr)


class EventsToParent:
    """A callback of stage 0, the only one that writes events: puts each into the store."""

    def __init__(self, store: Store) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._count = 0

    def __call__(self, event: Event) -> None:
        self._count += 1
        self._store.set(f"event/{self._count}", json.dumps(to_json(event)))


class FromStages:
    """The parent's side: ``read`` logs here what the stages have logged since, and shows their events to callbacks."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = list(callbacks)
        self.forget()

    def read(self, store: Store) -> None:
        # A number is taken before its text is there: the next look finds it.
        while self._logs < store.add(_COUNT, 0) and store.check([f"log/{self._logs + 1}"]):
            self._logs += 1
            name, level, text = json.loads(store.get(f"log/{self._logs}"))
            logging.getLogger(name).log(level, "%s", text)
        while self._callbacks and store.check([key := f"event/{self._events + 1}"]):
            self._events += 1
            self._show(json.loads(store.get(key)))
            store.delete_key(key)

    def forget(self) -> None:
        """The store of the next start is a new one."""
        self._logs = self._events = 0

    def _show(self, event: Event) -> None:
        for callback in list(self._callbacks):
            try:
                callback(event)
            except Exception:
                log.exception("a callback failed and sees no more of this run")
                self._callbacks.remove(callback)
