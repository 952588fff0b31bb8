"""What a step of a gradient search costs as weft runs it, against a step of plain training of the largest network.

    python benchmarks/search_steps.py [--quick] [--json FILE] [--tokens 197 3152 50432] [--precisions fp32 bf16]

Both run in the runtime of ``weft.search`` and ``weft.train``: forward, backward and AdamW on a batch that is at hand,
with every layer that can be captured replayed as a CUDA graph (`graphs` yes) or not. `plain` is the largest subnet,
extracted, a layer of it a layer of the chain; `weights` are the mixed steps that train the weights, `architecture`
those that train the architecture (by DARTS, which draws nothing). All take turns in one process; times are medians of
CUDA events over steps in a row, on a CPU the least of wall time over the repeats. `ratio` is to the plain step of the
same row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from elastic import SEQUENCE, TOKENS, VOCABULARY, networks
from machine import read_rows, write
from torch import Tensor

from weft.elastic.mixture import choice_options
from weft.engine.bilevel import Bilevel
from weft.engine.consistency import Exact
from weft.engine.cuda_graphs import CudaGraphCache
from weft.engine.optimizer import Optimizer
from weft.engine.reference import SequentialReference
from weft.engine.rng import deterministic
from weft.engine.train_step import TrainStep
from weft.search.gradient.api import MixedLoss
from weft.search.gradient.methods import Darts
from weft.space import make_stream
from weft.supernet import Chain, Shared, extract, initialise
from weft.supernet.mixed_chain import mixed_factory

WARM, IN_A_ROW, REPEATS = 6, 8, 7
WAYS = ("plain", "weights", "architecture")


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return torch.nn.functional.cross_entropy(outputs.flatten(0, -2).float(), batch["y"])


def trained(chain: Chain, precision: str, device: torch.device, graphs: bool, mixed: bool) -> SequentialReference:
    objective: Any = loss
    if mixed:
        counts = tuple((name, len(choice_options(chain.space, name))) for name in chain.space.choices)
        objective = MixedLoss(loss, counts)
    config = TrainStep(
        steps=10**6,
        stream=make_stream(chain.space, chain.space.first() if mixed else chain.space.subnet(), 0),
        consistency={name: Exact() for name in chain.layers},
        loss=objective,
        optimizer=Optimizer("adamw", lr=1e-4, schedule="constant"),
        precision=precision,
        architecture_search=Bilevel() if mixed else None,
    )
    made = SequentialReference(chain.to(device), config, device, CudaGraphCache() if graphs else None)
    made.train_mode()
    return made


class Network:
    """One network in both forms; a step of either kind at a time."""

    def __init__(self, name: str, precision: str, device: torch.device, graphs: bool) -> None:
        self.device = device
        largest = initialise(networks()[name], 0)
        parts = extract(largest, largest.largest()).train()
        assert isinstance(parts, torch.nn.Sequential)
        plain = Chain(*(Shared(part, label) for label, part in parts.named_children()))
        mixed = initialise(mixed_factory(networks()[name], Darts()), 0)
        self.runs = {
            "plain": trained(plain, precision, device, graphs, mixed=False),
            "mixed": trained(mixed, precision, device, graphs, mixed=True),
        }
        self.text = name.startswith("gpt")
        self.classes = VOCABULARY if self.text else 1000
        self.done = {"plain": 0, "mixed": 0}

    def batch(self, tokens: int) -> dict[str, Tensor]:
        count = tokens // SEQUENCE
        if self.text:
            x = torch.randint(0, VOCABULARY, (count, SEQUENCE), device=self.device)
            return {"x": x, "y": x.flatten()}
        y = torch.randint(0, self.classes, (count,), device=self.device)
        return {"x": torch.randn(count, 3, 224, 224, device=self.device), "y": y}

    def step(self, way: str, batch: dict[str, Tensor]) -> None:
        """Even steps train weights and odd ones the architecture: those of a kind in a row skip the others."""
        run = "plain" if way == "plain" else "mixed"
        number = self.done[run]
        if run == "mixed" and number % 2 != (way == "architecture"):
            number += 1
        self.runs[run].step(number, batch)
        self.done[run] = number + 1

    def times(self, tokens: int, repeats: int, count: int) -> dict[str, float]:
        batch = self.batch(tokens)
        for way in WAYS:
            for _ in range(WARM):
                self.step(way, batch)
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(repeats):
            for way in WAYS:
                found[way].append(self._timed(lambda way=way: self.step(way, batch), count))
        least = statistics.median if self.device.type == "cuda" else min
        return {way: least(found[way]) for way in WAYS}

    def _timed(self, step: Callable[[], None], count: int) -> float:
        if self.device.type != "cuda":
            began = time.perf_counter()
            for _ in range(count):
                step()
            return 1e3 * (time.perf_counter() - began) / count
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(count):
            step()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / count


def measured(arguments: argparse.Namespace, known: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rows = list(known)
    had = {(row["network"], row["precision"], row["graphs"], row["tokens"]) for row in rows}
    for name in arguments.networks:
        for precision in arguments.precisions:
            for graphs in (True, False) if device.type == "cuda" else (False,):
                left = [n for n in arguments.tokens if (name, precision, graphs, n) not in had]
                if not left:
                    continue
                network = Network(name, precision, device, graphs)
                for tokens in left:
                    found = network.times(tokens, arguments.repeats, arguments.count)
                    row = {"network": name, "precision": precision, "graphs": graphs, "tokens": tokens}
                    row |= {f"{way}_ms": found[way] for way in WAYS}
                    row |= {f"{way}_ratio": found[way] / found["plain"] for way in WAYS[1:]}
                    rows.append(row)
                    print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
                    write(arguments.json, rows=rows)
                del network
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one network, one size, few repeats")
    parser.add_argument("--json")
    parser.add_argument("--networks", nargs="+", default=list(networks()), choices=list(networks()))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    arguments = parser.parse_args()
    arguments.repeats, arguments.count = REPEATS, IN_A_ROW
    if arguments.quick:
        arguments.networks, arguments.tokens, arguments.precisions = ["autoformer-t"], [SEQUENCE], ["fp32"]
        arguments.repeats, arguments.count = 1, 1
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    with deterministic(torch.device("cuda" if torch.cuda.is_available() else "cpu")):
        measured(arguments, read_rows(arguments.json))


if __name__ == "__main__":
    main()
