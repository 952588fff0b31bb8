"""Starts the stages of a pipeline on this machine, starts all again when one dies, and gives back what they left."""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing.resource_tracker
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from weft.distributed.env import on_signals
from weft.distributed.remote_call import STOPPED, Call, pickled, stage
from weft.distributed.store import (
    ATTEMPT,
    PARENT,
    FromStages,
    ask_to_stop,
    get_death,
    get_hang,
    prefix,
    refuse_inside_a_stage,
    reported,
)
from weft.errors import TrainError, WeftError
from weft.runs.events import Callback

logger = logging.getLogger("weft")

GRACE = 60
"""Seconds that stages have to stop by themselves after Ctrl-C or SIGTERM, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT says
otherwise. Before torch 2.12, elastic gives 30 and cannot be told."""

_one_at_a_time = threading.Lock()


def launch(
    stages: int,
    call: Call,
    *,
    restarts: int = 3,
    threads: int = 1,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Makes the call in `stages` processes, with RANK, WORLD_SIZE and what else torchrun sets, until all have ended.

    Returns what stage 0 gave to `report` ({} if nothing). When a stage dies, all are started again, `restarts` times
    at most; then TrainError. What a stage gave to `report_error` is raised here, and nothing is started again. Ctrl-C,
    SIGTERM and SIGHUP become a SIGTERM to the stages, which then have 60 s, and end in KeyboardInterrupt; a second one
    kills the stages at once.

    Each stage has so many `threads`. `callbacks` are called here, with each event that stage 0 gives to an
    `EventsToParent`; those of steps that are done again after a restart come again. Nothing listens beyond loopback.
    """
    refuse_inside_a_stage()
    payload = pickled(call)
    variables = {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0"),
    }
    if not _one_at_a_time.acquire(blocking=False):
        raise TrainError("this process already runs a pipeline: wait for it, or start the other one in another process")
    try:
        return _Launch(restarts, callbacks).run(stages, payload, variables)
    finally:
        _one_at_a_time.release()


class _Launch:
    def __init__(self, restarts: int, callbacks: Sequence[Callback]) -> None:
        self.restarts = restarts
        self.meeting = Loopback(f"weft-{os.getpid()}", self._on_start, self._on_round)
        self.deaths = Deaths()
        self.forwarded = FromStages(callbacks)
        self.stops = 0
        self.busy = False

    def run(self, stages: int, payload: bytes, variables: Mapping[str, str]) -> dict[str, Any]:
        failure = ""
        with (
            tempfile.TemporaryDirectory(prefix="weft-") as folder,
            inherited(variables),
            quiet(self.deaths),
            on_signals(self._on_signal, "SIGINT", "SIGTERM", "SIGHUP"),
        ):
            try:
                elastic_launch(self._config(stages, folder), stage)(payload)
            except (SignalException, _Reported):
                pass
            except ChildFailedError as problem:
                failure = self._failure(problem.failures)
            except Exception:
                # Elastic can stumble over stages that end while it stops them: the user's wish stands.
                if not self.stops:
                    raise
            finally:
                self.busy = True  # a signal from here on is only counted
                kill_stages()
        self._show()
        # A reported error comes first, even while stopping: a checkpoint that met a full disk is not there.
        outcome = reported(self.meeting.store)
        if self.stops:
            raise KeyboardInterrupt
        if failure:
            raise TrainError(failure)
        return outcome

    def _config(self, stages: int, folder: str) -> LaunchConfig:
        options: dict[str, Any] = {}
        if any(item.name == "shutdown_timeout" for item in dataclasses.fields(LaunchConfig)):
            options["shutdown_timeout"] = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", GRACE))
        return LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=stages,
            run_id=self.meeting.get_run_id(),
            role="stage",
            rdzv_backend=BACKEND,
            rdzv_configs={"handler": self.meeting},
            max_restarts=self.restarts,
            monitor_interval=0.1,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="",  # elastic's handlers would stay when it is done, and undo nohup
            **options,
        )

    def _died(self, last: tuple[int, int] | None) -> str:
        if noticed := get_hang(self.meeting.store):
            return noticed
        if last is None:
            return "a stage died"
        rank, code = last
        if code < 0:
            hint = " (it may have run out of memory)" if code == -signal.SIGKILL else ""
            return f"rank {rank} was killed by signal {-code}{hint}"
        text = get_death(self.meeting.store, rank)
        return f"rank {rank} ended with exit code {code}" + (f": {text}" if text else "")

    def _failure(self, failures: Mapping[int, ProcessFailure]) -> str:
        # Those that elastic stopped are no cause, and an exit often follows from another stage's violent end.
        codes = {rank: failure.exitcode for rank, failure in failures.items()}
        rank = min(codes, key=lambda rank: (codes[rank] in (-signal.SIGTERM, STOPPED), codes[rank] > 0))
        times = "once" if self.restarts == 1 else f"{self.restarts} times"
        death = self._died((rank, codes[rank]))
        return f"{death}; all stages were restarted {times}, which is the most allowed"

    def _on_start(self, attempt: int) -> None:
        if self.stops:
            raise _stop()
        if attempt:
            self._show()
            try:
                reported(self.meeting.store)
            except WeftError as problem:
                raise _Reported from problem  # the stages are not started again
            self.forwarded.forget()
            logger.warning(
                "%s; all stages start again (%d of %d)", self._died(self.deaths.last), attempt, self.restarts
            )
            self.deaths.last = None
        self.busy = True

    def _on_round(self) -> None:
        self.busy = False
        self._show()
        if self.stops:
            raise _stop()

    def _show(self) -> None:
        busy, self.busy = self.busy, True  # what a signal raises would look like a mistake of a callback
        try:
            self.forwarded.read(self.meeting.store)
        finally:
            self.busy = busy

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stops += 1
        if self.stops > 1:
            kill_stages()
            return
        ask_to_stop(self.meeting.store)
        # Elastic would lose sight of stages if it were interrupted while it starts them; the next round is near.
        if not self.busy:
            raise _stop()


class _Reported(Exception):
    """A stage has reported an error."""


def _stop() -> SignalException:
    return SignalException("the user wants to stop", signal.SIGTERM)


# What torch elastic needs around it while it runs stages: environment, signals, silence, and nobody left behind.

_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")


@contextmanager
def inherited(variables: Mapping[str, str]) -> Iterator[None]:
    """Adds the variables for a while: stages inherit them, and libraries read them before any code of ours runs."""
    multiprocessing.resource_tracker.ensure_running()  # it outlives the launch, so it must not pass for a stage
    touched = [*variables, PARENT, "MASTER_ADDR", "MASTER_PORT", ATTEMPT, "TORCHELASTIC_SIGNALS_TO_HANDLE"]
    before = {name: os.environ.get(name) for name in touched}
    os.environ.update({**variables, PARENT: str(os.getpid())})
    try:
        yield
    finally:
        for name in touched:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


class Deaths(logging.Handler):
    """Reads in elastic's log which stage died first, since elastic says so nowhere else before the last death."""

    last: tuple[int, int] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        values = record.args
        if str(record.msg).startswith("failed (exitcode") and isinstance(values, tuple) and len(values) > 1:
            code, rank = values[:2]
            if isinstance(code, int) and isinstance(rank, int):
                self.last = rank, code


@contextmanager
def quiet(deaths: Deaths) -> Iterator[None]:
    """Elastic's log goes to `deaths` alone; its tables and tracebacks are for those who set WEFT_DEBUG."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [item.propagate for item in loggers]
    for item in loggers:
        item.addHandler(deaths)
        item.propagate = item.propagate and bool(os.environ.get("WEFT_DEBUG"))
    try:
        yield
    finally:
        for item, propagate in zip(loggers, before, strict=True):
            item.removeHandler(deaths)
            item.propagate = propagate


def kill_stages() -> None:
    """Ends whatever stage is left, with the processes of its session. Linux only: elsewhere they end with the
    parent."""
    mark = f"{PARENT}={os.getpid()}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and mark in (folder / "environ").read_bytes().split(b"\0"):
                pid = int(folder.name)
                (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)
        except (OSError, ValueError):
            continue  # it ended meanwhile, or is not ours to read


# The meeting point of stages that share one machine: a store that listens on loopback alone, new at every start.

BACKEND = "weft-loopback"
HOST = "127.0.0.1"


class Loopback(RendezvousHandler):
    """A rendezvous of one machine for torch elastic, whose own ones listen on every interface.

    `on_start(attempt)` is called before each start of all stages and `on_round()` at every check of stages that all
    live; what they raise ends the launch. `store` is the one of the newest start, and an empty one before the first.
    A new server at each start is what torch expects of a rendezvous: keys of `init_process_group` bear no number of the
    attempt.
    """

    def __init__(self, run_id: str, on_start: Callable[[int], None], on_round: Callable[[], None]) -> None:
        self.store: Store = HashStore()
        self.attempts = 0
        self._run_id = run_id
        self._on_start = on_start
        self._on_round = on_round

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._on_start(self.attempts)
        listener = socket.create_server((HOST, 0))
        port = listener.getsockname()[1]
        server = TCPStore(
            HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
        )
        # Elastic sets these in a stage as well, but in a spawned one only once the user's script is imported.
        os.environ.update({"MASTER_ADDR": HOST, "MASTER_PORT": str(port), ATTEMPT: str(self.attempts)})
        self.store = PrefixStore(prefix(self.attempts), server)
        self.attempts += 1
        return RendezvousInfo(PrefixStore("elastic", server), 0, 1, RendezvousStoreInfo(HOST, port))

    def num_nodes_waiting(self) -> int:
        self._on_round()
        return 0

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


rendezvous_handler_registry.register(BACKEND, lambda parameters: parameters.get("handler"))
