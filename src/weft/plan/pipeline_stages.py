"""Where a graph is cut into the stages of a pipeline.

The operators are put in the order in which a pipeline runs them. The cut of that order is chosen by dynamic
programming: a step is as fast as can be, and each stage keeps within the memory of its devices.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.plan.graph import PARAMETER, Graph

Spans = NDArray[np.float64]

_CUTS = 640  # the most cuts that are weighed
_TRIES = 48  # limits on the slowest stage that are tried, at most
_CLOSE = 1e-4  # to the best, from where on nothing is worth a try


@dataclass(frozen=True, slots=True)
class StageOrder:
    """``ranks`` has the position of every operator in the order. ``crossing_bytes`` has, for each position, the
    bytes that a micro-batch sends where the order is cut before it, there and back. ``with_parameters`` counts the
    positions before each that have parameters; the last counts all."""

    ranks: NDArray[np.intp]
    crossing_bytes: Spans
    with_parameters: Spans

    def __len__(self) -> int:
        return len(self.crossing_bytes)

    def sums(self, values: Sequence[float]) -> Spans:
        """For each position what all operators before it have together; the last is of all."""
        return np.concatenate([[0.0], np.cumsum(np.bincount(self.ranks, values, len(self)))])

    def most(self, values: Sequence[float]) -> Spans:
        """For each position the greatest value of its operators."""
        found = np.zeros(len(self))
        np.maximum.at(found, self.ranks, values)
        return found


def stage_order(graph: Graph) -> StageOrder:
    """The order of a graph's operators. Those that read nothing, or that no gradient flows through, share the stage of
    the first that reads them."""
    anchors = stage_anchors(graph)
    ends = sorted(set(anchors))
    rank = {op: number for number, op in enumerate(ends)}
    ranks = np.array([rank[op] for op in anchors], dtype=np.intp)
    owners = np.zeros(len(ends))
    owners[[ranks[op] for op, operator in enumerate(graph.operators) if operator.kind == PARAMETER]] = 1.0
    return StageOrder(ranks, _crossing_bytes(graph, ranks, len(ends)), np.concatenate([[0.0], np.cumsum(owners)]))


def stage_anchors(graph: Graph) -> list[int]:
    """For each operator the one whose stage it shares: its own, or its first reader's where it reads nothing or no
    gradient flows through it."""
    anchors = list(range(len(graph)))
    first: dict[int, int] = {}
    for op in reversed(range(len(graph))):
        for read in graph.operators[op].reads:
            first[read.source] = op
    for op in reversed(range(len(graph))):
        operator = graph.operators[op]
        moves = bool(operator.reads) and operator.has_gradient
        if not moves and op in first:
            anchors[op] = anchors[first[op]]
    return anchors


def _crossing_bytes(graph: Graph, ranks: NDArray[np.intp], count: int) -> Spans:
    """Bytes that cross before each position, there and back: tensors with gradients; what has none is made anew in each
    stage."""
    change = np.zeros(count + 1)
    last: dict[tuple[int, int], int] = {}
    for op, operator in enumerate(graph.operators):
        for read in operator.reads:
            if read.tensor.gradient and graph.operators[read.source].reads:
                key = (read.source, read.output)
                last[key] = max(last.get(key, 0), int(ranks[op]))
    for (source, output), reader in last.items():
        size = 2.0 * graph.operators[source].outputs[output].bytes
        change[ranks[source] + 1] += size
        change[reader + 1] -= size
    return np.cumsum(change)[:count]


class OpLoad(NamedTuple):
    """What one operator asks of its stage: seconds a step, bytes that stay, bytes a micro-batch in flight, seconds a
    step of the host, which starts its kernels meanwhile, and bytes of gathered weights while the operator runs."""

    seconds: float
    kept: float
    activations: float
    launch: float = 0.0
    gathered: float = 0.0


@dataclass(frozen=True, slots=True)
class StageCut:
    """The stage of every operator, and of each stage its seconds a step, those of them that its messages to and from
    other stages take, its bytes, and those of them that gathered weights take."""

    stage: tuple[int, ...]
    seconds: tuple[float, ...]
    sent: tuple[float, ...]
    memory: tuple[float, ...]
    gathered: tuple[float, ...]


def cut(
    graph: Graph, loads: Sequence[OpLoad], stages: int, microbatches: int, limit: float, send: float
) -> StageCut | None:
    """The cut into contiguous stages at which a step takes least, None if none keeps the limit.

    ``send`` is seconds a byte between stages; a tensor that a gradient flows through crosses twice. Operators that read
    nothing (parameters, inputs) belong to the first stage that reads them. Stage s of S has at most S - s micro-batches
    in flight. A batch that is not divided, for which the slowest stage does not matter, is cut as one of two would be.
    Every stage has parameters, where there are enough: an optimizer takes no empty list of them.
    """
    order = stage_order(graph)
    *summed, gathered = zip(*loads, strict=True)
    sums = [order.sums(values) for values in summed]
    cuts = _cuts(order, sums[0])
    if len(cuts) < stages - 1:
        return None
    ends = np.array([0, *cuts, len(order)])
    time, still, held, launch = (each[ends] for each in sums)
    sent = microbatches * send * np.concatenate([[0.0], order.crossing_bytes[cuts], [0.0]])
    spans = np.maximum(_between(time) + sent[:, None] + sent[None, :], _between(launch))
    spans[np.tril_indices(len(ends))] = math.inf
    if order.with_parameters[-1] >= stages:
        spans[_between(order.with_parameters[ends]) == 0] = math.inf
    flights = [min(microbatches, stages - stage) for stage in range(stages)]
    peaks = _peaks(order.most(gathered), ends)
    found = best_boundaries(_within(spans, still, held, peaks, flights, limit), max(microbatches, 2))
    if found is None:
        return None
    bounds = [int(ends[mark]) for mark in found]
    of = np.searchsorted(bounds[1:], order.ranks, side="right")
    return StageCut(
        tuple(map(int, of)),
        tuple(float(spans[a, b]) for a, b in pairwise(found)),
        tuple(float(sent[a] + sent[b]) for a, b in pairwise(found)),
        tuple(
            float(still[b] - still[a] + flying * (held[b] - held[a]) + peaks[a, b])
            for flying, (a, b) in zip(flights, pairwise(found), strict=True)
        ),
        tuple(float(peaks[a, b]) for a, b in pairwise(found)),
    )


def _cuts(order: StageOrder, time: Spans) -> NDArray[np.intp]:
    """Where the order may be cut: anywhere, or, where that is too much to weigh, once between two operators that take
    time, where least is sent."""
    cuts = np.arange(1, len(order))
    if len(cuts) > _CUTS:
        cheapest = cuts[np.lexsort((order.crossing_bytes[cuts], time[cuts]))]
        cuts = cheapest[np.unique(time[cheapest], return_index=True)[1]]
    return np.sort(cuts[np.argsort(order.crossing_bytes[cuts], kind="stable")[:_CUTS]])


def _between(sums: Spans) -> Spans:
    """What lies between every two ends."""
    return np.asarray(sums[None, :] - sums[:, None], dtype=np.float64)


def _peaks(values: Spans, ends: NDArray[np.intp]) -> Spans:
    """The greatest value between every two ends."""
    found = np.zeros((len(ends), len(ends)))
    if values.any():
        pieces = np.maximum.reduceat(values, ends[:-1])
        for first in range(len(pieces)):
            found[first, first + 1 :] = np.maximum.accumulate(pieces[first:])
    return found


def _within(spans: Spans, still: Spans, held: Spans, peaks: Spans, flights: Sequence[int], limit: float) -> list[Spans]:
    """The spans of each stage, ``inf`` where its memory would be above the limit."""
    every = []
    for flying in flights:
        over = _between(still) + flying * _between(held) + peaks > limit
        every.append(np.where(over, math.inf, spans) if over.any() else spans)
    return every


def best_boundaries(spans: Sequence[Spans], microbatches: int) -> tuple[int, ...] | None:
    """The ends of the stages at which a step takes least, the first one's beginning included; None where no division
    is allowed.

    ``spans[s]`` has the seconds of stage s from every end (a order) to every other (a column), ``inf`` where it may not
    lie. A step fills the pipeline once, and then the slowest stage goes on: of m micro-batches, it takes an m-th of all
    stages together and m - 1 times the slowest.
    """
    stages, rest = len(spans), microbatches - 1

    def step(together: float, slowest: float) -> float:
        return (together + rest * max(slowest, together / stages)) / microbatches

    lowest = _slowest(spans)
    if math.isinf(lowest):
        return None
    together, ends = _least(spans, lowest)
    best = step(together, lowest)
    # What is left to win is a smaller sum under a higher limit, until even the least sum of all would not do.
    loosest, _ = _least(spans, math.inf)
    highest = (microbatches * best - loosest) / rest
    values = np.unique(np.concatenate([span[(span > lowest) & (span < highest)] for span in _distinct(spans)]))
    # Of a range of these, the slowest stage takes at least its first, and all stages together at least what they do
    # within its last. The range that promises most is halved, until none promises more than is found.
    ranges = [(step(loosest, float(values[0])), 0, len(values) - 1, loosest)] if len(values) else []
    for _ in range(_TRIES):
        if not ranges or ranges[0][0] >= best * (1 - _CLOSE):
            break
        _, first, last, under = heapq.heappop(ranges)
        middle = (first + last) // 2
        together, found = _least(spans, float(values[middle]))
        slowest = max(float(span[a, b]) for span, (a, b) in zip(spans, pairwise(found), strict=True))
        if (value := step(together, slowest)) < best:
            best, ends = value, found
        if first < middle:
            heapq.heappush(ranges, (step(together, float(values[first])), first, middle, together))
        if middle < last:
            heapq.heappush(ranges, (step(under, float(values[middle + 1])), middle + 1, last, under))
    return ends


def _distinct(spans: Sequence[Spans]) -> list[Spans]:
    return list({id(span): span for span in spans}.values())


def _slowest(spans: Sequence[Spans]) -> float:
    """The least that the slowest stage can take."""
    best = np.full(len(spans[0]), math.inf)
    best[0] = 0.0
    for span in spans:
        best = np.maximum(best[:, None], span).min(0)
    return float(best[-1])


def _least(spans: Sequence[Spans], limit: float) -> tuple[float, tuple[int, ...]]:
    """The least sum of stages none of which takes longer than the limit, and their ends."""
    within = min(limit, float(np.finfo(np.float64).max))
    costs = {id(span): np.where(span <= within, span, math.inf) for span in _distinct(spans)}
    best = np.full(len(spans[0]), math.inf)
    best[0] = 0.0
    back = []
    for span in spans:
        together = best[:, None] + costs[id(span)]
        back.append(together.argmin(0))
        best = together.min(0)
    marks = [len(best) - 1]
    for chosen in reversed(back):
        marks.append(int(chosen[marks[-1]]))
    return float(best[-1]), tuple(reversed(marks))
