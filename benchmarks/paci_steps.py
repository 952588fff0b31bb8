"""Part `steps` of `paci.py`: how many updates a flush and `bounded` need to a loss, seed by seed.

One run says little of a method: two that differ in rounding alone reach a loss some updates apart. A seed draws the
weights and the order of the text; its target is what its flush at the largest K has reached late. Nothing is timed
here, so every core has a run of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from paci_reference import FLUSH, curves, reached, target_of
from paci_task import Task

LATE = "weft-bounded"


def rows(task: Task, ks: Sequence[int], seeds: Sequence[int], over: int) -> Iterator[dict[str, Any]]:
    """By seed and K; ``more`` is what `bounded` needs beyond a flush, as a part of that."""
    for seed in seeds:
        rates = {FLUSH: task.lr, LATE: task.late_lr}
        found = curves(
            {(method, k): (replace(task, seed=seed, lr=lr), method, k) for k in ks for method, lr in rates.items()}
        )
        target = target_of(found[FLUSH, max(ks)], over)
        for k in ks:
            needed = [reached(found[method, k], target, over) for method in rates]
            flush, bounded = (None if n is None else n // k + 1 for n in needed)
            more = None if flush is None or bounded is None else bounded / flush - 1
            yield {"seed": seed, "k": k, "target": target, "flush": flush, "bounded": bounded, "more": more}


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By K: the mean of ``more``, and how many seeds it is of."""
    told = {}
    for k in sorted({row["k"] for row in found}):
        own = [row["more"] for row in found if row["k"] == k and row["more"] is not None]
        told[str(k)] = {"seeds": len(own), "mean": mean(own), "least": min(own), "most": max(own)} if own else None
    return told
