"""Part `simulator` of `paci.py`: flush against `bounded` at 8 to 64 stages, by the scheduler that training uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weft.engine.consistency import Bounded, Consistency, Exact
from weft.pipeline.scheduler import SchedulePolicy
from weft.pipeline.simulator import Simulated, simulate
from weft.pipeline.workload import Workload

LOADS = 16
"""Micro-batches of a simulated run, by stage: filling and draining are once in it."""


def simulated(stages: int, k: int, depth: int | None, cost: tuple[float, float], latency: float) -> Simulated:
    """A chain of equal stages under `bounded(k, depth)`, or under a flush every k micro-batches where it is None.

    Of a layer with a window of L micro-batches in the virtual pipeline, L may be in flight here: S - s where the depth
    is S, as under 1F1B.
    """
    parts = 1 if depth is None else depth // stages
    blocks = stages * parts
    promise: Consistency = Exact() if depth is None else Bounded(k, depth)
    own = (cost[0] / parts, cost[1] / parts)
    picks = [(block, block) for block in range(blocks)]
    work = Workload(
        blocks, k, LOADS * stages // k, lambda n: picks, lambda layer: promise, dict.fromkeys(range(blocks), own)
    )
    cut = tuple(range(parts, blocks, parts))
    rules = [SchedulePolicy(parts * (stages - stage)) for stage in range(stages)]
    return simulate(work, cut, rules, latency, keep_spans=False)


def rows(costs: Mapping[str, tuple[float, float]], quick: bool) -> Iterator[dict[str, Any]]:
    """``costs`` has forward and backward of a micro-batch on a stage, by a name."""
    for name, cost in costs.items():
        for stages in (8, 16) if quick else (8, 16, 32, 64):
            for k in sorted({8, stages // 2, stages, 2 * stages}):
                for communication in (0.0, 0.1, 0.3):
                    latency = communication * cost[0]
                    flush = simulated(stages, k, None, cost, latency)
                    for times in (1, 2):
                        bounded = simulated(stages, k, times * stages, cost, latency)
                        yield {
                            "costs": name,
                            "stages": stages,
                            "k": k,
                            "communication": communication,
                            "depth": times * stages,
                            "flush_time": flush.time,
                            "bounded_time": bounded.time,
                            "ratio": flush.time / bounded.time,
                            "flush_utilisation": 1 - flush.bubble,
                            "bounded_utilisation": 1 - bounded.bubble,
                            "in_flight": max(bounded.peak),
                        }
