"""The least time that any schedule of a workload can take: its longest chain of dependencies, or its busiest stage."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import accumulate

from weft.pipeline.cut import Cut
from weft.pipeline.workload import Workload


def lower_bound(work: Workload, cut: Cut, latency: float = 0.0) -> float:
    """No schedule that keeps the consistencies is faster than this, however many micro-batches are in flight.

    The larger of two bounds: the longest path through forwards, backwards and the versions that they wait for, as if
    every stage could do any number of things at once; and the work of the busiest stage behind the shortest way to it
    and back.
    """
    stages = len(cut) + 1
    uses = [work.uses(cut, stage) for stage in range(stages)]
    # applied[s][layer]: (slot, time) pairs: when the gradients of this and all earlier slots of a layer are there.
    applied: list[dict[Hashable, list[tuple[int, float]]]] = [{} for _ in range(stages)]
    path = 0.0
    busy = [0.0] * stages
    way_there = [float("inf")] * stages  # the least time until some forward can start on the stage
    way_back = [float("inf")] * stages  # the least time after the last backward on it
    for n in range(work.total):
        costs = work.stage_costs(cut, n)
        needs = [use(n) for use in uses]
        time = 0.0
        for stage in range(stages):
            ready = max((_at(applied[stage], need.layer, need.forward) for need in needs[stage]), default=0.0)
            time = max(time + (latency if stage else 0.0), ready) + costs[stage][0]
        for stage in reversed(range(stages)):
            ready = max((_at(applied[stage], need.layer, need.backward) for need in needs[stage]), default=0.0)
            time = max(time + (latency if stage < stages - 1 else 0.0), ready) + costs[stage][1]
            busy[stage] += sum(costs[stage])
            for need in needs[stage]:
                history = applied[stage].setdefault(need.layer, [])
                history.append((need.slot, max(time, history[-1][1] if history else 0.0)))
        path = max(path, time)
        there = [0.0, *accumulate(forward + latency for forward, _ in costs)]
        back = [0.0, *accumulate(backward + latency for _, backward in costs)]
        way_there = [min(least, now) for least, now in zip(way_there, there, strict=False)]
        way_back = [min(least, now) for least, now in zip(way_back, back, strict=False)]
    return max(path, *(way_there[s] + busy[s] + way_back[s] for s in range(stages)))


def _at(history: dict[Hashable, list[tuple[int, float]]], layer: Hashable, version: int) -> float:
    """When the updates of all slots below the version are applied."""
    for slot, time in reversed(history.get(layer, ())):
        if slot < version:
            return time
    return 0.0
