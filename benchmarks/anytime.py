"""Any-time curves: what a search would answer if it were stopped now, in entangled spaces, at equal size.

    python benchmarks/anytime.py --data DIR [--quick] [--json FILE]

DIR holds `tinyshakespeare/input.txt` and `cifar10-jpeg/cifar10_jpeg_36k.npz`. In a small GPT space and in a small
AutoFormer space, gradient methods are compared with SPOS and evolution: at fixed moments the pick, which has the wanted
number of parameters within 2 %, is scored on validation data with the weights that it inherits. `seconds` is time spent
training, and for SPOS also searching; time spent on scoring for the curve counts for none. `regret` is the loss above
the best that any method reached in that space, `memory_mib` the most that the device held.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import write

import weft
from weft.data import Data, load, text
from weft.elastic.mixture import choice_options
from weft.engine.bilevel import Bilevel
from weft.search import Objective, parse_constraints, run_search
from weft.search.cost_model import build_cost_model
from weft.search.discretize import most_probable_subnet
from weft.search.gradient import make_gradient_method
from weft.search.gradient.api import MixedLoss
from weft.search.gradient.methods import GDAS
from weft.search.targets import Target
from weft.space import Subnet
from weft.supernet import Chain
from weft.supernet.mixed_chain import PROGRESS, make_mixed_chain
from weft.zoo import gpt, vit

METHODS = ("darts", "drnas", "gdas", "spos")


@dataclass(frozen=True)
class Field:
    """A space with its data."""

    build: Callable[[], Chain]
    data: Data
    batch: int
    rate: float


def fields(folder: Path, quick: bool) -> dict[str, Field]:
    words = text(128, folder / "tinyshakespeare" / "input.txt")
    images = load(folder / "cifar10-jpeg" / "cifar10_jpeg_36k.npz", validation=0.2, **({"limit": 600} if quick else {}))
    size = int(words.info["size"])
    small_gpt = partial(gpt, (96, 192, 288), (4, 5, 6), (2, 3, 4), (2, 3, 4), size, 128)
    small_vit = partial(vit, (96, 128, 160), (6, 7, 8), (2, 3, 4), (2.0, 3.0, 4.0), 10, 32, 4, head_dim=32)
    return {
        "gpt": Field(small_gpt, words, 8 if quick else 64, 1e-3),
        "autoformer": Field(small_vit, images, 8 if quick else 128, 1e-3),
    }


class Curve:
    """Scores picks at fixed moments of a training that it watches."""

    def __init__(self, field: Field, plain: Chain, target: Target, device: str, seconds: float, points: int) -> None:
        self.plain, self.target, self.device = plain, target, device
        assert field.data.validation is not None
        held = field.data.validation
        chosen = np.random.default_rng(0).permutation(len(held))[: 16 * field.batch]
        self._batches = [{k: v.to(device) for k, v in held.take(part).items()} for part in np.array_split(chosen, 4)]
        self.rows: list[dict[str, Any]] = []
        self._spent, self._since = 0.0, time.perf_counter()
        self._marks = [seconds * (k + 1) / points for k in range(points)]

    @torch.no_grad()
    def loss(self, subnet: Subnet, batches: int = 4) -> float:
        losses = [weft.cross_entropy(self.plain(b, subnet), b).item() for b in self._batches[:batches]]
        return sum(losses) / len(losses)

    def watch(self, pick: Callable[[], tuple[Subnet, float]]) -> Callable[[Mapping[str, Any]], None]:
        def seen(event: Mapping[str, Any]) -> None:
            if event["event"] == "started":
                self._since = time.perf_counter()
            if event["event"] != "step" or not self._marks:
                return
            if self.device == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            if self._spent + now - self._since >= self._marks[0]:
                self._spent += now - self._since
                self._marks.pop(0)
                subnet, searching = pick()
                self.rows.append(
                    {
                        "seconds": self._spent + searching,
                        "step": event["step"],
                        "loss": self.loss(subnet),
                        "parameters": self.target.expected.of(subnet),
                        "pick": str(subnet),
                    }
                )
                self._since = time.perf_counter()
            if not self._marks:
                raise KeyboardInterrupt  # the time is up

        return seen


def follow(field: Field, method: str, device: str, seconds: float, seed: int, points: int) -> list[dict[str, Any]]:
    """The curve of one method."""
    plain = weft.initialise(field.build, seed, device)
    example = {name: tensor[:1] for name, tensor in field.data.train.take(np.arange(1)).items()}
    expected = build_cost_model(weft.initialise(field.build, seed), example, "parameters")
    target = Target(expected, (expected.low + expected.high) / 2, weight=2.0)
    curve = Curve(field, plain, target, device, seconds, points)
    options: dict[str, Any] = {
        "batch_size": field.batch,
        "optimizer": weft.Optimizer("adamw", lr=field.rate, weight_decay=0.05, schedule="constant", warmup_steps=50),
        "seed": seed,
        "device": device,
        "channels_last": False,
        "steps": 1_000_000,
        "checkpoint_every": 1_000_000,
    }
    chosen = GDAS(1.0, 1.0) if method == "gdas" else make_gradient_method(method)  # a curve has no end to anneal to
    net: Chain = plain
    if method == "spos":
        options |= {"stream": "iid", "callbacks": [curve.watch(lambda: evolved(curve, plain, seed))]}
    else:
        mixed = weft.initialise(make_mixed_chain(plain, chosen, (PROGRESS,) if chosen.anneals else ()), seed, device)
        layout = tuple((n, len(choice_options(mixed.space, n))) for n in mixed.order)
        arch = weft.Optimizer("adam", lr=1e-2, betas=(0.5, 0.999), weight_decay=1e-3)
        net = mixed
        options |= {
            "stream": mixed.space.first(),
            "loss": MixedLoss(weft.cross_entropy, layout, (target,)),
            "architecture_search": Bilevel(arch, warmup=100),
            "callbacks": [curve.watch(lambda: (most_probable_subnet(mixed.mixture(), (target,)), 0.0))],
        }
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        weft.train(net, field.data, folder=folder, **options)
    memory = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else float("nan")
    return [{"method": method, "seed": seed, **row, "memory_mib": memory} for row in curve.rows]


def evolved(curve: Curve, plain: Chain, seed: int) -> tuple[Subnet, float]:
    began = time.perf_counter()
    value = curve.target.value
    found = run_search(
        plain.space,
        lambda subnet: {"loss": curve.loss(subnet, 1)},
        "evolution",
        [Objective("loss", maximize=False)],
        parse_constraints([f"parameters>={0.98 * value}", f"parameters<={1.02 * value}"]),
        budget=60,
        seed=seed,
        cheap=lambda subnet: {"parameters": curve.target.expected.of(subnet)},
    )
    best = min(found.scored, key=lambda scored: scored.scores["loss"])
    return best.subnet, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, metavar="DIR")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--points", type=int, default=5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    options = parser.parse_args()
    logging.getLogger("weft").setLevel(logging.ERROR)
    if options.quick:
        options.seconds, options.points = 4.0, 2
    rows: list[dict[str, Any]] = []
    for space, field in fields(Path(options.data), options.quick).items():
        for seed in options.seeds:
            for method in options.methods:
                found = follow(field, method, options.device, options.seconds, seed, options.points)
                rows += [{"space": space, **row} for row in found]
                shown = "  ".join(f"{row['loss']:.3f} at {row['seconds']:.0f} s" for row in found)
                print(f"{space:12}{method:8}{seed:3}  {shown}", flush=True)
        best = min(row["loss"] for row in rows if row["space"] == space)
        for row in rows:
            if row["space"] == space:
                row["regret"] = row["loss"] - best
        write(options.json, rows=rows)


if __name__ == "__main__":
    main()
