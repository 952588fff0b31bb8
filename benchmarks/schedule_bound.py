"""The least time that any schedule of a workload can take: its longest chain of dependencies, or its busiest stage."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate

from weft.pipeline.workload import Workload
from weft.supernet.partition import Cut


def lower_bound(
    work: Workload,
    cut: Cut,
    latency: float = 0.0,
    *,
    bandwidth: float | None = None,
    speeds: Sequence[float] | None = None,
    split: float | None = None,
) -> float:
    """No schedule that keeps the consistencies is faster than this, however many micro-batches are in flight.

    The machine is described as for ``simulate``.

    The larger of two bounds: the longest path through forwards, backwards and the versions that they wait for, as if
    every stage could do any number of things at once; and the work of the busiest stage behind the shortest way to it
    and back.
    """
    stages = len(cut) + 1
    pace, early = speeds or [1.0] * stages, split or 1.0
    hops = [taken + latency for taken in work.transfers(cut, bandwidth)]
    uses = [work.dependencies_of(cut, stage) for stage in range(stages)]
    # applied[s][layer]: (slot, time) pairs: when the gradients of this and all earlier slots of a layer are there.
    applied: list[dict[Hashable, list[tuple[int, float]]]] = [{} for _ in range(stages)]
    path = 0.0
    busy = [0.0] * stages
    way_there = [float("inf")] * stages  # the least time until some forward can start on the stage
    way_back = [float("inf")] * stages  # the least time after the last backward on it
    for n in range(work.total):
        costs = [(f / speed, b / speed) for (f, b), speed in zip(work.stage_costs(cut, n), pace, strict=True)]
        needs = [use(n) for use in uses]
        time = 0.0
        for stage in range(stages):
            ready = max((_at(applied[stage], need.layer, need.forward) for need in needs[stage]), default=0.0)
            time = max(time + (hops[stage - 1] if stage else 0.0), ready) + costs[stage][0]
        arrives = end = time
        for stage in reversed(range(stages)):
            ready = max((_at(applied[stage], need.layer, need.backward) for need in needs[stage]), default=0.0)
            start, backward = max(arrives, ready), costs[stage][1]
            end = start + backward
            arrives = start + early * backward + (hops[stage - 1] if stage else 0.0)
            busy[stage] += sum(costs[stage])
            for need in needs[stage]:
                history = applied[stage].setdefault(need.layer, [])
                history.append((need.slot, max(end, history[-1][1] if history else 0.0)))
            path = max(path, end)
        there = [0.0, *accumulate(forward + hop for (forward, _), hop in zip(costs, hops, strict=False))]
        behind = [0.0, *accumulate(early * backward + hop for (_, backward), hop in zip(costs, hops, strict=False))]
        # The message of a stage leaves before its backward is over; stage 0's backward goes on to its own end.
        back = [max(0.0, behind[s] + (1 - early) * (costs[0][1] - costs[s][1])) for s in range(stages)]
        way_there = [min(least, now) for least, now in zip(way_there, there, strict=True)]
        way_back = [min(least, now) for least, now in zip(way_back, back, strict=True)]
    return max(path, *(way_there[s] + busy[s] + way_back[s] for s in range(stages)))


def _at(history: dict[Hashable, list[tuple[int, float]]], layer: Hashable, version: int) -> float:
    """When the updates of all slots below the version are applied."""
    for slot, time in reversed(history.get(layer, ())):
        if slot < version:
            return time
    return 0.0
