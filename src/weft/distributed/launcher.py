"""Starts the stages of a pipeline on this machine, starts all again when one dies, and gives back what they left."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from weft.errors import TrainError, WeftError
from weft.pipeline.call import STOPPED, Call, pickled, stage
from weft.pipeline.loopback import BACKEND, Loopback
from weft.pipeline.parent import (
    ask_to_stop,
    asked_to_stop,
    connect,
    death,
    die_with_parent,
    hang,
    refuse_inside_a_stage,
    report,
    report_error,
    reported,
)
from weft.pipeline.ranks import Ranks, ranks
from weft.pipeline.stagelog import FromStages
from weft.pipeline.surroundings import Deaths, inherited, kill_stages, quiet, signals

__all__ = [
    "Call",
    "Command",
    "Ranks",
    "asked_to_stop",
    "connect",
    "die_with_parent",
    "launch",
    "ranks",
    "report",
    "report_error",
]

logger = logging.getLogger("weft")

Command = Sequence[str]
"""A program and its arguments, as for `subprocess.run`."""

GRACE = 60
"""Seconds that stages have to stop by themselves after Ctrl-C or SIGTERM, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT says
otherwise. Before torch 2.12, elastic gives 30 and cannot be told."""

_one_at_a_time = threading.Lock()


def launch(
    stages: int,
    work: Command | Call,
    *,
    restarts: int = 3,
    threads: int | None = None,
    environment: Mapping[str, str] = {},
) -> dict[str, Any]:
    """Runs the work in `stages` processes, with RANK, WORLD_SIZE and what else torchrun sets, until all have ended.

    Returns what stage 0 gave to `report` ({} if nothing). When a stage dies, all are started again, `restarts` times
    at most; then TrainError. What a stage gave to `report_error` is raised here, and nothing is started again. Ctrl-C,
    SIGTERM and SIGHUP become a SIGTERM to the stages, which then have 60 s, and end in KeyboardInterrupt; a second one
    kills the stages at once.

    `threads` a stage; None is OMP_NUM_THREADS, else 1. `environment` is added to that of the stages. Nothing
    listens beyond loopback.
    """
    refuse_inside_a_stage()
    if stages < 1 or restarts < 0:
        raise TrainError(f"a launch needs stages >= 1 and restarts >= 0, not stages={stages} and restarts={restarts}")
    entry, arguments = _entry(work)
    variables = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1") if threads is None else str(threads),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0"),
        **environment,
    }
    if not _one_at_a_time.acquire(blocking=False):
        raise TrainError("this process already runs a pipeline: wait for it, or start the other one in another process")
    try:
        return _Launch(restarts).run(stages, entry, arguments, variables)
    finally:
        _one_at_a_time.release()


class _Launch:
    """One launch, from its first start to its end."""

    def __init__(self, restarts: int) -> None:
        self.restarts = restarts
        self.meeting = Loopback(f"weft-{os.getpid()}", self._on_start, self._on_round)
        self.deaths = Deaths()
        self.logs = FromStages()
        self.stops = 0
        self.busy = False

    def run(
        self, stages: int, entry: str | Callable[..., Any], arguments: list[Any], variables: Mapping[str, str]
    ) -> dict[str, Any]:
        failure = ""
        with (
            tempfile.TemporaryDirectory(prefix="weft-") as folder,
            inherited(variables),
            quiet(self.deaths),
            signals(self._on_signal),
        ):
            try:
                elastic_launch(self._config(stages, folder), entry)(*arguments)
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
        self._show_logs()
        # A reported error comes first, even while stopping: a checkpoint that met a full disk is not there.
        outcome = self._reported()
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

    def _reported(self) -> dict[str, Any]:
        return reported(self.meeting.store) if self.meeting.store is not None else {}

    def _died(self, last: tuple[int, int] | None) -> str:
        if self.meeting.store is not None and (noticed := hang(self.meeting.store)):
            return noticed
        if last is None:
            return "a stage died"
        rank, code = last
        text = death(self.meeting.store, rank) if self.meeting.store is not None else ""
        if code < 0:
            hint = " (it may have run out of memory)" if code == -signal.SIGKILL else ""
            return f"rank {rank} was killed by signal {-code}{hint}"
        return f"rank {rank} ended with exit code {code}" + (f": {text}" if text else "")

    def _failure(self, failures: Mapping[int, ProcessFailure]) -> str:
        def likelihood(rank: int) -> tuple[bool, bool]:
            # Those that elastic stopped are no cause, and an exit often follows from another stage's violent end.
            code = failures[rank].exitcode
            return code in (-signal.SIGTERM, STOPPED), code > 0

        rank = min(failures, key=likelihood)
        times = "once" if self.restarts == 1 else f"{self.restarts} times"
        said = self._died((rank, failures[rank].exitcode))
        return f"{said}; all stages were restarted {times}, which is the most allowed"

    def _on_start(self, attempt: int) -> None:
        if self.stops:
            raise _stop()
        if attempt:
            self._show_logs()
            try:
                self._reported()
            except WeftError as problem:
                raise _Reported from problem  # the stages are not started again
            self.logs.forget()
            logger.warning(
                "%s; all stages start again (%d of %d)", self._died(self.deaths.last), attempt, self.restarts
            )
            self.deaths.last = None
        self.busy = True

    def _on_round(self) -> None:
        self.busy = False
        if self.stops:
            raise _stop()
        self._show_logs()

    def _show_logs(self) -> None:
        if self.meeting.store is not None:
            self.logs.read(self.meeting.store)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stops += 1
        if self.stops > 1:
            kill_stages()
            return
        if self.meeting.store is not None:
            ask_to_stop(self.meeting.store)
        # Elastic would lose sight of stages if it were interrupted while it starts them; the next round is near.
        if not self.busy:
            raise _stop()


class _Reported(Exception):
    """A stage has reported an error."""


def _stop() -> SignalException:
    return SignalException("the user wants to stop", signal.SIGTERM)


def _entry(work: Command | Call) -> tuple[str | Callable[..., Any], list[Any]]:
    if isinstance(work, Call):
        return stage, [pickled(work)]
    if isinstance(work, str) or not work or not all(isinstance(word, str) for word in work):
        raise TrainError(f"a command is a program and its arguments, each a string of its own; this is {work!r}")
    program, *words = work
    return program, [word.replace("$", "$$") for word in words]  # elastic reads `${local_rank}` and its like
