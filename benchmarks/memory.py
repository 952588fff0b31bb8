"""What training steps take on the GPU, and what `weft.estimate` said before: errors, beside those of others' formulas.

    python benchmarks/memory.py --part measure [--set tuned|fresh] [--expandable] [--quick] --json FILE     on a GPU
    python benchmarks/memory.py --part estimate [--quick] --json FILE                        anywhere, on the same file

`measure` runs three steps of each configuration, each in a process of its own, and adds its rows; several run beside
each other with `--workers`, which changes no byte; with `--expandable` they reserve by pages (PyTorch's expandable
segments), as trials of a study do;
`estimate` fills in what the estimator says for each row, and the summary. Sizes are in bytes: `allocated` and
`reserved` are torch's own peaks, and `phases` those allocated in the forward, backward and optimizer of the last step.
Errors are estimate / measured - 1. The
parameter-only formulas: `accelerate` is four times the model's size (Adam), `deepspeed` 18 bytes a parameter,
`korthikanti` 16 bytes a parameter and s b h L (34 + 5 a s / h) bytes of activations for transformers in half precision
(twice that in float32).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from machine import about, write
from memory_configurations import OPTIMIZERS, SETS, Configuration, configurations
from memory_models import build

import weft

KEPT = ("phases", "allocated", "reserved")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=("measure", "estimate"), default="estimate")
    parser.add_argument("--set", choices=("tuned", "fresh"), default="tuned")
    parser.add_argument("--expandable", action="store_true", help="measure with expandable segments")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workers", type=int, default=1, help="processes beside each other")
    parser.add_argument("--again", action="store_true", help="estimate also what has an estimate")
    parser.add_argument("--json", metavar="FILE", required=True)
    options = parser.parse_args()
    path = Path(options.json)
    have = json.loads(path.read_text()) if path.exists() else {}
    rows = have.get("rows", [])
    if options.part == "measure":
        found = measure(options.set, options.quick, options.workers, options.expandable)
        rows = [row for row in rows if row["name"] not in {new["name"] for new in found}] + found
        measured = {"measured": about() | {"cudnn": torch.backends.cudnn.version()}}
    else:
        measured = {"measured": have["measured"]}
        due = [place for place, row in enumerate(rows) if options.again or "estimate" not in row]
        due = due[::12] if options.quick else due
        with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
            for place, row in zip(due, pool.imap(estimate, [rows[place] for place in due]), strict=True):
                rows[place] = row
    write(options.json, **measured, summary=summary(rows), rows=rows)
    print(json.dumps(summary(rows), indent=1))


def measure(which: str, quick: bool, workers: int, expandable: bool) -> list[dict[str, Any]]:
    """Rows of a set, a process for each model, which has one for each configuration."""
    script = Path(__file__).with_name("memory_measure.py")
    numbers = range(len(SETS[which]))
    surroundings = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
    with tempfile.TemporaryDirectory() as folder:

        def run(number: int) -> None:
            command = [sys.executable, str(script), which, str(number), folder]
            subprocess.run(command, check=False, timeout=900, env=surroundings)

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(run, numbers[:2] if quick else numbers))
        return [row | {"expandable": expandable} for row in rows_of(which, Path(folder))]


def rows_of(which: str, folder: Path) -> list[dict[str, Any]]:
    """The rows that processes left in a folder."""
    known = {config.name: config for config in configurations(which)}
    rows = []
    for file in sorted(folder.glob("*.jsonl"), key=lambda file: int(file.stem)):
        for line in file.read_text().splitlines():
            found = json.loads(line)
            kept = {key: found[key] for key in KEPT if key in found}
            if "phases" in kept:
                kept["phases"] = kept["phases"][-1]
            error = {"error": found["error"]} if "error" in found else {}
            rows.append({"name": found["name"]} | dataclasses.asdict(known[found["name"]]) | kept | error)
    return rows


def estimate(row: dict[str, Any]) -> dict[str, Any]:
    """The row with what the estimators say of it."""
    if "error" in row:
        return row
    fields = {field.name: row[field.name] for field in dataclasses.fields(Configuration)}
    fields["size"] = {key: tuple(value) if isinstance(value, list) else value for key, value in row["size"].items()}
    config = Configuration(**fields)
    with torch.device("meta"):
        model, batch, loss = build(config.family, config.size, config.batch)
    start = time.perf_counter()
    found = weft.estimate(
        model,
        batch,
        loss=loss,
        optimizer=config.optimizer,
        options=OPTIMIZERS[config.optimizer],
        dtype=config.dtype,
        recompute=config.recompute,
        expandable=row.get("expandable", False),
    )
    took = time.perf_counter() - start
    said = {
        "allocated": found.allocated, "reserved": found.reserved, "phases": list(found.phases.values()),
        "seconds": found.seconds, "took_s": round(took, 2),
    }  # fmt: skip
    errors = {
        "allocated": round(found.allocated / row["allocated"] - 1, 4),
        "reserved": round(found.reserved / row["reserved"] - 1, 4),
    }
    weights = sum(parameter.numel() for parameter in model.parameters())
    formulas = {"accelerate": 16 * weights, "deepspeed": 18 * weights}
    if config.family in ("gpt", "llama", "bert"):
        formulas["korthikanti"] = 16 * weights + activations(config)
    others = {name: round(size / row["allocated"] - 1, 4) for name, size in formulas.items()}
    print(f"{config.name}: {errors['allocated']:+.1%} {errors['reserved']:+.1%}", flush=True)
    return row | {"estimate": said, "error_of": errors, "others": others}


def activations(config: Configuration) -> int:
    """Bytes by Korthikanti et al. (2022), without recomputation and without parallelism."""
    size = config.size
    length, width = size.get("tokens", size.get("length")), size["width"]
    whole = length * config.batch * width * size["layers"] * (34 + 5 * size["heads"] * length / width)
    return round(whole * (1 if config.dtype == "bfloat16" else 2))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """For each set, errors of the estimate against both peaks, and of the formulas against what was allocated."""
    found: dict[str, Any] = {}
    for which in ("tuned", "fresh"):
        own = [row for row in rows if row["set"] == which and "error_of" in row]
        if not own:
            continue
        found[which] = {kind: spread([row["error_of"][kind] for row in own]) for kind in ("allocated", "reserved")}
        for name in ("accelerate", "deepspeed", "korthikanti"):
            found[which][name] = spread([row["others"][name] for row in own if name in row["others"]])
        found[which]["worst_took_s"] = max(row["estimate"]["took_s"] for row in own)
    return found


def spread(errors: list[float]) -> dict[str, float]:
    sizes = sorted(map(abs, errors))
    return {
        "count": len(errors), "median": round(statistics.median(sizes), 4), "p95": sizes[int(0.95 * (len(sizes) - 1))],
        "most_under": min(errors), "most_over": max(errors),
    }  # fmt: skip


if __name__ == "__main__":
    main()
