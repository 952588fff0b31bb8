"""What the Triton kernels of linear layers are worth: mixtures with them, and with those of single weights alone.

    python benchmarks/elastic_kernels.py [--quick] [--json FILE]

`elastic.ops.triton_linear` takes layers of equal sizes together and computes the factors of the mask as it goes.
Without it `elastic.ops.triton_weight` computes the same, a weight at a time, from factors that torch makes. Each row
has a step (forward and backward, to the probabilities) in both ways, in turn, as it is (`eager`) and as a CUDA graph;
`ratio` is the time without over the time with these kernels.
"""

from __future__ import annotations

import argparse
import gc
from functools import partial
from typing import Any

import torch
from elastic import TOKENS, Case, captured, on_gpu
from machine import write

from weft.elastic.ops import linear

NETWORKS = ("autoformer-t", "autoformer-s", "gpt-small")


def measure(name: str, tokens: int, precision: str, repeats: int) -> list[dict[str, Any]]:
    gc.collect()
    torch.manual_seed(0)
    case = Case("network", name, tokens, "cuda", torch.bfloat16 if precision == "bf16" else None)
    find = linear.linear_kernels

    def step(fused: bool) -> None:
        linear.linear_kernels = find if fused else lambda *_: None
        try:
            case.step("ours")
        finally:
            linear.linear_kernels = find

    steps = {"with": partial(step, True), "without": partial(step, False)}
    for each in steps.values():
        each()
    times = {"eager": on_gpu(steps, repeats)}
    pool = torch.cuda.graph_pool_handle()
    torch.cuda.empty_cache()
    times["graph"] = on_gpu({way: captured(each, pool) for way, each in steps.items()}, repeats)
    return [
        {
            "space": name,
            "tokens": tokens,
            "precision": precision,
            "mode": mode,
            "with_ms": found["with"],
            "without_ms": found["without"],
            "ratio": found["without"] / found["with"],
        }
        for mode, found in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer tokens and repeats")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    rows = []
    for name in NETWORKS:
        for tokens in TOKENS[:1] if options.quick else TOKENS:
            for precision in ("fp32", "bf16"):
                for row in measure(name, tokens, precision, 5 if options.quick else 30):
                    print(
                        "{space:14}{tokens:7}{precision:>6}{mode:>7}{with_ms:10.3f}{without_ms:10.3f}{ratio:8.3f}".format(
                            **row
                        ),
                        flush=True,
                    )
                    rows.append(row)
    write(options.json, rows=rows)


if __name__ == "__main__":
    main()
