"""Parameters that several operators read: what is spared where they are fetched once for all that read them alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from weft.plan.graph import PARAMETER, Graph, Tensor
from weft.plan.layout import Mesh, Split, gradient_layout, layout, splits

Table = NDArray[np.float64]
Fetch = Callable[[Tensor, Sequence[Split], Tensor, Sequence[Split]], Table]


def spared(
    graph: Graph, choices: Sequence[Sequence[Split]], mesh: Mesh, fetch: Fetch
) -> Iterator[tuple[tuple[int, int], Table]]:
    """A negative cost between two readers of a parameter where both read it alike: it is fetched once, and the sum of
    their gradients travels once.

    ``fetch`` has the seconds of fetching a parameter and of its gradient's way back, from every split of it to every
    split of a reader. What is spared is the least of these, however the parameter is stored: all of it where it is
    stored as data parallelism does, and never more than what a reader is charged.
    """
    readers: dict[int, dict[int, Tensor]] = {}
    for place, operator in enumerate(graph.operators):
        for read in operator.reads:
            if graph.operators[read.source].kind == PARAMETER:
                readers.setdefault(read.source, {})[place] = read.tensor
    for source, reading in readers.items():
        stored = graph.operators[source]
        for (one, first), (other, second) in pairwise(reading.items()):
            least = fetch(stored.outputs[0], list(splits(stored, mesh)), first, choices[one]).min(0)
            own, others = _ways(first, choices[one]), _ways(second, choices[other])
            alike = np.array([[a == b for b in others] for a in own])
            if (alike & (least[:, None] > 0)).any():
                yield (one, other), np.where(alike, -least[:, None], 0.0)


def _ways(tensor: Tensor, choices: Sequence[Split]) -> list[object]:
    """How an operand must lie, and how its gradient comes out, for every split."""
    return [(layout(tensor, split), gradient_layout(tensor, split)) for split in choices]
