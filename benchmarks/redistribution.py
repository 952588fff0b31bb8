"""weft's own redistribution of tensors beside DTensor's, on two processes of this host (gloo over loopback).

    python benchmarks/redistribution.py [--quick] [--json FILE]

Each row is one redistribution of a square float32 tensor, forward and backward, by `weft.plan.runtime.redistribute` and
by `DTensor.from_local(...).redistribute(...).to_local()`, in turn: of each the median microseconds, and of
the processor time in its thread (`cpu_us`), which is what the wrappers cost on a busy host; and whether results and
gradients are equal to the bit. DTensor takes no gradient that lies otherwise than its result, which weft's readers may
leave as partial sums; there `grad_placements` of `to_local` says so. A tensor of 4 KiB shows what the wrappers cost.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import write
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.multiprocessing import start_processes

from weft.plan.runtime.redistribute import MeshCollectives, redistribute, redistribution_steps
from weft.plan.sharding import PARTIAL, REPLICATED, Mesh, Placements, without_partials

PROCESSES = 2
# From a layout to another, and how the gradient of the result lies.
CASES: dict[str, tuple[int, int, int]] = {
    "gather a weight, scatter its gradient": (0, REPLICATED, PARTIAL),
    "gather an activation": (1, REPLICATED, REPLICATED),
    "add up partial sums": (PARTIAL, REPLICATED, REPLICATED),
    "scatter partial sums": (PARTIAL, 0, 0),
    "all-to-all": (0, 1, 1),
    "use a whole weight, add up its gradient": (REPLICATED, REPLICATED, PARTIAL),
}


def ours(collectives: MeshCollectives, held: Placements, wanted: Placements, back: Placements) -> Any:
    mesh, home = Mesh(collectives.sizes), without_partials(held)
    steps, grad_steps = redistribution_steps(held, wanted, mesh), redistribution_steps(back, home, mesh)
    return lambda tensor: redistribute(tensor, collectives, steps, (grad_steps,))[0]


def spelled(placements: Placements) -> list[Placement]:
    """Placements as DTensor has them."""
    return [Partial() if each == PARTIAL else Replicate() if each == REPLICATED else Shard(each) for each in placements]


def theirs(mesh: Any, held: Placements, wanted: Placements, back: Placements) -> Any:
    first, second, third = (spelled(each) for each in (held, wanted, back))

    def run(tensor: Tensor) -> Tensor:
        found = DTensor.from_local(tensor, mesh, first, run_check=False).redistribute(mesh, second)
        return found.to_local(grad_placements=third)

    return run


def taken(run: Any, tensor: Tensor, gradient: Tensor) -> tuple[tuple[float, float], Tensor, Tensor]:
    leaf = tensor.clone().requires_grad_()
    dist.barrier()
    began, cpu = time.perf_counter(), time.thread_time()
    result = run(leaf)
    result.backward(gradient)
    seconds = time.perf_counter() - began, time.thread_time() - cpu
    assert leaf.grad is not None
    return seconds, result.detach(), leaf.grad


def process(rank: int, folder: str, repeats: int) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    collectives, rows = MeshCollectives(mesh), []
    for side in (32, 1024):
        for name, places in CASES.items():
            held, wanted, back = ((place,) for place in places)
            shape = [side // PROCESSES if axis == held[0] else side for axis in range(2)]
            torch.manual_seed(rank)
            tensor = torch.randn(shape)
            ways = {"weft": ours(collectives, held, wanted, back), "dtensor": theirs(mesh, held, wanted, back)}
            gradient = torch.randn_like(ways["weft"](tensor))
            times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
            found = {}
            for _ in range(repeats + 3):
                for way, run in ways.items():
                    seconds, *found[way] = taken(run, tensor, gradient)
                    times[way].append(seconds)
            equal = all(torch.equal(one, two) for one, two in zip(*found.values(), strict=True))
            middle = {
                f"{way}{unit}": round(statistics.median(pair[number] for pair in all_[3:]) * 1e6, 1)
                for number, unit in enumerate(("_us", "_cpu_us"))
                for way, all_ in times.items()
            }
            rows.append({"case": name, "kib": side * side * 4 // 1024, **middle, "equal": equal})
    if rank == 0:
        torch.save(rows, f"{folder}/rows")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        start_processes(process, (folder, 20 if arguments.quick else 200), nprocs=PROCESSES, start_method="spawn")
        rows = torch.load(Path(folder, "rows"))
    for row in rows:
        print(row)
    for size in sorted({row["kib"] for row in rows}):
        for unit in ("us", "cpu_us"):
            ratios = [row[f"dtensor_{unit}"] / row[f"weft_{unit}"] for row in rows if row["kib"] == size]
            print(f"{size} KiB, {unit}: DTensor over weft {statistics.median(ratios):.2f}, at most {max(ratios):.2f}")
    note = (
        "weft keeps its own redistribution where DTensor takes longer for a small tensor, or gives other gradients: "
        "a plan moves some hundred tensors a step."
    )
    write(arguments.json, rows=rows, note=note)


if __name__ == "__main__":
    main()
