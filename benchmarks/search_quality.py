"""How well subnets with inherited weights are ranked, against true accuracies that others measured.

    python benchmarks/search_quality.py --data DIR [--quick] [--json FILE]

DIR holds `cifar10-jpeg/cifar10_jpeg_36k.npz` (30,000 training images, lossy) and
`nas-bench-macro/nas-bench-macro_cifar10.json`. The NAS-Bench-Macro supernet is trained with the streams `iid`, `fair`
and `spaced`; then all 6,561 subnets are scored on validation images that training has not seen, their batch norms set
by one batch of training images, and Kendall's tau is taken against the table. `top1pct_hit` says whether the subnet
that scored best is among the best 1 % of the table. A file that is there already is gone on with: rows that it has are
not run again.

    python benchmarks/search_quality.py --data DIR --methods darts drnas ... [--seconds 40] [--workers 6] [--json FILE]

compares search methods at equal time on NAS-Bench-Macro and NAS-Bench-201 (`nas-bench-201/nasbench201.csv.gz`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import methods
import numpy as np
import torch
from machine import read_rows, write
from ranks import kendall_tau
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from weft.data import Data, load
from weft.engine.rng import deterministic
from weft.zoo import macro_subnet, nas_bench_macro

STREAMS = ("iid", "fair", "spaced")


def train(data: Data, job: tuple[str, int, int], options: argparse.Namespace, folder: str) -> weft.TrainedRun:
    stream, seed, steps = job
    device = options.device
    return weft.train(
        nas_bench_macro,
        data,
        steps=steps,
        batch_size=options.batch,
        stream=stream,
        optimizer=weft.Optimizer(
            "sgd",
            lr=options.rate,
            momentum=0.9,
            weight_decay=options.decay,
            schedule="cosine",
            warmup_steps=min(200, steps // 10),
        ),
        augment=weft.ShiftFlip("image", padding=options.shift) if options.shift else None,
        metrics={},
        seed=seed,
        device=device,
        channels_last=device == "cuda",
        folder=folder,
        checkpoint_every=steps,
        keep_checkpoints=1,
    )


@torch.no_grad()
def score_all(
    trained: weft.TrainedRun, calibration: int, most: int | None, device: str
) -> dict[str, tuple[float, float]]:
    """Validation loss and accuracy of every subnet. Subnets with a common beginning share its activations: the table's
    keys, in order, are a walk through a tree."""
    chain = trained.chain.eval()
    train_part, validation = trained.data.train, trained.data.validation
    assert validation is not None
    seen = train_part.take(np.random.default_rng(0).choice(len(train_part), calibration, replace=False))["image"].to(
        device
    )
    held = validation.take(np.arange(len(validation)))
    images, labels = held["image"].to(device), held["label"].to(device)
    keys = [format_key(number) for number in range(3**8)]
    if most:
        keys = sorted(np.random.default_rng(0).choice(keys, most, replace=False).tolist())
    stack: list[tuple[Tensor, Tensor]] = [through(chain.module("stem"), seen, images)]
    scores: dict[str, Tensor] = {}
    before = ""
    for key in keys:
        common = next((i for i in range(8) if before[i : i + 1] != key[i]), 8)
        del stack[common + 1 :]
        route = chain.route(macro_subnet(chain.space, key))
        for layer in route[common + 1 : 9]:
            stack.append(through(chain.module(layer), *stack[-1]))
        outputs = through(chain.module("head"), *stack[-1])[1]
        hits = (outputs.argmax(-1) == labels).float().mean()
        scores[key] = torch.stack([F.cross_entropy(outputs, labels), hits])
        before = key
    return {
        key: (loss, hits) for key, (loss, hits) in zip(scores, torch.stack(list(scores.values())).tolist(), strict=True)
    }


def through(module: nn.Module, seen: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Both batches through a layer whose batch norms take the statistics of the first."""
    norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm2d)]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    seen = module(seen)
    for norm in norms:
        norm.eval()
    return seen, module(images)


