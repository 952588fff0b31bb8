"""The moves that bring a tensor from how it lies to how it is wanted, one mesh axis at a time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from weft.plan.layout import PARTIAL, REPLICATED, Layout, Mesh


class Kind(StrEnum):
    """What a move does, from the one that makes later moves cheapest to the one that makes them dearest."""

    CUT = "cut"  # whole -> cut: each keeps its part, nothing is sent
    REDUCE_SCATTER = "reduce_scatter"  # summands -> cut
    ALL_REDUCE = "all_reduce"  # summands -> whole
    ALL_TO_ALL = "all_to_all"  # cut along one tensor axis -> cut along another
    ALL_GATHER = "all_gather"  # cut -> whole


@dataclass(frozen=True, slots=True)
class Move:
    """One collective among the devices along one mesh axis; ``old`` and ``new`` are entries of a layout."""

    kind: Kind
    axis: int
    old: int
    new: int


def passage(held: Layout, wanted: Layout, mesh: Mesh) -> tuple[Move, ...]:
    """The moves from one layout to another that is not partial.

    A tensor axis that several mesh axes cut is cut by the outer one first, so an inner cut can be made or undone only
    while the outer ones are as they will be, or stay as they are.

    >>> [str(move.kind) for move in passage((PARTIAL, 0), (0, REPLICATED), Mesh((2, 2)))]
    ['all_gather', 'reduce_scatter']
    """
    current, moves = list(held), []
    while tuple(current) != wanted:
        move = next(
            move for kind in Kind for axis in range(len(current)) if (move := _legal(kind, axis, current, wanted))
        )
        current[move.axis] = move.new
        if mesh.sizes[move.axis] > 1:
            moves.append(move)
    return tuple(moves)


def _legal(kind: Kind, axis: int, current: list[int], wanted: Layout) -> Move | None:
    """The move of this kind along this mesh axis, where it can be made now and brings the layout nearer."""
    old, new = current[axis], wanted[axis]

    def settled(place: int) -> bool:
        """The outer mesh axes cut this tensor axis as they shall in the end."""
        return all((current[outer] == place) == (wanted[outer] == place) for outer in range(axis))

    def innermost(place: int) -> bool:
        return place not in current[axis + 1 :]

    can_cut = new >= 0 and settled(new) and innermost(new)
    if kind is Kind.CUT:
        fits = old == REPLICATED and can_cut
    elif kind is Kind.REDUCE_SCATTER:
        fits = old == PARTIAL and can_cut
    elif kind is Kind.ALL_REDUCE:
        fits = old == PARTIAL and new == REPLICATED
    elif kind is Kind.ALL_TO_ALL:
        fits = old >= 0 and old != new and can_cut and innermost(old)
    else:
        fits = old >= 0 and (old != new or not settled(old)) and innermost(old)
        new = REPLICATED
    return Move(kind, axis, old, new) if fits else None
