"""Where a graph is cut into the stages of a pipeline: a step as fast as can be, each stage within its memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from weft.plan.division import Spans, divide
from weft.plan.graph import Graph
from weft.plan.line import Line, line

_PLACES = 640  # the most places that are weighed for a cut


@dataclass(frozen=True, slots=True)
class Load:
    """What one operator asks of its stage: seconds a step, bytes that stay, bytes a micro-batch in flight, and seconds
    a step of the host, which starts its kernels meanwhile."""

    seconds: float
    kept: float
    activations: float
    launch: float = 0.0


@dataclass(frozen=True, slots=True)
class Cutting:
    """The stage of every operator, and of each stage its seconds a step, those of them that its messages to and from
    other stages take, and its bytes."""

    stage: tuple[int, ...]
    seconds: tuple[float, ...]
    sent: tuple[float, ...]
    memory: tuple[float, ...]


def cut(
    graph: Graph, loads: Sequence[Load], stages: int, microbatches: int, limit: float, send: float
) -> Cutting | None:
    """The cut into contiguous stages at which a step takes least, None if none keeps the limit.

    ``send`` is seconds a byte between stages; a tensor that a gradient flows through crosses twice. Operators that read
    nothing (parameters, inputs) belong to the first stage that reads them. Stage s of S has at most S - s micro-batches
    in flight. A batch that is not divided, for which the slowest stage does not matter, is cut as one of two would be.
    Every stage has parameters, where there are enough: an optimizer takes no empty list of them.
    """
    row = line(graph)
    places = _places(row, row.sums([load.seconds for load in loads]))
    if len(places) < stages - 1:
        return None
    ends = np.array([0, *places, len(row)])
    time, still, held, launch = (
        row.sums(values)[ends]
        for values in (
            [load.seconds for load in loads],
            [load.kept for load in loads],
            [load.activations for load in loads],
            [load.launch for load in loads],
        )
    )
    sent = microbatches * send * np.concatenate([[0.0], row.crossing[places], [0.0]])
    spans = np.maximum(between(time) + sent[:, None] + sent[None, :], between(launch))
    spans[np.tril_indices(len(ends))] = math.inf
    if row.owned[-1] >= stages:
        spans[between(row.owned[ends]) == 0] = math.inf
    flights = [min(microbatches, stages - stage) for stage in range(stages)]
    found = divide(within(spans, still, held, flights, limit), max(microbatches, 2))
    if found is None:
        return None
    bounds = [int(ends[mark]) for mark in found.marks]
    of = np.searchsorted(bounds[1:], row.ranks, side="right")
    return Cutting(
        tuple(map(int, of)),
        tuple(float(spans[a, b]) for a, b in pairwise(found.marks)),
        tuple(float(sent[a] + sent[b]) for a, b in pairwise(found.marks)),
        tuple(
            float(still[b] - still[a] + flying * (held[b] - held[a]))
            for flying, (a, b) in zip(flights, pairwise(found.marks), strict=True)
        ),
    )


def _places(row: Line, time: Spans) -> NDArray[np.intp]:
    """Where the line may be cut: anywhere, or, where that is too much to weigh, once between two operators that take
    time, where least is sent."""
    places = np.arange(1, len(row))
    if len(places) > _PLACES:
        cheapest = places[np.lexsort((row.crossing[places], time[places]))]
        places = cheapest[np.unique(time[cheapest], return_index=True)[1]]
    return np.sort(places[np.argsort(row.crossing[places], kind="stable")[:_PLACES]])


def between(sums: Spans) -> Spans:
    """What lies between every two ends."""
    return np.asarray(sums[None, :] - sums[:, None], dtype=np.float64)


def within(spans: Spans, still: Spans, held: Spans, flights: Sequence[int], limit: float) -> list[Spans]:
    """The spans of each stage, ``inf`` where its memory would be above the limit."""
    every = []
    for flying in flights:
        over = between(still) + flying * between(held) > limit
        every.append(np.where(over, math.inf, spans) if over.any() else spans)
    return every
