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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import waiting
from paci_task import RANKS, Steps, Task
from paci_torch import TorchPeer
from paci_weft import KINDS, WeftPeer

import weft
from weft.pipeline import Law, Sequential
from weft.pipeline.determinism import deterministic
from weft.pipeline.launch import Call, connect, launch, ranks
from weft.space import Fixed

METHODS = (
    *("torch-1f1b", "torch-zbv", "weft-flush", "weft-gpipe", "weft-zbh1", "weft-interleaved"),
    *("weft-bounded", "weft-bounded-w", "weft-stashed", "weft-2bw"),
)
FLUSH = "weft-flush"
"""Whose losses all methods with a flush have: those of the law that updates see all earlier ones."""

FLUSHES = ("torch-1f1b", "torch-zbv", "weft-flush", "weft-gpipe", "weft-zbh1", "weft-interleaved")
PACED = 96
"""Micro-batches of a run that only says how fast a method is."""

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


def find_target(task: Task, k: int, over: int) -> float:
    """A loss that all reach: what our flush has reached late at the largest K, which makes the fewest updates."""
    losses = curve(task, FLUSH, k)
    n = round(TARGET_AT * len(losses))
    return statistics.mean(losses[n - over : n])


def curve(task: Task, method: str, k: int) -> list[float]:
    """The losses of a whole run, by the law on one device: what two processes do has the same bits."""
    chain = task.built()
    kind = KINDS[method.removeprefix("weft-")]
    promised = dict.fromkeys(chain.layers, kind.consistency(k, RANKS))
    steps = task.microbatches // k
    law = Law(steps, k, weft.cross_entropy, task.optimizer(k), task.schedule(k), task.seed, promised)
    run = Sequential(chain, law, Fixed(chain.space, chain.largest()), torch.device("cpu"))
    run.train_mode()
    found: list[float] = []
    with deterministic(torch.device("cpu")):
        for step, batch in enumerate(Steps(task.draw(), task.rows * k).iterate(0, steps)):
            found += [float(loss) for loss in run.step(step, batch).losses]
    return found


def reached(losses: Sequence[float], target: float, over: int) -> int | None:
    """The first micro-batch with which the mean loss of the last ``over`` is at most the target."""
    total = 0.0
    for n, loss in enumerate(losses):
        total += loss - (losses[n - over] if n >= over else 0.0)
        if n + 1 >= over and total / over <= target:
            return n
    return None


def rates(task: Task, k: int, tried: Sequence[float], over: int) -> Iterator[dict[str, Any]]:
    """What a flush and `bounded` come to with each learning rate."""
    for law in (FLUSH, "weft-bounded"):
        for lr in tried:
            losses = curve(replace(task, lr=lr), law, k)
            row = {"law": law, "k": k, "lr": lr, "microbatches": task.microbatches}
            yield {**row, "loss": statistics.mean(losses[-over:])}


def rows(
    task: Task, ks: Sequence[int], methods: Sequence[str], repeats: int, target: float, over: int
) -> Iterator[dict[str, Any]]:
    """By K and method, each with its own learning rate. Short runs in turn say how fast each is; how many steps it
    needs, the law says."""
    late = replace(task, lr=task.late_lr)
    for k in ks:
        runs: dict[str, list[Measured]] = {method: [] for method in methods}
        for repeat in range(repeats):
            for method in methods if repeat % 2 == 0 else methods[::-1]:
                runs[method].append(measure(task if method in FLUSHES else late, method, k, max(PACED // k, 1)))
        curves = {FLUSH: curve(task, FLUSH, k)}
        for method in methods:
            law = FLUSH if method in FLUSHES else method.removesuffix("-w")
            if law not in curves:
                curves[law] = curve(late, law, k)
            row = _row(k, method, runs, curves[law], target, over)
            needed = reached(curves[FLUSH], target, over)
            if row["steps_to_loss"] is not None and row["step_ratio_to_torch_1f1b"] is not None and needed is not None:
                row["ratio_to_torch_1f1b"] = row["step_ratio_to_torch_1f1b"] * (needed // k + 1) / row["steps_to_loss"]
            yield row


def _row(
    k: int, method: str, runs: dict[str, list[Measured]], losses: list[float], target: float, over: int
) -> dict[str, Any]:
    found = runs[method]
    paces = [one.known[-1] / len(one.known) for one in found]
    theirs = [one.known[-1] / len(one.known) for one in runs.get("torch-1f1b", [])]
    flush = [one.known[-1] / len(one.known) for one in runs.get(FLUSH, [])]
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
        "waited_share": statistics.median(sum(one.waited) / (RANKS * one.known[-1]) for one in found),
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
