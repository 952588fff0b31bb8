"""Processes of a study: forked from a clean one that has imported torch, killed with the one that runs the study; their
connections; and the loop of a worker, which gets jobs as lines of JSON, runs one after another, and reports."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from weft.distributed.env import environment_variables
from weft.distributed.remote_call import Call, pickled
from weft.distributed.store import PARENT, die_with_parent
from weft.errors import TrainError, TuneError
from weft.tune.devices import use_expandable_segments
from weft.tune.jobs import Ended, Job, Reported, event_to_json, job_from_json

IN_TRIAL = "WEFT_TRIAL"
"""The variable by which a process, and scripts that it imports, know that it belongs to a study."""

PRELOADED = ("weft.tune.training.run_job", "weft.tune.executors.worker")
FOR_RECIPES = (
    "weft.tune.fit.estimator",
    "weft.tune.fit.fit",
    "weft.tune.fusion.trainer",
    "weft.tune.training.distributed",
    "torch._dynamo",
)
"""What every process would import for its first estimate or its first step; optimizers import dynamo."""

Message = dict[str, Any]


def start_process(
    name: str, threads: int | None, target: Callable[..., None], *args: Any, recipe: bool = True
) -> tuple[Any, JsonConnection]:
    """A process that calls ``target(the other end, *args)`` with so many threads; and the connection to it. What a
    recipe needs is imported beforehand, if this is the first one."""
    mine, other = socket.socketpair()
    variables = {IN_TRIAL: "1"} | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    with environment_variables(variables):
        given = (target, os.getpid(), dict(os.environ), other, *args)
        process = process_context(recipe).Process(target=_run_target, args=given, name=name)
        process.start()
    other.close()
    return process, JsonConnection(mine)


def new_process_group() -> None:
    """This process, and what it starts from now on, become a group of their own, which can be ended as one."""
    if hasattr(os, "setpgid"):
        with suppress(OSError):  # it leads one already
            os.setpgid(0, 0)


def kill_process(process: Any) -> None:
    """Kill a process and wait for it; if it leads a group, then with all that it started."""
    if hasattr(os, "killpg") and process.is_alive():
        with suppress(OSError):  # it ended just now
            if os.getpgid(process.pid) == process.pid:  # its own: it has not ended yet, so the number is not used again
                os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def init_process(parent: int, environment: Mapping[str, str]) -> None:
    """The first thing that a process of a study does."""
    os.environ.clear()  # the fork server has an older one
    os.environ.update(environment)
    with environment_variables({PARENT: str(parent)}):  # which need not be the process that this one was forked from
        die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all, but the runner stops the study


def _run_target(
    target: Callable[..., None], parent: int, environment: Mapping[str, str], end: socket.socket, *args: Any
) -> None:
    init_process(parent, environment)
    target(end, *args)


def process_context(recipe: bool) -> Any:
    """Of multiprocessing, with what processes need imported beforehand."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload([*PRELOADED, *(FOR_RECIPES if recipe else ())])
    return made


class JsonConnection:
    """One end of a pair of sockets, over which go lines of JSON; nothing of it is ever unpickled or evaluated."""

    def __init__(self, end: socket.socket) -> None:
        self.end, self._rest = end, b""
        self.fileno, self.close = end.fileno, end.close

    def send(self, message: Message) -> None:
        """Raises OSError where the other end is gone."""
        self.end.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Message | None:
        """The next message, waited for; None once the other end is gone."""
        while b"\n" not in self._rest:
            if not (data := self._read()):
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        message: Message = json.loads(line)
        return message

    def receive_all(self) -> tuple[list[Message], bool]:
        """All whole messages that are here, without waiting; and whether the other end is still there."""
        alive = True
        self.end.setblocking(False)
        try:
            while data := self._read():
                self._rest += data
            alive = False
        except BlockingIOError:
            pass
        finally:
            self.end.setblocking(True)
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines], alive

    def _read(self) -> bytes:
        try:
            return self.end.recv(1 << 16)
        except (ConnectionError, InterruptedError):
            return b""


