"""What cuDNN's recurrent layers take beside their results, from random ones on a GPU: what the law in
`weft.memory.cudnn_rnn` was read from.

    python benchmarks/recurrent.py --rows FILE.csv.gz [--seconds 60] [--seed 0]

Rows are the kind, layers, width, features, directions, steps, samples, bytes of a number, and the bytes of the
workspace, which is the same in the forward and in both parts of the backward.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import random
import time
from collections.abc import Iterator
from typing import Any

import torch

FIELDS = ("kind", "layers", "width", "features", "ways", "steps", "samples", "element", "workspace")
WIDTHS = (128, 256, 384, 512, 640, 768, 1024, 1280, 1536)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", required=True, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = list(measure(options.seconds, random.Random(options.seed)))
    with gzip.open(options.rows, "wt") as file:
        csv.writer(file).writerows([FIELDS, *rows])
    print(f"{len(rows)} layers in {options.rows}")


def measure(seconds: float, rng: random.Random) -> Iterator[list[Any]]:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        kind, layers, width = (
            rng.choice(("LSTM", "GRU", "LSTM", "GRU", "RNN")),
            rng.choice((1, 2, 3)),
            rng.choice(WIDTHS),
        )
        features = width if rng.random() < 0.6 else rng.choice((64, 128, 256, 512, 1024))
        both, steps = rng.random() < 0.3, rng.choice((20, 32, 50, 64, 90, 100, 128, 200))
        samples, dtype = (
            rng.choice((4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128)),
            rng.choice((torch.float32, torch.bfloat16)),
        )
        layer = getattr(torch.nn, kind)(features, width, layers, batch_first=True, bidirectional=both)
        layer = layer.to("cuda", dtype)
        x = torch.randn(samples, steps, features, device="cuda", dtype=dtype, requires_grad=True)
        yield [
            kind.lower(), layers, width, features, 1 + both, steps, samples, x.element_size(), workspace(layer, x),
        ]  # fmt: skip


def workspace(layer: torch.nn.Module, x: torch.Tensor) -> int:
    """The first block that a forward gives back is the one that it took for itself."""
    layer(x)
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=10_000)
    result = layer(x)
    torch.cuda.synchronize()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    del result
    return int(next(entry["size"] for entry in trace if entry["action"] == "free_requested"))


if __name__ == "__main__":
    main()
