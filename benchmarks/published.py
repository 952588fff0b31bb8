"""What PaSE's cost model, as published and corrected, predicts for the networks of its paper, beside its measurements.

    python benchmarks/published.py [--quick] [--json FILE]

Speed-ups are over data parallelism with the same devices. The model knows two figures of a machine: FLOP/s (the peak in
float32 of the preset) and bytes a second (of a ring over all p devices: PCI Express up to 8, then InfiniBand).

rows              `paper`: read from Fig. 6, measured on real machines with Mesh-TensorFlow. `published`: the optimum of
                  the published model, by that model. `corrected`: the optimum of the corrected model, by that one.
                  `published_plan`: the plan that is optimal as published, by the corrected model; `over_optimum`: how
                  much more it costs there than the corrected optimum, as a fraction. `data_devices`: how many ways data
                  parallelism splits the batch (images: 128 at most 32 ways, since PaSE keeps 4 in a part).
rows_corrections  the same for each correction alone: what one defect costs a plan.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import fields
from typing import Any

from machine import write
from pase import AS_PUBLISHED, CORRECTED, Corrections, tables

from weft.hardware.machine import machine
from weft.plan.solver import Problem, solve

DEVICES = (4, 8, 16, 32, 64)

# Fig. 6 of the paper, PaSE's bars, at 4, 8, 16, 32 and 64 devices.
PAPER = {
    ("alexnet", "1080Ti"): (1.65, 1.75, 1.85, 1.44, 1.41),
    ("alexnet", "2080Ti"): (3.54, 4.00, 3.99, 2.78, 1.75),
    ("inception3", "1080Ti"): (1.03, 1.08, 1.07, 1.09, 1.12),
    ("inception3", "2080Ti"): (1.01, 1.09, 1.10, 1.11, 1.18),
    ("rnnlm", "1080Ti"): (1.85, 1.76, 1.45, 1.41, 1.36),
    ("rnnlm", "2080Ti"): (2.02, 2.41, 1.68, 1.62, 1.33),
    ("transformer", "1080Ti"): (1.03, 1.02, 1.55, 1.51, 1.43),
    ("transformer", "2080Ti"): (1.00, 1.83, 1.75, 1.60, 2.70),
}


def compared(network: str, preset: str, p: int, fix: Corrections) -> dict[str, Any]:
    """The published optimum and the optimum of a corrected model, each by its own model and by the latter."""
    where = machine(preset)
    rates = {"flops": where.device.peak["float32"], "bandwidth": where.axis_link((p,), 0)[0]}
    found = {}
    for model in (AS_PUBLISHED, fix):
        unary, pairs, of = tables(network, p, corrected=model, **rates)
        problem = Problem(tuple(unary), pairs)
        found[model] = problem, solve(problem)
    data = of.data_parallel()  # the configurations, and so the picks, are the same in both models
    (old, published), (new, corrected) = found[AS_PUBLISHED], found[fix]
    over = new.cost(published.assignment) / corrected.cost
    return {
        "network": network,
        "machine": preset,
        "p": p,
        **rates,
        "published": old.cost(data) / published.cost,
        "corrected": new.cost(data) / corrected.cost,
        "published_plan": new.cost(data) / new.cost(published.assignment),
        "over_optimum": over - 1,
        "optimal": published.optimal and corrected.optimal,
        "data_devices": min(int(rows[k].prod()) for rows, k in zip(of.configs, data, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 and 8 devices only")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    began = time.perf_counter()
    devices = DEVICES[:2] if options.quick else DEVICES
    columns = ("paper", "published", "corrected", "published_plan", "over_optimum")
    print(f"{'network':13}{'machine':9}{'p':>3}" + "".join(f"{column:>16}" for column in columns))
    rows = []
    for (network, preset), measured in PAPER.items():
        for p, paper in zip(devices, measured, strict=False):
            rows.append({**compared(network, preset, p, CORRECTED), "paper": paper})
            print(f"{network:13}{preset:9}{p:3}" + "".join(f"{rows[-1][column]:16.2f}" for column in columns))
    alone = []
    for network in ("alexnet", "inception3", "rnnlm", "transformer"):
        for switch in fields(Corrections):
            fix = Corrections(**{switch.name: True})
            alone.append({**compared(network, "1080Ti", devices[-2], fix), "correction": switch.name})
            print(
                f"{network:13}1080Ti{devices[-2]:6}  {switch.name:12}{alone[-1]['over_optimum']:8.3f} over its optimum"
            )
    for preset in ("1080Ti", "2080Ti"):
        best = {key: max(row[key] for row in rows if row["machine"] == preset) for key in columns[:4]}
        print(f"{preset}: at most " + ", ".join(f"{value:.2f} ({key})" for key, value in best.items()))
    print(f"{time.perf_counter() - began:.0f} s")
    write(options.json, rows=rows, rows_corrections=alone)


if __name__ == "__main__":
    main()
