"""The operators of a graph in the line that a pipeline cuts: which share a stage, and what crosses each place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.plan.graph import PARAMETER, Graph

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Line:
    """``ranks`` has the place in the line of every operator. ``crossing`` has, for each place in the line, the bytes
    that a micro-batch sends where the line is cut before it, there and back. ``owned`` counts the places before each
    that have parameters; the last counts all."""

    ranks: NDArray[np.intp]
    crossing: Values
    owned: Values

    def __len__(self) -> int:
        return len(self.crossing)

    def sums(self, values: Sequence[float]) -> Values:
        """For each place in the line what all operators before it have together; the last is of all."""
        return np.concatenate([[0.0], np.cumsum(np.bincount(self.ranks, values, len(self)))])


def line(graph: Graph) -> Line:
    """The line of a graph. Operators that read nothing, or that no gradient flows through, share the stage of the first
    that reads them."""
    home = homes(graph)
    order = sorted(set(home))
    rank = {place: number for number, place in enumerate(order)}
    ranks = np.array([rank[place] for place in home], dtype=np.intp)
    owners = np.zeros(len(order))
    owners[[ranks[place] for place, operator in enumerate(graph.operators) if operator.kind == PARAMETER]] = 1.0
    return Line(ranks, _crossing(graph, ranks, len(order)), np.concatenate([[0.0], np.cumsum(owners)]))


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


def _crossing(graph: Graph, ranks: NDArray[np.intp], count: int) -> Values:
    """Bytes that cross before each place, there and back: tensors with gradients; what has none is made anew in each
    stage."""
    change = np.zeros(count + 1)
    last: dict[tuple[int, int], int] = {}
    for place, operator in enumerate(graph.operators):
        for read in operator.reads:
            if read.tensor.gradient and graph.operators[read.source].reads:
                key = (read.source, read.output)
                last[key] = max(last.get(key, 0), int(ranks[place]))
    for (source, output), reader in last.items():
        size = 2.0 * graph.operators[source].outputs[output].bytes
        change[ranks[source] + 1] += size
        change[reader + 1] -= size
    return np.cumsum(change)[:count]
