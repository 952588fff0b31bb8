"""Part `time` of `paci.py`: seconds until the training loss has come down to a target, methods in turn in the same two
processes."""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import waiting
from paci_reference import FLUSH, curves, reached
from paci_task import RANKS, Task
from paci_torch import TorchPeer
from paci_weft import WeftPeer

from weft.distributed.env import read_env
from weft.distributed.launcher import launch
from weft.distributed.remote_call import Call
from weft.distributed.store import connect
from weft.engine.rng import deterministic

FLUSHES = ("torch-1f1b", "torch-zbv", "weft-flush", "weft-gpipe")
METHODS = (*FLUSHES, "weft-bounded", "weft-stashed", "weft-2bw")
PACED = 32
"""Micro-batches of a turn, which only says how fast a method is: the machine's own pace drifts in seconds."""


@dataclass(frozen=True)
class Turn:
    """A short run. ``losses`` of its micro-batches in order, ``known`` when each was there, in seconds."""

    method: str
    k: int
    losses: list[float]
    known: list[float]
    busy: list[float]
    wall: float
    waited: list[float]
    """Seconds that each process was ready to run and had no core: what others on the machine took from it."""
    figures: list[dict[str, Any]]

    @property
    def pace(self) -> float:
        """Seconds a micro-batch, from the end of the first step to that of the last: a run fills its pipeline once."""
        return (self.known[-1] - self.known[self.k - 1]) / (len(self.known) - self.k)

    @property
    def utilisation(self) -> float:
        """The share of the time between the first operation and the last one that the processes worked."""
        return sum(self.busy) / (len(self.busy) * self.wall)


def turns(tasks: Mapping[str, Task], k: int, count: int, steps: int) -> dict[str, list[Turn]]:
    """Runs each method ``count`` times, in turn, forwards and backwards, in two new processes."""
    with tempfile.TemporaryDirectory() as folder:
        launch(RANKS, Call(member, (dict(tasks), k, count, steps, folder)), restarts=0, threads=1)
        every = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    found: dict[str, list[Turn]] = {method: [] for method in tasks}
    for both in zip(*every, strict=True):
        last = next(own for own in both if own["losses"])
        first, end = (pick(edge(own["spans"]) for own in both) for pick, edge in ((min, _first), (max, _last)))
        busy = [sum(b - a for a, b in own["spans"]) for own in both]
        waited, figures = ([own[key] for own in both] for key in ("waited", "figures"))
        turn = Turn(last["method"], k, last["losses"], last["known"], busy, end - first, waited, figures)
        found[turn.method].append(turn)
    return found


def pinned() -> tuple[int, int, Any]:
    """Rank, number of processes and their store, with this process on one core."""
    me = read_env()
    assert me is not None
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[me.rank % len(cores)]})
    torch.set_num_threads(1)
    store = connect()
    dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.world)
    return me.rank, me.world, store


def peer_of(task: Task, method: str, k: int, rank: int, world: int, store: Any) -> TorchPeer | WeftPeer:
    family, kind = method.split("-", 1)
    if family == "torch":
        return TorchPeer(task, k, kind, rank, world)
    kind, _, window = kind.partition(":")
    return WeftPeer(task, k, kind, rank, world, store, int(window) if window else None)


