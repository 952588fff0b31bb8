"""What is drawn of a graph: an operator a box, with the parameters, constants and views around it folded into it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from weft.plan.graph import PARAMETER, Graph, Operator

_FOLDED = (PARAMETER, "constant", "view")


@dataclass(frozen=True, slots=True)
class Boxes:
    """The operators that have a box, by their places; for every operator the box that it is drawn in, None where
    nothing reads it; the edges between boxes, and those of them along which something is moved between devices."""

    places: tuple[int, ...]
    owner: tuple[int | None, ...]
    edges: frozenset[tuple[int, int]]
    moved: frozenset[tuple[int, int]]

    def folded(self) -> dict[int, list[int]]:
        """For each box the places of what is folded into it."""
        found: dict[int, list[int]] = {place: [] for place in self.places}
        for place, owner in enumerate(self.owner):
            if owner is not None and owner != place:
                found[owner].append(place)
        return found


def boxes(graph: Graph, moved: Collection[tuple[int, int]] = ()) -> Boxes:
    """The boxes of a graph; ``moved`` are its edges along which something is moved between devices."""
    drawn = [_is_drawn(operator) for operator in graph.operators]
    edges: dict[tuple[int, int], bool] = {}
    origins: list[dict[int, bool]] = []  # of each operator: the boxes its values come from, and whether they moved
    for place, operator in enumerate(graph.operators):
        found: dict[int, bool] = {}
        for read in operator.reads:
            now = (read.source, place) in moved
            for origin, before in origins[read.source].items():
                found[origin] = found.get(origin, False) or before or now
        if drawn[place]:
            edges |= {(origin, place): moves for origin, moves in found.items()}
        origins.append({place: False} if drawn[place] else found)
    return Boxes(
        tuple(place for place, own in enumerate(drawn) if own),
        _owners(graph, drawn),
        frozenset(edges),
        frozenset(edge for edge, moves in edges.items() if moves),
    )


def _is_drawn(operator: Operator) -> bool:
    return operator.kind not in _FOLDED or operator.flops > 0


def _owners(graph: Graph, drawn: list[bool]) -> tuple[int | None, ...]:
    """What is folded belongs to its first reader, or where it has none to what it reads."""
    owner: list[int | None] = [place if own else None for place, own in enumerate(drawn)]
    for place in reversed(range(len(graph))):
        for read in graph.operators[place].reads:
            if not drawn[read.source] and owner[place] is not None:
                owner[read.source] = owner[place]
    for place, operator in enumerate(graph.operators):
        if owner[place] is None:
            owner[place] = next((owner[read.source] for read in operator.reads), None)
    return tuple(owner)
