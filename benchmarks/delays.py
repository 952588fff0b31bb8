"""What the delay of an asynchronous pipeline costs: the final validation loss of a small GPT, by depth and K.

    python benchmarks/delays.py --data FILE [--device cuda|cpu] [--json FILE] [--quick] [--optimizers adamw ...]
                                [--seeds 0 1 2 3 4] [--workers N] [--seconds S] [--summary]

A GPT of 16 blocks (tokens, 14 layers, head) learns the characters of tiny Shakespeare on one device, which emulates the
pipelines exactly. `flush` is synchronous; `lagged` sees weights one update old everywhere (PipeDream-2BW); `bounded` at
depth S updates every K micro-batches and its gradients mix two versions of the weights; `stashed` has the same delays,
but each gradient is of one version. A batch has 64 rows whatever K is (a micro-batch has 64 / K), and batches and fresh
weights are functions of the seed: a difference to `flush` is the delay's and nothing else's. The mean delay of a
gradient is (S - 1) / 2K updates; that of `lagged` is 1.

The rate of each optimizer is the best of a list for `flush` on seed 100, which no cell uses; AdamW is measured at a
third of it too. `adamw-clipped` is AdamW whose gradients are cut to a norm of 0.05 layer by layer, which is nearly
always less than they have; the others are not clipped. Cosine to a tenth after a warm-up over a fifteenth of the steps,
fp32. Rows are
`optimizer, lr, method, depth, k, seed, val_loss, train_loss, steps, seconds, drift_mean` (`train_loss`: over the last
tenth of the steps; `drift_mean`: updates between the forward and the backward of a layer). Those that FILE holds
already are not run again. `--workers` run beside each other, so `seconds` is no measure of speed; on a GPU they take
turns unless NVIDIA's MPS is there (`nvidia-cuda-mps-control -d`). After `--seconds` no run is begun. `--summary` only
sums up FILE. Beside FILE lies the picture, FILE with the ending .svg.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from delays_run import Job, Size, Workers, identity
from delays_summary import draw, summed, table
from machine import read_rows, write

from weft.utils.files import write_atomic

RATES = {
    "adamw": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
    "adamw-clipped": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
    "muon": (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
    "nadam": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
}
CHOSEN_ON = 100
DEPTHS = (2, 8, 16)
QUICK = Size(layers=2, width=32, heads=2, context=32, batch=16, steps=20)


def chosen(rows: Sequence[Mapping[str, Any]], optimizers: Sequence[str], steps: int) -> dict[str, dict[str, Any]]:
    """The rate of each optimizer, and what each that was tried has come to."""
    found: dict[str, dict[str, Any]] = {}
    for name in optimizers:
        mine = [row for row in rows if (row["optimizer"], row["seed"], row["steps"]) == (name, CHOSEN_ON, steps)]
        tried = {row["lr"]: row["val_loss"] for row in mine}
        done = {lr: loss for lr, loss in tried.items() if loss is not None}
        if done:
            found[name] = {
                "lr": min(done, key=lambda lr: done[lr]),
                "tried": [[lr, tried[lr]] for lr in sorted(tried)],
            }
    return found


def cells(depths: Sequence[int], methods: Sequence[str]) -> Iterator[tuple[str, int | None, int | None]]:
    """Method, depth and K; those that take longest first, so that no process ends long after the others."""
    pairs = sorted(((depth, k) for depth in depths for k in (depth // 2, depth, 2 * depth)), key=lambda p: -p[1])
    for method in methods:
        if method in ("flush", "lagged"):
            yield method, None, None
        else:
            yield from ((method, depth, k) for depth, k in pairs)


def grid(rates: Mapping[str, Mapping[str, Any]], seeds: Sequence[int], depths: Sequence[int], steps: int) -> list[Job]:
    """All cells, in the order of what is wanted most, so that a grid that is cut short still says something."""
    plain: tuple[str, ...] = ("flush", "lagged", "bounded")
    stashed: tuple[str, ...] = ("stashed",)
    wanted = [(name, float(rates[name]["lr"]), plain) for name in RATES if name in rates]
    if "adamw" in rates:
        high = float(rates["adamw"]["lr"])
        wanted += [("adamw", high / 3, plain), ("adamw", high, stashed), ("adamw", high / 3, stashed)]
    return [
        Job(name, lr, method, depth, k, seed, steps)
        for name, lr, methods in wanted
        for method, depth, k in cells(depths, methods)
        for seed in seeds
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FILE", help="the text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="four blocks and a few steps, to see that it works")
    parser.add_argument("--optimizers", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--workers", type=int, default=1, help="processes beside each other on the device")
    parser.add_argument("--seconds", type=float, help="after which no run is begun")
    parser.add_argument("--summary", action="store_true", help="run nothing")
    options = parser.parse_args()
    if not options.summary and not options.data:
        parser.error("--data is needed: the text to learn")
    size = QUICK if options.quick else Size()
    steps, depths = options.steps or size.steps, (2, 4) if options.quick else DEPTHS
    rows = read_rows(options.json)
    if not options.summary:
        work(rows, options, size, depths, steps)
    found = summed([row for row in rows if row["seed"] != CHOSEN_ON])
    print(table(found))
    if options.json and found:
        write_atomic(Path(options.json).with_suffix(".svg"), draw(found))


def work(
    rows: list[dict[str, Any]], options: argparse.Namespace, size: Size, depths: Sequence[int], steps: int
) -> None:
    """Measures what the rows lack."""
    workers = Workers(options, size)
    optimizers = [name for name in RATES if name in options.optimizers]

    def run(jobs: Sequence[Job]) -> None:
        done = {identity(row) for row in rows}
        for row in workers.rows([job for job in jobs if job.id not in done]):
            rows.append(row)
            rates = chosen(rows, optimizers, steps)
            shape = {name: getattr(size, name) for name in ("layers", "width", "heads", "context", "batch")}
            cells = summed([one for one in rows if one["seed"] != CHOSEN_ON])
            write(options.json, device=options.device, model=shape, rates=rates, cells=cells, rows=rows)
            told = "diverged" if row["val_loss"] is None else f"{row['val_loss']:.4f}"
            print(
                f"{row['optimizer']:13} {row['lr']:.2e} {row['method']:8} S={row['depth'] or '-':<3}"
                f"K={row['k'] or '-':<3}seed {row['seed']:<4}{told}  {row['seconds']:.1f} s",
                flush=True,
            )

    try:
        tries = [(name, lr) for name in optimizers for lr in RATES[name]]
        run([Job(name, lr, "flush", None, None, CHOSEN_ON, steps) for name, lr in tries])
        if not workers.late:  # else the rates may not be chosen among all of their list
            run(grid(chosen(rows, optimizers, steps), options.seeds, depths, steps))
    finally:
        workers.close()


if __name__ == "__main__":
    main()
