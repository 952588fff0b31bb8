"""One, two and four stage processes that share one device give one fingerprint.

    python benchmarks/one_device.py [--quick] [--device cpu|cuda] [--json FILE]

NCCL refuses two processes on one GPU, so their tensors go through pinned host memory. Rows are `run, stages,
fingerprint, seconds` (starting the processes included); `same` says for every run whether all its fingerprints are
equal. This is about bits, not about speed: stages that share a device have no more of it than one has.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch
from machine import write
from torch import nn

import weft
from weft.data import Data, Tensors, digits
from weft.zoo import digits_conv, nas_bench_macro


def dropping() -> weft.Chain:
    """Dropout, norms and layers that work in place."""
    space = weft.Space()

    def candidate(size: int) -> Any:
        return lambda: nn.Sequential(
            nn.ReLU(inplace=True), nn.Conv2d(8, 8, size, padding=size // 2), nn.BatchNorm2d(8), nn.Dropout(0.3)
        )

    return weft.Chain(
        weft.Shared(lambda: nn.Conv2d(1, 8, 3, padding=1), "stem"),
        *[weft.Choice(space, f"block{k}", {"c3": candidate(3), "c5": candidate(5)}) for k in range(3)],
        weft.Shared(lambda: nn.Sequential(nn.Flatten(), nn.Linear(512, 10)), "head"),
    )


def images() -> Data:
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(1024, 3, 32, 32, generator=draw)
    return Data("random-32x32", Tensors(image=x, label=torch.randint(0, 10, (1024,), generator=draw)))


RUNS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "nas-bench-macro": (nas_bench_macro, images, {"steps": 40}),
    "nas-bench-macro, 4 micro-batches, shared layers lagged": (
        nas_bench_macro,
        images,
        {"steps": 24, "microbatches": 4, "consistency": {"shared": "lagged(2)"}},
    ),
    "dropout, AdamW, shared layers delayed": (
        dropping,
        digits,
        {"steps": 60, "optimizer": weft.Optimizer("adamw", lr=1e-3), "consistency": {"shared": "delayed(2)"}},
    ),
    "digits-conv, bf16": (digits_conv, digits, {"steps": 60, "precision": "bf16"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two of the runs, on one and two stages")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    same: dict[str, bool] = {}
    for name, (net, data, given) in list(RUNS.items())[2 if options.quick else 0 :]:
        for stages in (1, 2) if options.quick else (1, 2, 4):
            began = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                trained = weft.train(
                    net, data, batch_size=64, device=options.device, folder=folder, stages=stages, **given
                )
            seconds = time.perf_counter() - began
            rows.append({"run": name, "stages": stages, "fingerprint": trained.fingerprint, "seconds": seconds})
            print(f"{stages} {trained.fingerprint} {seconds:6.1f} s  {name}", flush=True)
        same[name] = len({row["fingerprint"] for row in rows if row["run"] == name}) == 1
    print("same", same)
    write(options.json, rows=rows, same=same, device=options.device)


if __name__ == "__main__":
    main()
