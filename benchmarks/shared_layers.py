"""What layers that every subnet uses lose when their updates come late, so that they never stall a pipeline.

    python benchmarks/shared_layers.py [--quick] [--json FILE]

The digits supernet (a stem, a reduction and a head are shared) is trained on scikit-learn's real digits with its shared
layers `exact`, `delayed(D)` and `lagged(K)`, for D and K in 4, 8, 16, everything else equal, five seeds. `loss` is the
mean training loss of the last tenth of the steps; `accuracy` the mean validation accuracy of 16 subnets with inherited
weights. A file that is there already is gone on with: rows that it has are not trained again.

`rows_bubble` has what such layers cost in time, simulated: 48 blocks of 72 choices on S stages, with a stem and a norm
in every block that all subnets share and train, against the same supernet with them frozen (`extra`), stream `spaced`,
forward 1 : backward 2, norms a tenth of a block. To reach: at most 0.03 more where D, K >= 2S/m.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from typing import Any

import torch
from machine import read_rows, write

import weft
from weft.data import digits
from weft.engine.consistency import Exact, parse_consistency
from weft.pipeline.scheduler import SchedulePolicy
from weft.pipeline.simulator import simulate
from weft.pipeline.workload import Workload
from weft.search import Scorer
from weft.supernet.partition import best_cut
from weft.utils.rng import generator
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
            folder=folder,
            checkpoint_every=steps,
        )
        losses = [event["loss"] for event in trained.run.events.read() if event["event"] == "step"]
        scorer = Scorer(trained)
        rng = generator(0, "subnets")
        scores = [scorer.quality(trained.chain.space.sample(rng))["accuracy"] for _ in range(16)]
    return statistics.mean(losses[-steps // 10 :]), statistics.mean(scores)


def bubble(stages: int, m: int, shared: str | None) -> float:
    """The idle share in steady state, with shared layers of some consistency, or frozen, so that nobody waits."""
    space = weft.Space()
    for block in range(48):
        space.categorical(f"b{block}", list(range(72)))
    stream = weft.make_stream(space, "spaced", 0)
    drawn = [list(stream[step][0].values.values()) for step in range(200)]

    def picks(n: int) -> list[tuple[int, Any]]:
        own: list[tuple[int, Any]] = [(block, (block, choice)) for block, choice in enumerate(drawn[n // m])]
        return own + [(0, "stem"), *((block, f"norm{block}") for block in range(48))]

    class Costs(dict[Any, tuple[float, float]]):
        def __missing__(self, layer: Any) -> tuple[float, float]:
            part = 1.0 if isinstance(layer, tuple) or layer == "stem" else 0.1
            return part / m, 2 * part / m

    promise = None if shared is None else parse_consistency(shared)
    work = Workload(48, m, 200, picks, lambda layer: Exact() if isinstance(layer, tuple) else promise, Costs())
    cut = best_cut(work.expected_costs(), stages)
    return simulate(work, cut, SchedulePolicy(2 * stages * m), keep_spans=False).steady_bubble


def bubbles(quick: bool) -> list[dict[str, Any]]:
    rows = []
    print(f"{'stages':>7}{'m':>4}{'shared layers':>16}{'bubble':>9}{'extra':>9}")
    for stages in (4,) if quick else (4, 8, 16):
        for m in (1, 4):
            without = bubble(stages, m, None)
            enough = -(-2 * stages // m)
            for number in sorted({4, enough, 2 * enough}):
                for kind in ("delayed", "lagged"):
                    found = bubble(stages, m, f"{kind}({number})")
                    told = {"stages": stages, "microbatches": m, "consistency": f"{kind}({number})"}
                    rows.append({**told, "enough": number >= enough, "bubble": found, "extra": found - without})
                    print(f"{stages:7}{m:4}{kind + f'({number})':>16}{found:9.3f}{found - without:9.3f}", flush=True)
    return rows


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
    timed = bubbles(options.quick)
    rows = read_rows(options.json)
    print(f"{'optimizer':10}{'shared layers':16}{'loss':>8}{'sd':>8}{'accuracy':>10}{'sd':>8}")
    for name, optimizer in optimizers.items():
        for kind in KINDS:
            if any((row["optimizer"], row["consistency"], row["steps"]) == (name, kind, steps) for row in rows):
                continue
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
            write(options.json, rows=rows, rows_bubble=timed, data="scikit-learn digits")
    write(options.json, rows=rows, rows_bubble=timed, data="scikit-learn digits")


if __name__ == "__main__":
    main()
