"""nanoGPT's model of characters, trained synchronously and with asynchronous updates, on tiny Shakespeare.

    python benchmarks/shakespeare.py --data input.txt [--device cuda|cpu] [--json FILE] [--quick]
                                     [--methods flush bounded] [--seeds 0 1 2] [--steps 5000]

nanoGPT publishes a validation loss of 1.4697, the best of its run, for 10.65 million parameters (6 layers, 6 heads,
width 384, context 256, dropout .2). The recipe here is its recipe: AdamW with betas .9 and .99, weight decay .1 on
matrices, 5000 steps of 64 windows, a rate of 1e-3 that goes down to 1e-4, 100 steps of warm-up, the norm of a gradient
clipped at 1. What differs: the weights of tokens and head are not tied. On a GPU forwards compute in bfloat16.

Every method trains on steps of 8 micro-batches. `flush` waits for all of them before it updates; `bounded` updates as
an asynchronous pipeline of as many stages as the model has blocks (8) would, every 8 micro-batches, emulated exactly on
one device; `stashed` does so with the weights of each forward kept for its backward.

Validation loss is the mean over the whole last tenth of the text, in windows of 256 that do not overlap. Rows are
`method, consistency, seed, val_loss` (with the final weights), `best_val_loss, best_step, steps, seconds, step_ms,
parameters, fingerprint, validation`; a row that FILE holds already is not measured again.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from machine import read_rows, write

import weft
from weft.data import Data, text
from weft.zoo import language_model

PUBLISHED = 1.4697
METHODS = ("flush", "bounded", "stashed")


def consistency(method: str, every: int, depth: int) -> str:
    """What the layers promise under a method; ``every`` micro-batches are one step and one update."""
    return "exact" if method == "flush" else f"{method}({every}, {depth})"


class Clock:
    """Notes when each validation came, and what it said."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.validation: list[tuple[int, float]] = []
        self.times: list[float] = []

    def __call__(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "validation" and event["pick"] == "largest":
            self.validation.append((event["step"] + 1, event["scores"]["loss"]))
            self.times.append(time.perf_counter() - self.began)
            print(f"  step {event['step'] + 1:5}  {event['scores']['loss']:.4f}  {self.times[-1]:.0f} s", flush=True)

    def step_ms(self) -> float:
        """Of a step once the run is warm, with its share of the validations."""
        first, last = (0, 0.0) if len(self.times) == 1 else (self.validation[0][0], self.times[0])
        return 1e3 * (self.times[-1] - last) / (self.validation[-1][0] - first)


def measure(data: Data, method: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    quick = options.quick
    sizes: dict[str, Any] = {"context": options.context, "dropout": 0.2}
    sizes |= {"layers": 2, "heads": 2, "width": 32} if quick else {"layers": 6, "heads": 6, "width": 384}
    build = partial(language_model, data.info["size"], **sizes)
    promise = consistency(method, options.microbatches, sizes["layers"] + 2)
    clock, cuda = Clock(), options.device != "cpu"
    with tempfile.TemporaryDirectory() as folder:
        trained = weft.train(
            build,
            data.to(options.device),
            steps=options.steps,
            batch_size=16 if quick else 64,
            microbatches=options.microbatches,
            optimizer=weft.Optimizer(
                "adamw",
                lr=1e-3,
                betas=(0.9, 0.99),
                weight_decay=0.1,
                groups="matrices",
                schedule="cosine:0.1",
                warmup_steps=options.steps // 50,
                clip=options.clip,
            ),
            consistency=promise,
            validation=weft.Validation(options.validate, random=0, batch_size=64, bn_batches=0),
            precision="bf16" if cuda else "fp32",
            device=options.device,
            seed=seed,
            callbacks=[clock],
            folder=folder,
            checkpoint_every=options.steps,
            keep_checkpoints=1,
        )
        seconds = time.perf_counter() - clock.began
    best_step, best = min(clock.validation, key=lambda found: found[1])
    return {
        "method": method,
        "consistency": promise,
        "seed": seed,
        "val_loss": clock.validation[-1][1],
        "best_val_loss": best,
        "best_step": best_step,
        "steps": options.steps,
        "seconds": seconds,
        "step_ms": clock.step_ms(),
        "parameters": sum(p.numel() for p in trained.chain.parameters()),
        "fingerprint": trained.fingerprint,
        "validation": clock.validation,
    }


def bound(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # such as global:1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FILE", help="a text; Python's own help if not given")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="a small model for 60 steps")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["flush", "bounded"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--microbatches", type=int, help="of a step, and of an update; 8, or 4 if quick")
    parser.add_argument("--clip", type=bound, default="global:1.0", help="a number clips each layer by itself")
    options = parser.parse_args()
    options.steps = options.steps or (60 if options.quick else 5000)
    options.microbatches = options.microbatches or (4 if options.quick else 8)
    options.context, options.validate = (32, 30) if options.quick else (256, 250)
    data = text(
        options.context,
        options.data,
        1,
        split=(0.9, 0.1),
        validation_stride=options.context * (20 if options.quick else 1),
    )
    rows = read_rows(options.json)
    for seed in options.seeds:
        for method in options.methods:
            known = [row for row in rows if (row["method"], row["seed"], row["steps"]) == (method, seed, options.steps)]
            if not known:
                print(f"{method}, seed {seed}", flush=True)
                rows.append(measure(data, method, seed, options))
                write(options.json, rows=rows, published=PUBLISHED, device=options.device, data=data.fingerprint())
    print("method      seed  val_loss    best  at step  seconds  ms/step  parameters")
    for row in rows:
        print(
            f"{row['method']:10} {row['seed']:5}    {row['val_loss']:.4f}  {row['best_val_loss']:.4f}  "
            f"{row['best_step']:7}  {row['seconds']:7.1f}  {row['step_ms']:7.1f}  {row['parameters']:10,}"
        )


if __name__ == "__main__":
    main()
