"""The largest micro-batch that fits a device: what weft says before anything runs, against what really does.

    python benchmarks/microbatch.py [--device cuda:0|cpu] [--families conv ...] [--json FILE] [--quick]

Candidates of benchmarks/tune_models.py whose batch does not fit into a part of the device's memory. ``told`` is weft's
largest micro-batch (tune/fit, with its margin), ``true`` the largest that trains: found by halving, with real steps of
real trainings under a limit that the allocator keeps. Each probe that runs out of memory is one that a user of weft
never has. A convolution whose workspace does not fit is tried again by PyTorch with the next algorithm of cuDNN's list,
so that a training may run on although its allocator has run out of memory, with other kernels and so with other bits
than on a device with more: ``unforced`` is the largest micro-batch with which no request failed, by the allocator's own
count. Rows are `family, width, depth, precision, optimizer, memory_gib, told, true, ratio, unforced, unforced_ratio,
fits, probes`: `fits` says whether the one that was told trains; where nothing does, there is no ratio. With
`--families`, rows that the file has of others stay. To reach: told at least 0.95 of true, and all that were told fit.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import read_rows, write
from tune_models import recipe

from weft.tune.executors.worker import prepare_worker
from weft.tune.fit.fit import MARGIN
from weft.tune.fit.peaks import step_memory
from weft.tune.jobs import Fit
from weft.tune.recipe import TrialConfig, trial_config
from weft.tune.training.memory_limit import OutOfMemory
from weft.tune.training.trainer import train
from weft.utils.units import format_bytes

GIB = 2**30
CASES = [
    ("transformer", 512, 8, "bf16", "adamw", 8.0),
    ("transformer", 512, 8, "fp32", "adamw", 12.0),
    ("transformer", 1024, 4, "bf16", "sgd", 8.0),
    ("transformer", 128, 12, "bf16", "adamw", 4.0),
    ("conv", 256, 8, "bf16", "adamw", 4.0),
    ("conv", 512, 6, "fp32", "sgd", 12.0),
    ("conv", 128, 12, "bf16", "adamw", 3.0),
    ("mlp", 1024, 16, "fp32", "adamw", 1.0),
]
QUICK = [("mlp", 64, 2, "fp32", "adamw", 0.01), ("conv", 32, 2, "fp32", "sgd", 0.02)]


def trains(made: TrialConfig, micro: int, device: str, memory: int) -> int | None:
    """How many requests failed in steps with micro-batches of this size under so much memory; None: they ended."""
    parts = -(-made.batch_size // micro)
    fit = Fit("accumulate" if parts > 1 else "whole", micro, parts, 1, memory, None, "")
    gc.collect()  # of a probe that failed
    before = failed(device)
    with tempfile.TemporaryDirectory() as folder:
        try:
            train(made, fit, device=device, memory=memory, directory=Path(folder), report=lambda step, values: False)
        except OutOfMemory:
            return None
    return failed(device) - before


def failed(device: str) -> int:
    """Requests that the device's allocator could not meet since it began."""
    return 0 if device == "cpu" else int(torch.cuda.memory_stats(device)["num_ooms"])


def halved(low: int, high: int, runs: Callable[[int], bool]) -> int:
    """The largest from ``low``, which runs, and below ``high``, which does not, to half a percent."""
    while high - low > max(1, low // 200):
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    return low


def measured(case: tuple[Any, ...], device: str, batch: int) -> dict[str, Any]:
    family, width, depth, precision, optimizer, gib = case
    given = recipe(batch_size=batch, steps=5, precision=precision, optimizer=optimizer)
    made = trial_config(given, {"family": family, "width": width, "depth": depth, "lr": 1e-4})
    kind = "cpu" if device == "cpu" else torch.cuda.get_device_properties(device).name
    found, memory = step_memory(made, "whole", kind, accumulate=True), int(gib * GIB)
    told = min(found.largest(int(memory * (1 - MARGIN)) - found.context), batch)
    room = memory - found.context
    found_out: dict[int, int | None] = {}

    def run(micro: int) -> int | None:
        if micro not in found_out:
            found_out[micro] = trains(made, micro, device, room)
        return found_out[micro]

    fits = told > 0 and run(told) is not None
    low, high = (told, min(2 * told, batch) + 1) if fits else (0, max(told, 2))
    true = halved(low, high, lambda micro: run(micro) is not None)
    calm = fits and run(told) == 0
    unforced = halved(low if calm else 0, true + 1 if calm else max(low, 2), lambda micro: run(micro) == 0)
    names = ("family", "width", "depth", "precision", "optimizer", "memory_gib")
    row = {
        **dict(zip(names, case, strict=True)),
        "told": told,
        "true": true,
        "ratio": told / true if true else None,
        "unforced": unforced,
        "unforced_ratio": told / unforced if unforced else None,
        "fits": fits,
        "probes": len(found_out),
    }
    print(f"{row}, limit {format_bytes(room)}", flush=True)
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    return {"median": median(ratios), "least": min(ratios), "over": sum(row["told"] > row["true"] for row in rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--families", nargs="*")
    arguments = parser.parse_args()
    asked = arguments.families
    rows = [row for row in read_rows(arguments.json) if asked and row["family"] not in asked]
    batch = 256 if arguments.quick else 4096
    # Each case has a process that begins: nothing that an earlier one left counts.
    with multiprocessing.get_context("spawn").Pool(
        1, prepare_worker, (arguments.device, 1), maxtasksperchild=1
    ) as pool:
        for case in QUICK if arguments.quick else [case for case in CASES if not asked or case[0] in asked]:
            rows.append(pool.apply(measured, (case, arguments.device, batch)))
            write(arguments.json, rows=rows, **summary(rows))


if __name__ == "__main__":
    main()
