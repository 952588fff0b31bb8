"""Processes of a study: forked from a clean one that has imported torch, killed with the one that runs the study; and
the connections to them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from weft.distributed.store import PARENT, die_with_parent

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
    connection, other = connected_pair()
    variables = {IN_TRIAL: "1"} | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    with environment_variables(variables):
        given = (target, os.getpid(), dict(os.environ), other, *args)
        process = process_context(recipe).Process(target=_run_target, args=given, name=name)
        process.start()
    other.close()
    return process, connection


def new_process_group() -> None:
    """This process, and what it starts from now on, become a group of their own, which can be ended as one."""
    if hasattr(os, "setpgid"):
        with suppress(OSError):  # it leads one already
            os.setpgid(0, 0)


def kill_process(process: Any) -> None:
    """Kill a process and wait for it; if it leads a group, then with all that it start_process."""
    if hasattr(os, "killpg") and process.is_alive():
        with suppress(OSError):  # it ended just now
            if os.getpgid(process.pid) == process.pid:  # its own: it has not ended yet, so the number is not used again
                os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


@contextmanager
def environment_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for a block, such as the addresses of the processes of a split trial."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


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
        self.end = end
        self._rest = b""

    def fileno(self) -> int:
        return self.end.fileno()

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

    def close(self) -> None:
        self.end.close()

    def _read(self) -> bytes:
        try:
            return self.end.recv(1 << 16)
        except (ConnectionError, InterruptedError):
            return b""


def connected_pair() -> tuple[JsonConnection, socket.socket]:
    """A connection and the bare other end of it, which a new process can be given."""
    mine, other = socket.socketpair()
    return JsonConnection(mine), other


# The rendezvous of the processes of a split job: a store on loopback, new for every attempt.

HOST = "127.0.0.1"


def open_rendezvous(world: int) -> tuple[dict[str, str], Any]:
    """The variables of torchrun without the ranks, and the store that they new_process_group to, which must be kept."""
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
