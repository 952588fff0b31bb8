"""PACI, `bounded(K, S)`: time to a given loss against torch's pipelines, many stages simulated, and memory.

    python benchmarks/paci.py [--quick] [--parts rates time steps simulator memory] [--data FILE] [--json FILE]

A GPT of 8 layers is trained on the characters of a text (tiny Shakespeare by --data, else Python's help) on two
processes, each pinned to one core with one thread. All methods have the same weights to start from, the same
micro-batches in the same order, AdamW (fused) or Muon, and the same cut, balanced by measured costs.

rows            time. For K micro-batches an update: `torch-1f1b` (Schedule1F1B; at K=1, which it refuses,
                ScheduleGPipe, whose order is the same there), `torch-zbv` (ScheduleZBVZeroBubble, two stages a rank),
                and in one runtime, each another setting of one rule: `weft-flush` (1F1B), `-gpipe`, `-bounded` (PACI:
                bounded(K, 2)), `-stashed` (PipeDream), `-2bw`.
                All are warm before the clock starts, and take turns of some seconds in the same two processes, which
                give `seconds_per_step`, without the fill of a pipeline, and the ratios within a turn. How many
                steps a method needs until the mean training loss of the last `over` micro-batches has come down to
                `target` (what a flush reaches late in its run at the largest K) is found by one device,
                whose losses those of the turns are compared with: `largest_difference` (0.0: the same bits; torch sums
                otherwise). Methods with a flush have the rate `lr` of the task, the others its `late_lr`, times the
                root of K. `seconds_to_loss` is the product, `ratio_to_torch_1f1b` that of both ratios. `utilisation` is
                the time that both ranks worked, of that between their first operation and their last; `waited_share`
                how much of the time others on the machine took. To reach: 1.35 at K=2, 1.15 at K=4, and never slower
                than torch-zbv.
rows_steps      how many updates a flush and `bounded` need to a loss, for several seeds; `steps` has means.
rows_rates      the mean loss of the last micro-batches of a longer run at K=4, on one device, at some rates.
rows_simulator  flush (1F1B) against bounded(K, depth) at many stages, with forward 1 : backward 2, and with the costs
                of a stage as measured; messages arrive a share `communication` of a forward late. A depth of 2 S holds
                older versions and twice the micro-batches, which hides the messages. To reach: 1.75 at 8 stages, K=8.
rows_memory     of weft's own two, a larger GPT: `in_flight` micro-batches (to reach: S - s), `weight_copies` (matrices
                in graphs, seen through the hooks of saved tensors, in parameters and in older versions; to reach: 1),
                `saved_copies` (those in graphs), `resident_mib` and `ratio_to_flush` (to reach: at most 1.03).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import paci_memory
import paci_simulator
import paci_steps
import paci_time
import torch
from machine import about, write
from paci_reference import FLUSH, target_of
from paci_task import RANKS, Task

PARTS = ("rates", "time", "steps", "simulator", "memory")
STEPS = ("seed", "k", "target", "flush", "bounded", "more")
TIME = (
    "k",
    "method",
    "seconds_to_loss",
    "ratio_to_torch_1f1b",
    "utilisation",
    "steps_to_loss",
    "seconds_per_step",
    "step_ratio_to_torch_1f1b",
    "step_ratio_to_flush",
    "largest_difference",
    "waited_share",
)
SIMULATOR = ("costs", "stages", "k", "communication", "depth", "flush_time", "bounded_time", "ratio")
MEMORY = (
    "precision",
    "method",
    "stage",
    "in_flight",
    "weight_copies",
    "saved_copies",
    "resident_mib",
    "ratio_to_flush",
)


class Table:
    """Rows as a person reads them, each when it is there."""

    def __init__(self, *columns: str) -> None:
        self.columns = columns
        print("  ".join(f"{column:>12}" for column in columns), flush=True)

    def show(self, row: dict[str, Any]) -> None:
        told = (f"{row[c]:.3f}" if isinstance(row[c], float) else str(row[c]) for c in self.columns)
        print("  ".join(f"{text:>{max(12, len(c))}}" for text, c in zip(told, self.columns, strict=True)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, one repeat")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--data", metavar="FILE", help="a text to train on")
    parser.add_argument("--json", metavar="FILE", help="where the rows go; those of other parts stay")
    parser.add_argument("--ks", nargs="+", type=int, metavar="K")
    parser.add_argument("--methods", nargs="+", metavar="NAME", default=list(paci_time.METHODS))
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--rows", type=int, default=6, help="of a micro-batch")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate at K=1; it grows with the root of K")
    parser.add_argument("--late-lr", type=float, default=1e-3, help="that of methods whose forwards see old weights")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the text")
    parser.add_argument("--seeds", type=int, default=5, help="how many, of part steps")
    parser.add_argument("--repeats", type=int, metavar="N")
    parser.add_argument("--microbatches", type=int, default=1024, help="of a whole run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ks = options.ks or ([2, 4] if options.quick else [1, 2, 4, 8])
    repeats = options.repeats or (1 if options.quick else 12)
    over = 16 if options.quick else 64
    length = 96 if options.quick else options.microbatches
    how = {"kind": options.optimizer, "rows": options.rows, "lr": options.lr, "late_lr": options.late_lr}
    task, costs = Task(length, **how, seed=options.seed, path=options.data).profiled()
    found: dict[str, Any] = {}
    if options.json and Path(options.json).exists():
        kept = json.loads(Path(options.json).read_text())
        found = {key: value for key, value in kept.items() if key not in ("command", "machine")}

    def keep(part: str, **values: Any) -> None:
        found.update(values)
        found.setdefault("parts", {})[part] = {"command": about()["command"], "load": os.getloadavg()[1]}
        write(options.json, **found)

    if "time" in options.parts:
        print(f"cut {task.cut}, ZBV's {task.v_cut}; seconds of the stages {costs['stages']}", flush=True)
        told = {**asdict(task), "path": task.path and Path(task.path).name}
        known = paci_time.references(task, ks, options.methods)
        target = target_of(known[FLUSH, max(ks)], over)
        print(f"target: a mean training loss of {target:.4f} over {over} micro-batches", flush=True)
        table, rows = Table(*TIME), []
        for row in paci_time.rows(task, ks, options.methods, repeats, known, target, over):
            rows.append(row)
            table.show(row)
            keep("time", rows=rows, task=told, costs=costs, target=target, over=over)
    if "steps" in options.parts:
        table, rows = Table(*STEPS), []
        for row in paci_steps.rows(task, ks, range(1 if options.quick else options.seeds), over):
            rows.append(row)
            table.show(row)
            keep("steps", rows_steps=rows, steps=paci_steps.summary(rows))
    if "rates" in options.parts:
        table, rows = Table("method", "lr", "loss"), []
        for row in paci_time.rates(replace(task, microbatches=2 * length), 4, (5e-4, 1e-3, 2e-3), over):
            rows.append(row)
            table.show(row)
        keep("rates", rows_rates=rows)
    if "simulator" in options.parts:
        forward, backward = (statistics.mean(stage[kind] for stage in costs["stages"]) for kind in (0, 1))
        priced = {"equal": (1.0, 2.0), "measured": (forward, backward)}
        table, rows = Table(*SIMULATOR), []
        for row in paci_simulator.rows(priced, options.quick):
            rows.append(row)
            table.show(row)
        keep("simulator", rows_simulator=rows, costs_simulated=priced)
    if "memory" in options.parts:
        # 25 M parameters and few tokens: most of the memory are weights, of which a copy more is seen.
        large = replace(task, width=512, heads=8, context=48, rows=2, microbatches=16 if options.quick else 32)
        table, rows = Table(*MEMORY), []
        for row in paci_memory.rows(large, 2 * RANKS, min(repeats, 3)):
            rows.append(row)
            table.show(row)
        keep("memory", rows_memory=rows)


if __name__ == "__main__":
    main()