# The rendezvous of the processes of a split job: a store on loopback, new for every attempt.

HOST = "127.0.0.1"


def open_rendezvous(world: int) -> tuple[dict[str, str], Any]:
    """The variables of torchrun without the ranks, and the store that they meet at, which must be kept."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )
    return {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }, store


# The loop of a worker.

OWN = "trials run in processes of their own"
LEFTOVER = 128 * 2**20
"""Bytes of a device that a worker may keep between two jobs: workspaces of libraries stay for good."""


def pack_spec(spec: Any) -> bytes:
    """What a worker needs once, for multiprocessing's own pipe; TuneError names what another process cannot import."""
    try:
        return pickled(Call(_same, (spec.objective, spec)))
    except TrainError as problem:
        raise TuneError(str(problem).replace("more than one stage means new processes", OWN)) from None


def unpack_spec(payload: bytes) -> Any:
    """What ``pack_spec`` packed, in the process that it was packed for."""
    return pickle.loads(payload).args[1]


def run_worker(end: socket.socket, payload: bytes, device: str, threads: int | None) -> None:
    """What the process does, until the other end of its connection is gone."""
    new_process_group()
    connection = JsonConnection(end)

    def ask(report: Reported) -> bool:
        connection.send({"type": "event", "event": event_to_json(report)})
        if (answer := connection.receive()) is None:
            os._exit(1)  # the process that runs the study is gone
        return bool(answer["prune"])

    def tell(ended: Ended) -> None:
        sys.stdout.flush()
        connection.send({"type": "event", "event": event_to_json(ended)})

    try:
        spec = unpack_spec(payload)
        prepare_worker(device, threads)
    except Exception as problem:
        connection.send({"type": "broken", "reason": f"{type(problem).__name__}: {problem}"})
        return
    with suppress(OSError):
        connection.send({"type": "ready"})
        while (message := connection.receive()) is not None and message["type"] == "job":
            job = job_from_json(message["job"])
            connection.send({"type": "began", "job": job.id})
            run_attempt(job, spec, device, message["rank"], message["rendezvous"], ask, tell)
            connection.send({"type": "idle", "job": job.id, "leaked": has_leaked_memory(device)})


def prepare_worker(device: str, threads: int | None) -> None:
    """Before the first job: the number of threads, which results may depend on, and the device."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    if device.startswith("cuda"):
        use_expandable_segments()
        torch.cuda.set_device(device)
    gc.freeze()  # what is imported stays: to look through it after every trial takes longer than many a trial


def has_leaked_memory(device: str) -> bool:
    """Whether the last job left memory behind that cannot be given back, such as that of a capture which broke off."""
    if not device.startswith("cuda"):
        return False
    import torch

    return int(torch.cuda.memory_reserved(device)) > LEFTOVER


def run_attempt(
    job: Job, spec: Any, device: str, rank: int, rendezvous: Mapping[str, str], ask: Any, tell: Any
) -> None:
    """Runs a job as ``run_job`` does. What it prints goes to a file in the directory of its first trial; by the
    variables of the rendezvous it finds the other processes of a split job."""
    from weft.tune.training.run_job import OUTPUT, folder, run_job

    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if rendezvous else {}
    with environment_variables({**rendezvous, **ranks}), redirect_output(folder(job, job.trials[0]) / OUTPUT):
        run_job(job, spec, device, rank, ask, tell)


@contextmanager
def redirect_output(path: Path) -> Iterator[None]:
    """What is printed, even by code that is not Python, is appended to a file."""
    originals = [os.dup(number) for number in (1, 2)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for number in (1, 2):
            os.dup2(handle, number)
        os.close(handle)
        yield
    finally:
        for stream, number, old in zip((sys.stdout, sys.stderr), (1, 2), originals, strict=True):
            with suppress(Exception):
                stream.flush()
            os.dup2(old, number)
            os.close(old)


def _same(*given: Any) -> Any:
    return given
