"""Where a graph is cut into the stages of a pipeline: the slowest stage as fast as can be, each within its memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from weft.plan.graph import Graph

_PLACES = 400  # the most places that are weighed for a cut


@dataclass(frozen=True, slots=True)
class Load:
    """What one operator asks of its stage: seconds a step, bytes that stay, and bytes a micro-batch in flight."""

    seconds: float
    kept: float
    activations: float


@dataclass(frozen=True, slots=True)
class Cutting:
    """The stage of every operator, and of each stage its seconds a step and its bytes."""

    stage: tuple[int, ...]
    seconds: tuple[float, ...]
    memory: tuple[float, ...]


def cut(
    graph: Graph, loads: Sequence[Load], stages: int, microbatches: int, limit: float, send: float
) -> Cutting | None:
    """The cut into contiguous stages, None if none keeps the limit.

    ``send`` is seconds a byte between stages; a tensor that a gradient flows through crosses twice. Operators that read
    nothing (parameters, inputs) belong to the first stage that reads them. Stage s of S has at most S - s micro-batches
    in flight.
    """
    home = homes(graph)
    order = [place for place in range(len(graph)) if home[place] == place]
    rank = {place: number for number, place in enumerate(order)}
    count = len(order)
    seconds, kept, flying = np.zeros(count), np.zeros(count), np.zeros(count)
    for place, load in enumerate(loads):
        number = rank[home[place]]
        seconds[number] += load.seconds
        kept[number] += load.kept
        flying[number] += load.activations
    crossing = _crossing(graph, home, rank, count)
    places = sorted(np.argsort(crossing[1:], kind="stable")[:_PLACES] + 1)
    if len(places) < stages - 1:
        return None
    ends = np.array([0, *places, count])
    time, still, held = (np.concatenate([[0.0], np.cumsum(values)])[ends] for values in (seconds, kept, flying))
    sent = send * np.concatenate([[0.0], crossing[places], [0.0]])  # for each end: what crosses it in a micro-batch
    spans = time[None, :] - time[:, None] + microbatches * (sent[:, None] + sent[None, :])
    best = np.where(np.arange(len(ends)) == 0, 0.0, math.inf)
    back: list[np.ndarray] = []
    for stage in range(stages):
        flights = min(microbatches, stages - stage)
        memory = still[None, :] - still[:, None] + flights * (held[None, :] - held[:, None])
        span = np.where(
            (memory <= limit) & (np.arange(len(ends))[:, None] < np.arange(len(ends))[None, :]), spans, math.inf
        )
        worst = np.maximum(best[:, None], span)
        back.append(worst.argmin(0))
        best = worst.min(0)
    if math.isinf(best[-1]):
        return None
    marks = [len(ends) - 1]
    for chosen in reversed(back):
        marks.append(int(chosen[marks[-1]]))
    marks.reverse()
    bounds = [int(ends[mark]) for mark in marks]
    of = np.searchsorted(bounds[1:], np.arange(count), side="right")
    return Cutting(
        tuple(int(of[rank[home[place]]]) for place in range(len(graph))),
        tuple(float(spans[a, b]) for a, b in pairwise(marks)),
        tuple(
            float(still[b] - still[a] + min(microbatches, stages - stage) * (held[b] - held[a]))
            for stage, (a, b) in enumerate(pairwise(marks))
        ),
    )


def homes(graph: Graph) -> list[int]:
    """For each operator the one whose stage it shares: its own, or its first reader's where it reads nothing or no
    gradient flows through it."""
    home = list(range(len(graph)))
    first: dict[int, int] = {}
    for place in reversed(range(len(graph))):
        for read in graph.operators[place].reads:
            first[read.source] = place
    for place in reversed(range(len(graph))):
        operator = graph.operators[place]
        moves = bool(operator.reads) and any(tensor.gradient for tensor in operator.outputs)
        if not moves and place in first:
            home[place] = home[first[place]]
    return home


def _crossing(graph: Graph, home: list[int], rank: dict[int, int], count: int) -> np.ndarray:
    """Bytes that cross before each place in the order, there and back: tensors with gradients; what has none is made
    anew in each stage."""
    change = np.zeros(count + 1)
    last: dict[tuple[int, int], int] = {}
    for place, operator in enumerate(graph.operators):
        for read in operator.reads:
            if read.tensor.gradient and graph.operators[read.source].reads:
                key = (read.source, read.output)
                last[key] = max(last.get(key, 0), rank[home[place]])
    for (source, output), reader in last.items():
        size = 2.0 * graph.operators[source].outputs[output].bytes
        change[rank[home[source]] + 1] += size
        change[reader + 1] -= size
    return np.cumsum(change)[:count]
