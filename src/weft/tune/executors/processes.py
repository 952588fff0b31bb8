"""Processes of a study: forked from a clean one that has imported torch, and gone with the driver."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from weft.distributed.store import PARENT, die_with_parent
from weft.tune.executors.connection import JsonConnection, pair

INSIDE = "WEFT_TRIAL"
"""The variable that tells a process, and scripts that it imports, that it belongs to a study."""

PRELOADED = ("weft.tune.training.run_job", "weft.tune.executors.worker")
FOR_RECIPES = (
    "weft.tune.fit.estimator",
    "weft.tune.fit.fit",
    "weft.tune.fusion.trainer",
    "weft.tune.training.distributed",
    "torch._dynamo",
)
"""What every process would import for its first estimate or its first step; optimizers ask for dynamo."""


def started(
    name: str, threads: int | None, target: Callable[..., None], *args: Any, recipe: bool = True
) -> tuple[Any, JsonConnection]:
    """A process that calls ``target(line's other end, *args)`` with so many threads; and the line to it. What a recipe
    needs is imported beforehand, if this is the first one."""
    line, other = pair()
    variables = {INSIDE: "1"} | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    with surroundings(variables):
        given = (target, os.getpid(), dict(os.environ), other, *args)
        process = context(recipe).Process(target=_begin, args=given, name=name)
        process.start()
    other.close()
    return process, line


def lead() -> None:
    """This process, and what it starts from now on, become a group of their own, which can be ended as one."""
    if hasattr(os, "setpgid"):
        with suppress(OSError):  # it leads one already
            os.setpgid(0, 0)


def end(process: Any) -> None:
    """Kill a process that was ``started`` and wait for it; if it leads a group, then with all that it started."""
    if hasattr(os, "killpg") and process.is_alive():
        with suppress(OSError):  # it ended just now
            if os.getpgid(process.pid) == process.pid:  # no one else's: it has not yet ended, so the number is its own
                os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


@contextmanager
def surroundings(variables: Mapping[str, str]) -> Iterator[None]:
    """An environment for a while, such as what tells the processes of a split candidate of one another."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def begin(driver: int, environment: Mapping[str, str]) -> None:
    """The first thing that a process of a study does."""
    os.environ.clear()  # it was forked from a process that knows that of an earlier time
    os.environ.update(environment)
    with surroundings({PARENT: str(driver)}):  # which need not be the process that this one was forked from
        die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all, but stopping is the driver's to say


def _begin(
    target: Callable[..., None], driver: int, environment: Mapping[str, str], end: socket.socket, *args: Any
) -> None:
    begin(driver, environment)
    target(end, *args)


def context(recipe: bool) -> Any:
    """So that the next one starts in an instant."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload([*PRELOADED, *(FOR_RECIPES if recipe else ())])
    return made


# Where the processes of a split job meet: a store on loopback, new for every attempt.

HOST = "127.0.0.1"


def open_meeting(world: int) -> tuple[dict[str, str], Any]:
    """The variables of torchrun without the ranks, and the store that they lead to, which must be kept."""
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
