"""What layers that every subnet uses lose when their updates come late, so that they never stall a pipeline.

    python benchmarks/shared_layers.py [--quick] [--json FILE]

The digits supernet (a stem, a reduction and a head are shared) is trained on scikit-learn's real digits with its shared
layers `exact`, `delayed(D)` and `lagged(K)`, for D and K in 4, 8, 16, everything else equal, five seeds. `loss` is the
mean training loss of the last tenth of the steps; `accuracy` the mean validation accuracy of 16 subnets with inherited
weights.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from typing import Any

import torch
from machine import write

import weft
from weft.data import digits
from weft.keys import generator
from weft.search import Scorer
from weft.zoo import digits_conv

KINDS = ("exact", *(f"{kind}({number})" for kind in ("delayed", "lagged") for number in (4, 8, 16)))


def measure(consistency: str, optimizer: weft.Optimizer, seed: int, steps: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        trained = weft.train(
            digits_conv,
            digits(),
            steps=steps,
            batch_size=64,
            consistency={"shared": consistency},
            optimizer=optimizer,
            metrics={"accuracy": weft.accuracy},
            seed=seed,
            runs=folder,
            checkpoint_every=steps,
        )
        losses = [event["loss"] for event in trained.run.events.read() if event["event"] == "step"]
        scorer = Scorer(trained.chain, trained.data, trained.settings)
        rng = generator(0, "subnets")
        scores = [scorer.quality(trained.chain.space.sample(rng))["accuracy"] for _ in range(16)]
    return statistics.mean(losses[-steps // 10 :]), statistics.mean(scores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, few steps")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds, steps = ([0], 40) if options.quick else ([0, 1, 2, 3, 4], 600)
    optimizers = {
        "sgd": weft.Optimizer("sgd", lr=0.05, momentum=0.9, weight_decay=5e-4),
        "adamw": weft.Optimizer("adamw", lr=2e-3),
    }
    rows: list[dict[str, Any]] = []
    print(f"{'optimizer':10}{'shared layers':16}{'loss':>8}{'sd':>8}{'accuracy':>10}{'sd':>8}")
    for name, optimizer in optimizers.items():
        for kind in KINDS:
            found = [measure(kind, optimizer, seed, steps) for seed in seeds]
            losses, scores = [loss for loss, _ in found], [score for _, score in found]
            row = {
                "optimizer": name,
                "consistency": kind,
                "loss": statistics.mean(losses),
                "loss_sd": statistics.stdev(losses) if len(seeds) > 1 else 0.0,
                "accuracy": statistics.mean(scores),
                "accuracy_sd": statistics.stdev(scores) if len(seeds) > 1 else 0.0,
                "seeds": len(seeds),
                "steps": steps,
            }
            rows.append(row)
            print(
                f"{name:10}{kind:16}{row['loss']:8.4f}{row['loss_sd']:8.4f}{row['accuracy']:10.4f}{row['accuracy_sd']:8.4f}",
                flush=True,
            )
            write(options.json, rows=rows, data="scikit-learn digits")


if __name__ == "__main__":
    main()