def member(tasks: Mapping[str, Task], k: int, count: int, steps: int, folder: str) -> None:
    """One of the processes."""
    rank, world, store = pinned()
    told = []
    with deterministic(torch.device("cpu")):
        peers = {method: peer_of(task, method, k, rank, world, store) for method, task in tasks.items()}
        for peer in peers.values():
            peer.warm(max(2, 4 // k))
        order = list(peers.items())
        for number in range(count):
            for method, peer in order if number % 2 == 0 else order[::-1]:
                waited = waiting()
                peer.train(steps)
                waited = waiting() - waited
                told.append({"method": method, **asdict(peer.meter), "figures": peer.figures(), "waited": waited})
    dist.barrier()
    for peer in peers.values():
        peer.close()
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def most_resident() -> float:
    """The most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def rates(task: Task, k: int, tried: Sequence[float], over: int) -> Iterator[dict[str, Any]]:
    """What a flush and `bounded` come to with each learning rate."""
    asked = {(method, lr): (replace(task, lr=lr), method, k) for method in (FLUSH, "weft-bounded") for lr in tried}
    for (method, lr), losses in curves(asked).items():
        row = {"method": method, "k": k, "lr": lr, "microbatches": task.microbatches}
        yield {**row, "loss": statistics.mean(losses[-over:])}


def references(task: Task, ks: Sequence[int], methods: Sequence[str]) -> dict[tuple[str, int], list[float]]:
    """The losses of the reference for every method, each with its own learning rate."""
    late = replace(task, lr=task.late_lr)
    wanted = dict.fromkeys([FLUSH, *map(reference_of, methods)])
    return curves({(method, k): (task if method == FLUSH else late, method, k) for method in wanted for k in ks})


def reference_of(method: str) -> str:
    return FLUSH if method in FLUSHES else method.removesuffix("-w")


def rows(
    task: Task,
    ks: Sequence[int],
    methods: Sequence[str],
    repeats: int,
    known: Mapping[tuple[str, int], list[float]],
    target: float,
    over: int,
) -> Iterator[dict[str, Any]]:
    """By K and method. Short turns say how fast each is; how many steps it needs, the reference does, whose losses are
    ``known``."""
    late = replace(task, lr=task.late_lr)
    for k in ks:
        runs = turns({name: task if name in FLUSHES else late for name in methods}, k, repeats, max(PACED // k, 4))
        needed = reached(known[FLUSH, k], target, over)
        for method in methods:
            row = _row(k, method, runs, known[reference_of(method), k], target, over)
            if row["steps_to_loss"] is not None and row["step_ratio_to_torch_1f1b"] is not None and needed is not None:
                row["ratio_to_torch_1f1b"] = row["step_ratio_to_torch_1f1b"] * (needed // k + 1) / row["steps_to_loss"]
            yield row


def _row(
    k: int, method: str, runs: dict[str, list[Turn]], losses: list[float], target: float, over: int
) -> dict[str, Any]:
    found = runs[method]
    paces, theirs, flush = ([one.pace for one in runs.get(name, [])] for name in (method, "torch-1f1b", FLUSH))
    n = reached(losses, target, over)
    steps = None if n is None else n // k + 1
    pace, quicker = statistics.median(paces), [a / b for a, b in zip(theirs, paces, strict=False)]
    apart = max(abs(a - b) for one in found for a, b in zip(one.losses, losses, strict=False))
    return {
        "k": k,
        "method": method,
        "seconds_to_loss": None if n is None else (n + 1) * pace,
        "ratio_to_torch_1f1b": None,
        "utilisation": statistics.median(one.utilisation for one in found),
        "steps_to_loss": steps,
        "seconds_per_step": pace * k,
        "step_ratio_to_torch_1f1b": statistics.median(quicker) if quicker else None,
        "step_ratio_to_flush": statistics.median(a / b for a, b in zip(flush, paces, strict=False)) if flush else None,
        "least_seconds_per_step": min(paces) * k,
        "least_step_ratio": min(theirs) / min(paces) if theirs else None,
        "busy_ms": [statistics.median(1e3 * one.busy[r] / len(one.losses) for one in found) for r in range(RANKS)],
        "waited_share": statistics.median(sum(one.waited) / (RANKS * one.wall) for one in found),
        "largest_difference": apart,
        "figures": found[0].figures,
        "repeats": len(found),
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _first(spans: Sequence[Sequence[float]]) -> float:
    return min(start for start, _ in spans)


def _last(spans: Sequence[Sequence[float]]) -> float:
    return max(end for _, end in spans)