def format_key(number: int) -> str:
    return "".join(str(number // 3**place % 3) for place in reversed(range(8)))


def measure(
    data: Data, truth: dict[str, float], job: tuple[str, int, int], options: argparse.Namespace
) -> dict[str, Any]:
    stream, seed, steps = job
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        trained = train(data, job, options, folder)
        trained_in = time.perf_counter() - began
        with deterministic(torch.device(options.device)):
            scores = score_all(trained, options.calibration, options.subnets, options.device)
        scored_in = time.perf_counter() - began - trained_in
    keys = sorted(scores)
    theirs = [truth[key] for key in keys]
    by_loss = {key: -scores[key][0] for key in keys}
    by_accuracy = {key: scores[key][1] for key in keys}
    chosen = by_loss if options.score == "loss" else by_accuracy
    best = max(keys, key=lambda key: chosen[key])
    rank = sum(value > truth[best] for value in truth.values())
    return {
        "stream": stream,
        "seed": seed,
        "steps": steps,
        "tau": kendall_tau(list(chosen.values()), theirs),
        "tau_by_loss": kendall_tau(list(by_loss.values()), theirs),
        "tau_by_accuracy": kendall_tau(list(by_accuracy.values()), theirs),
        "scored_by": options.score,
        "top1pct_hit": rank < 0.01 * len(truth),
        "pick": best,
        "pick_rank": rank + 1,
        "pick_true_accuracy": truth[best],
        "best_true_accuracy": max(truth.values()),
        "subnets": len(keys),
        "seconds_training": trained_in,
        "seconds_scoring": scored_in,
        "fingerprint": trained.fingerprint,
    }


def jobs(options: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    for seed in options.seeds:
        for stream in options.streams:
            yield stream, seed, options.steps


def compare(options: argparse.Namespace) -> None:
    """Search methods at equal time; see `methods.py`."""
    seeds, limit, seconds = options.seeds, None, options.seconds
    if options.quick:
        seeds, limit, seconds = [0], 600, 2.0
    rows = read_rows(options.json)
    done = {(row["space"], row["method"], row["seed"], row["budget_seconds"], row.get("warm", 0.2)) for row in rows}
    # One seed of everything first: a grid that is cut short is then still whole.
    wanted = [
        methods.Job(s, m, seed, seconds, options.warm, options.picks)
        for seed in seeds
        for s in options.spaces
        for m in options.methods
    ]
    todo = [job for job in wanted if job.id not in done]
    print(f"{'space':28}{'method':18}{'seed':>5}{'s':>7}{'tau':>8}{'regret':>8}{'rank':>7}{'top 1 %':>9}")
    for row in methods.run(todo, Path(options.data), options.device, options.workers, limit):
        if "failed" in row:
            print(f"{row['space']:28}{row['method']:18}{row['seed']:5}  failed: {row['failed']}", flush=True)
            continue
        rows.append(row)
        write(options.json, rows=rows, data="CIFAR-10, 30,000 lossy JPEG images, half of them for validation")
        print(
            f"{row['space']:28}{row['method']:18}{row['seed']:5}{row['seconds']:7.1f}{row['tau']:8.3f}"
            f"{row['regret']:8.2f}{row['rank']:7}{row['top1pct']!s:>9}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="a few steps and subnets, to see that it works")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--streams", nargs="+", default=list(STREAMS), choices=STREAMS)
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate")
    parser.add_argument(
        "--shift", type=int, default=4, help="augmentation: shift by up to this many pixels, and flip; 0: none"
    )
    parser.add_argument("--score", choices=("loss", "accuracy"), default="loss", help="what subnets are ranked by")
    parser.add_argument("--calibration", type=int, default=1000, help="training images that set the batch norms")
    parser.add_argument(
        "--validation", type=float, default=0.2, help="part of the training images that subnets are scored on"
    )
    parser.add_argument("--decay", type=float, default=5e-4, help="weight decay")
    parser.add_argument("--subnets", type=int, help="score this many at random instead of all")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="compare search methods at equal time instead")
    parser.add_argument("--spaces", nargs="+", default=list(methods.BENCHES), choices=list(methods.BENCHES))
    parser.add_argument(
        "--warm",
        type=float,
        help="part of a search in which the weights learn alone, with a rate of 0.01 for the architecture; "
        "if not given, both as weft.search has them",
    )
    parser.add_argument("--picks", action="store_true", help="try other ways to choose a subnet too")
    parser.add_argument("--seconds", type=float, default=40.0, help="what every method has")
    parser.add_argument("--workers", type=int, default=1, help="methods beside each other on the device")
    options = parser.parse_args()
    if options.methods:
        compare(options)
        return
    if options.quick:
        options.steps, options.batch, options.calibration, options.subnets, options.seeds = 20, 32, 64, 30, [0]
    folder = Path(options.data)
    table = json.loads((folder / "nas-bench-macro" / "nas-bench-macro_cifar10.json").read_text())
    truth = {key: entry["mean_acc"] for key, entry in table.items()}
    data = load(
        folder / "cifar10-jpeg" / "cifar10_jpeg_36k.npz",
        validation=options.validation,
        **({"limit": 600} if options.quick else {}),
    ).to(options.device)
    rows = read_rows(options.json)
    done = {(row["stream"], row["seed"], row["steps"]) for row in rows}
    print(
        f"{'stream':8}{'seed':>5}{'steps':>8}{'tau':>8}{'rank of pick':>14}{'top 1 %':>9}{'train s':>9}{'score s':>9}"
    )
    for job in jobs(options):
        if job not in done:
            rows.append(measure(data, truth, job, options))
            write(options.json, rows=rows, data="CIFAR-10, 30,000 lossy JPEG images, part of them for validation")
        row = next(row for row in rows if (row["stream"], row["seed"], row["steps"]) == job)
        print(
            f"{row['stream']:8}{row['seed']:5}{row['steps']:8}{row['tau']:8.3f}{row['pick_rank']:14}{row['top1pct_hit']!s:>9}"
            f"{row['seconds_training']:9.1f}{row['seconds_scoring']:9.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
