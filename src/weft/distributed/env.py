"""Which stage of how many this process is, as whoever started it says in the environment; and signals to it."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from weft.errors import TrainError


@dataclass(frozen=True, slots=True)
class DistEnv:
    """`rank` of `world` processes, `local_rank` of the `local_world` on this machine; `restarts` counts the times that
    all of them were started again."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    restarts: int


def read_env(environment: Mapping[str, str] = os.environ) -> DistEnv | None:
    """What torchrun (or `launch`, or srun) said; None in a process that none of them started.

    Raises TrainError where they said too little to find the other processes.

    >>> read_env({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}).world
    4
    >>> read_env({}) is None
    True
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, world = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        # A launcher that says nothing of machines is taken to have one.
        local_rank = _number(environment, "LOCAL_RANK", rank)
        local_world = _number(environment, "LOCAL_WORLD_SIZE", world)
        restarts = _number(environment, "TORCHELASTIC_RESTART_COUNT", 0)
    elif (task := _slurm(environment)) is not None:
        rank, world, local_rank, local_world = task
        restarts = 0
        absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
        if absent:
            raise TrainError(
                f"srun started {world} tasks, which also need {' and '.join(absent)} to find one another: export "
                "MASTER_ADDR (the host of the first task) and MASTER_PORT (a free port there) before srun"
            )
    else:
        return None
    if not (0 <= rank < world and 0 <= local_rank < local_world):
        raise TrainError(
            f"a process cannot be rank {rank} of {world} and {local_rank} of {local_world} on its machine: "
            "ranks count from 0; start the processes with torchrun, or unset RANK and WORLD_SIZE"
        )
    return DistEnv(rank, world, local_rank, local_world, restarts)


def _slurm(environment: Mapping[str, str]) -> tuple[int, int, int, int] | None:
    """(rank, world, local rank, local world) of an srun task; None for a single task.

    The shell of an sbatch script has a SLURM_PROCID too, but is no step and does not stand for its tasks.
    """
    if not {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"} <= environment.keys():
        return None
    if "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment:
        return None
    # A step may have fewer tasks than its job.
    world = _number(environment, "SLURM_STEP_NUM_TASKS", _number(environment, "SLURM_NTASKS"))
    if world == 1:
        return None
    rank, local_rank = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_LOCALID")
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or str(world)
    counts = _tasks_per_node(text)
    node = _number(environment, "SLURM_NODEID", 0)
    return rank, world, local_rank, counts[node] if node < len(counts) else world


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's short form, one number a node.

    >>> _tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in runs for _ in range(int(times or 1))]


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isascii() or not text.isdigit():
        raise TrainError(f"{name} must be a whole number, but is {text!r} in the environment of this process")
    return int(text)


@contextmanager
def on_signals(handler: Callable[[int, FrameType | None], None], *names: str) -> Iterator[None]:
    """Within the block the handler gets these signals. Only the main thread can listen; a signal that is ignored
    (nohup) stays ignored."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        known = [getattr(signal, name) for name in names if hasattr(signal, name)]
        before = {number: signal.getsignal(number) for number in known}
        before = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


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
