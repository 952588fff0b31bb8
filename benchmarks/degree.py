"""What a degree of its own for every candidate saves of communication: two processes of a core each, real candidates.

    python benchmarks/degree.py [--quick] [--json FILE]

Transformers of several sizes (benchmarks/tune_models.py) train for some steps on two devices of so much memory that the
whole batches of the two largest fit only when they are split over both (weft itself would cut such batches first).
`fixed`: every candidate is split over both devices, the least degree that all of them can have, one after another.
`chosen`: those that fit a device have one to themselves, longest first, and the others are split.

Rows are `way, repeat, makespan_s, communication_share, split, trials`: the share is that of the seconds of all steps on
both devices that went into sending, receiving and waiting for the other; starting, building and evaluating are not
counted. ScaMP publishes 28 % before and 15 % after, on other machines. A step's communication is by loopback here,
which says nothing of a network's; that a candidate alone has none holds anywhere.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from machine import write
from safetensors.torch import load_file, save_file
from torch.multiprocessing import start_processes
from tune_models import recipe

from weft.plan.planner import plan
from weft.plan.runtime import ParallelModule
from weft.plan.runtime.p2p import StageP2P
from weft.plan.runtime.redistribute import MeshCollectives
from weft.tune.fit.fit import fit
from weft.tune.fit.peaks import LossModule, example_batch
from weft.tune.jobs import Fit
from weft.tune.recipe import TrialConfig, trial_config
from weft.tune.training.distributed import train_split
from weft.tune.training.trainer import TrialTrainer, train

SIZES = [(64, 2), (64, 4), (128, 2), (128, 4), (128, 6), (256, 2), (256, 4), (256, 6)]
Placed = tuple[dict[str, Any], Fit, int | None]
"""A candidate, how it trains, and its device; None: both."""


def candidate(params: dict[str, Any], steps: int) -> TrialConfig:
    return trial_config(recipe(precision="fp32", steps=steps), params)


class Clock:
    """Seconds of steps, and those of them in which a process sent, received or waited."""

    def __init__(self) -> None:
        self.steps = self.sending = 0.0
        self._within = False

    def counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                if self._within:
                    self.sending += time.perf_counter() - began

        return timed

    def step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began, self._within = time.perf_counter(), True
            try:
                return original(*args, **kwargs)
            finally:
                self._within = False
                self.steps += time.perf_counter() - began

        return timed


@contextmanager
def clocked() -> Iterator[Clock]:
    """Within the block, steps and what they send are timed."""
    clock = Clock()
    sends = [(MeshCollectives, f"_{name}") for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")]
    sends += [(StageP2P, "_receive"), (StageP2P, "_send"), (StageP2P, "wait_for_sends")]
    sends += [(ParallelModule, "_broadcast_loss")]
    places = [(kind, name, clock.counting) for kind, name in sends]
    places += [(ParallelModule, "step", clock.step), (TrialTrainer, "_step", clock.step)]
    before = [(kind, name, getattr(kind, name)) for kind, name, _ in places]
    for (kind, name, wrap), (_, _, original) in zip(places, before, strict=True):
        setattr(kind, name, wrap(original))
    try:
        yield clock
    finally:
        for kind, name, original in before:
            setattr(kind, name, original)


def process(rank: int, placed: Sequence[Placed], steps: int, ports: Sequence[int], out: str) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]})
    torch.set_num_threads(1)
    never = lambda step, values: False  # noqa: E731
    began = time.perf_counter()
    with clocked() as clock:
        for number, (params, how, device) in enumerate(placed):
            made, folder = candidate(params, steps), Path(out) / str(number)
            if device is None:
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
                os.environ["MASTER_PORT"] = str(ports[number])
                train_split(made, how, device="cpu", directory=folder, report=never)
            elif device == rank:
                train(made, how, device="cpu", directory=folder, report=never)
    told = [time.perf_counter() - began, clock.steps, clock.sending]
    save_file({"told": torch.tensor(told, dtype=torch.float64)}, f"{out}/{rank}.safetensors")


def split(made: TrialConfig) -> Fit:
    """Over both devices, as the planner would, whatever the memory."""
    batch = example_batch(made, made.batch_size, "cpu")
    whole = LossModule(made, made.bare(), tuple(batch))
    found = plan(whole, whole.tensors(batch), "cpu", devices=2, compare=False, time_limit=20.0)
    parts = found.microbatches
    return Fit("split", made.batch_size // parts, parts, 2, 0, found.cost.step_time, "", found.to_json())


def chosen(every: Sequence[tuple[dict[str, Any], Fit]]) -> list[Placed]:
    """Those that fit a device on the one that is free first, the longest first; then the others."""
    busy = [0.0, 0.0]
    placed: list[Placed] = []
    alone = [each for each in every if each[1].devices == 1]
    for params, how in sorted(alone, key=lambda each: -(float(each[0]["width"]) ** 2) * float(each[0]["depth"])):
        device = busy.index(min(busy))
        busy[device] += float(params["width"]) ** 2 * float(params["depth"])
        placed.append((params, how, device))
    return placed + [(params, how, None) for params, how in every if how.devices > 1]


def measured(placed: Sequence[Placed], steps: int) -> tuple[float, float]:
    """Seconds until the last is done, and the share of communication."""
    ports = [free_port() for _ in placed]
    with tempfile.TemporaryDirectory() as out:
        start_processes(process, (placed, steps, ports, out), nprocs=2, start_method="spawn")
        told = [load_file(f"{out}/{rank}.safetensors")["told"].tolist() for rank in range(2)]
    return max(each[0] for each in told), sum(each[2] for each in told) / sum(each[1] for each in told)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    steps, repeats = (2, 1) if arguments.quick else (8, 3)
    torch.set_num_threads(1)
    base = {"family": "transformer", "batch_size": 32, "lr": 1e-3, "weight_decay": 1e-3}
    wanted = [{**base, "width": width, "depth": depth} for width, depth in (SIZES[:3] if arguments.quick else SIZES)]
    needs = [fit(candidate(params, steps), 1, 2**36, "cpu").memory for params in wanted]
    memory = int(sorted(needs)[-2] * 0.95)  # the two largest do not fit whole
    fits = []
    for params, needed in zip(wanted, needs, strict=True):
        made = candidate(params, steps)
        whole = Fit("whole", made.batch_size, 1, 1, needed, None, "")
        fits.append((params, whole if needed <= memory else split(made)))
    ways = {
        "fixed": [(params, split(candidate(params, steps)), None) for params in wanted],
        "chosen": chosen(fits),
    }
    rows: list[dict[str, Any]] = []
    for repeat in range(repeats):
        for way, placed in ways.items():
            seconds, share = measured(placed, steps)
            count = sum(device is None for _, _, device in placed)
            rows.append(
                {
                    "way": way,
                    "repeat": repeat,
                    "makespan_s": round(seconds, 3),
                    "communication_share": round(share, 4),
                    "split": count,
                    "trials": len(placed),
                }
            )
            print(rows[-1], flush=True)
    summary = {
        way: {
            key: statistics.median(row[key] for row in rows if row["way"] == way)
            for key in ("makespan_s", "communication_share")
        }
        for way in ways
    }
    print(summary)
    write(arguments.json, rows=rows, summary=summary, memory=memory, candidates=wanted)


if __name__ == "__main__":
    main()
