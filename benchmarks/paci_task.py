"""What every method of `paci.py` trains: one GPT, the same micro-batches of real text in one order, one optimizer, one
cut."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, pairwise
from typing import Any

import torch.nn.functional as F
from torch import Tensor

import weft
from weft.data import text
from weft.engine.optimizer import Optimizer, Schedule, make_schedule
from weft.pipeline.profiler import message_bytes, message_seconds, profile_chain
from weft.supernet.partition import Cut, best_cut
from weft.utils.rng import generator
from weft.zoo.gpt import language_model

RANKS = 2


@dataclass(frozen=True)
class Task:
    """A training run of ``microbatches`` micro-batches; K of them make an update, whoever trains."""

    microbatches: int
    width: int = 128
    layers: int = 8
    heads: int = 4
    context: int = 64
    rows: int = 6
    kind: str = "adamw"
    """The optimizer: ``adamw``, or ``muon``, whose steps are made as long as AdamW's, with AdamW for vectors."""
    lr: float = 2e-3
    late_lr: float = 1e-3
    """The rate of methods whose forwards see old weights."""
    warmup: int = 16
    seed: int = 0
    path: str | None = None
    cut: Cut = ()
    v_cut: Cut = ()

    @cached_property
    def _data(self) -> Any:
        return text(self.context, self.path, stride=1)

    @cached_property
    def vocabulary(self) -> int:
        return int(self._data.info["size"])

    def optimizer(self, k: int) -> Optimizer:
        """The learning rate grows with the root of the batch."""
        lr = self.lr * math.sqrt(k)
        schedule = self.schedule(k)
        adamw = Optimizer("adamw", lr=lr, betas=(0.9, 0.99), weight_decay=0.1, schedule=schedule)
        if self.kind == "adamw":
            return adamw
        rate: dict[str, Any] = {"lr": lr, "adjust_lr_fn": "match_rms_adamw"}
        return Optimizer("muon", weight_decay=0.1, others=adamw, schedule=schedule, **rate)

    def schedule(self, k: int) -> Schedule:
        """A warm-up, then down to a tenth along a cosine, over all micro-batches, however many of them are done."""
        own, updates = make_schedule("cosine:0.1", self.warmup), self.microbatches // k
        return lambda step, steps: own(step, updates)

    def chain(self) -> weft.Chain:
        return language_model(self.vocabulary, self.context, self.width, self.layers, self.heads, dropout=0.0)

    def built(self, first: int = 0, stop: int | None = None) -> weft.Chain:
        """The chain with the same weights everywhere, of which only some blocks are there."""
        chain = self.chain()
        names = [name for name, layer in chain.layers.items() if layer.block in range(len(chain.blocks))[first:stop]]
        return weft.initialise(chain, self.seed, "cpu", names)

    def draw(self) -> dict[str, Tensor]:
        """All micro-batches, one after the other: windows of the text at places that the seed draws."""
        rng = generator(self.seed, "paci")
        found: dict[str, Tensor] = self._data.train.take(
            rng.integers(0, len(self._data.train), self.microbatches * self.rows)
        )
        return found

    def profiled(self) -> tuple[Task, dict[str, Any]]:
        """The task with the cuts that its measured costs ask for, and the costs in seconds: those of the stages of
        the two-way cut (with the loss, without updates), and of a message."""
        chain, batch = self.built(), {key: value[: self.rows] for key, value in self.draw().items()}
        costs = profile_chain(chain, batch, 9, None, weft.cross_entropy)
        blocks = [(0.0, 0.0)] * len(chain.blocks)
        for name, layer in chain.layers.items():
            blocks[layer.block] = costs[name]
        whole = [sum(pair) for pair in blocks]
        made = replace(self, cut=best_cut(whole, RANKS), v_cut=v_shaped(whole, RANKS))
        ends = (0, *made.cut, len(blocks))
        stages = [[sum(pair[kind] for pair in blocks[a:b]) for kind in (0, 1)] for a, b in pairwise(ends)]
        size = message_bytes(chain, batch)[made.cut[0]]
        return made, {"stages": stages, "message": message_seconds(size), "bytes": size}


def v_shaped(costs: Sequence[float], ranks: int) -> Cut:
    """The most even cut into 2 * ranks stages, of which rank r gets the r-th and the r-th from the end: neither may a
    rank have much to do, nor a stage more than half of that."""

    def load(cut: Cut) -> float:
        ends = (0, *cut, len(costs))
        stages = [sum(costs[a:b]) for a, b in pairwise(ends)]
        return max(2 * max(stages), *(stages[r] + stages[-1 - r] for r in range(ranks)))

    return min(combinations(range(1, len(costs)), 2 * ranks - 1), key=load)


class Steps:
    """The batches of a run with K micro-batches an update, as a loader gives them."""

    def __init__(self, drawn: dict[str, Tensor], rows: int) -> None:
        self.drawn, self.rows = drawn, rows

    def iterate(self, start: int, stop: int) -> Generator[dict[str, Tensor], None, None]:
        for step in range(start, stop):
            yield {key: value[step * self.rows : (step + 1) * self.rows] for key, value in self.drawn.items()}


@dataclass
class Meter:
    """The loss, which notes when it was known and what it was, and the times of operations."""

    losses: list[float] = field(default_factory=list)
    known: list[float] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    began: float = math.nan

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        found = F.cross_entropy(outputs.flatten(0, -2), targets.flatten())
        self.losses.append(found.item())
        self.known.append(time.perf_counter())
        return found

    def clear(self) -> None:
        for noted in (self.losses, self.known, self.spans):
            noted.clear()
