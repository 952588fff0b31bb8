"""Part `time` of `paci.py`: seconds until the training loss has come down to a target, every method in processes of
its own."""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from paci_task import RANKS, Task
from paci_torch import TorchPeer
from paci_weft import WeftPeer

from weft.pipeline.determinism import deterministic
from weft.pipeline.launch import Call, connect, launch, ranks

METHODS = ("torch-1f1b", "torch-zbv", "weft-flush", "weft-bounded")
TARGET_AT = 0.8
"""The target is what our flush at the largest K has reached after this share of the micro-batches."""


@dataclass(frozen=True)
class Measured:
    """One run. ``losses`` of its micro-batches in order, ``known`` when each was there, in seconds from the start."""

    method: str
    k: int
    losses: list[float]
    known: list[float]
    busy: list[float]
    wall: float
    resident: list[float]
    """The most memory that each process had, in MiB."""
    waited: list[float]
    """Seconds that each process was ready to run and had no core: what others on the machine took from it."""
    figures: list[dict[str, Any]]

    @property
    def utilisation(self) -> float:
        """The share of the time between the first operation and the last one that the processes worked."""
        return sum(self.busy) / (len(self.busy) * self.wall)

    def reached(self, target: float, over: int) -> int | None:
        """The first micro-batch with which the mean loss of the last ``over`` is at most the target."""
        total = 0.0
        for n, loss in enumerate(self.losses):
            total += loss - (self.losses[n - over] if n >= over else 0.0)
            if n + 1 >= over and total / over <= target:
                return n
        return None


def measure(task: Task, method: str, k: int, steps: int, work: Any = None) -> Measured:
    """Runs a method in two new processes."""
    with tempfile.TemporaryDirectory() as folder:
        launch(RANKS, Call(work or member, (task, method, k, steps, folder)), restarts=0, threads=1)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    began = min(own["began"] for own in found)
    last = next(own for own in found if own["losses"])
    first, end = (pick(edge(own["spans"]) for own in found) for pick, edge in ((min, _first), (max, _last)))
    return Measured(
        method,
        k,
        last["losses"],
        [moment - began for moment in last["known"]],
        [sum(b - a for a, b in own["spans"]) for own in found],
        end - first,
        [own["resident"] for own in found],
        [own["waited"] for own in found],
        [own["figures"] for own in found],
    )


def pinned() -> tuple[int, int, Any]:
    """Rank, number of processes and their store, with this process on one core."""
    me = ranks()
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


def member(task: Task, method: str, k: int, steps: int, folder: str) -> None:
    """One of the processes of a run."""
    rank, world, store = pinned()
    with deterministic(torch.device("cpu")):
        peer = peer_of(task, method, k, rank, world, store)
        peer.warm(max(2, 4 // k))
        waited = waiting()
        peer.train(steps)
        waited = waiting() - waited
    peer.close()
    told = {**asdict(peer.meter), "figures": peer.figures(), "resident": most_resident(), "waited": waited}
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def most_resident() -> float:
    """The most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def waiting() -> float:
    """Seconds that the threads of this process were ready and had no core, as Linux counts them; else 0."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):
            total += int(path.read_text().split()[1])
    return total / 1e9


def find_target(task: Task, k: int, over: int) -> float:
    """A loss that all reach: what our flush has reached late at the largest K, which makes the fewest updates."""
    found = measure(task, "weft-flush", k, task.microbatches // k)
    n = round(TARGET_AT * len(found.losses))
    return statistics.mean(found.losses[n - over : n])


def rows(
    task: Task, ks: Sequence[int], methods: Sequence[str], repeats: int, target: float, over: int
) -> Iterator[dict[str, Any]]:
    """By K and method; the first run of each says how many steps it needs, the repeats take no more."""
    for k in ks:
        runs: dict[str, list[Measured]] = {method: [] for method in methods}
        steps = dict.fromkeys(methods, task.microbatches // k)
        for repeat in range(repeats):
            for method in methods if repeat % 2 == 0 else methods[::-1]:
                found = measure(task, method, k, steps[method])
                runs[method].append(found)
                reached = found.reached(target, over)
                if reached is not None:
                    steps[method] = reached // k + 1
        yield from _rows(k, runs, target, over)


def _rows(k: int, runs: dict[str, list[Measured]], target: float, over: int) -> Iterator[dict[str, Any]]:
    torchs: list[float] = []
    theirs: list[float] = []
    for method, found in runs.items():
        reached = [one.reached(target, over) for one in found]
        taken = [math.inf if n is None else one.known[n] for one, n in zip(found, reached, strict=True)]
        paces = [one.known[-1] / len(one.known) for one in found]
        if method == "torch-1f1b":
            torchs, theirs = taken, paces
        quicker = [a / b for a, b in zip(theirs, paces, strict=False)]
        ratios = [a / b for a, b in zip(torchs, taken, strict=False)]
        steps = None if reached[0] is None else reached[0] // k + 1
        yield {
            "k": k,
            "method": method,
            "seconds_to_loss": _finite(statistics.median(taken)),
            "ratio_to_torch_1f1b": _finite(statistics.median(ratios)) if ratios and steps else None,
            "utilisation": statistics.median(one.utilisation for one in found),
            "steps_to_loss": steps,
            "seconds_per_step": statistics.median(paces) * k,
            "step_ratio_to_torch_1f1b": _finite(statistics.median(quicker)) if quicker else None,
            "least_seconds": _finite(min(taken)),
            "least_ratio": _finite(min(torchs) / min(taken)) if torchs and steps else None,
            "busy_ms": [statistics.median(1e3 * one.busy[r] / len(one.losses) for one in found) for r in range(RANKS)],
            "waited_share": statistics.median(sum(one.waited) / (RANKS * one.known[-1]) for one in found),
            "same_losses": all(n == reached[0] for n in reached),
            "last_loss": statistics.mean(found[0].losses[-over:]),
            "figures": found[0].figures,
            "repeats": len(found),
        }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _first(spans: Sequence[Sequence[float]]) -> float:
    return min(start for start, _ in spans)


def _last(spans: Sequence[Sequence[float]]) -> float:
    return max(end for _, end in spans)
