"""The one hot loop: the least of a sum of tables over one axis, in blocks that stay in the processor's cache."""

from __future__ import annotations

import math

import numpy as np

from weft.plan.solve.problem import Table

BLOCK = 1 << 15  # entries summed at a time: 256 KiB


def lowest(terms: list[Table], shape: tuple[int, ...]) -> Table:
    """The least over axis 0 of the sum of ``terms``, each of which broadcasts to ``shape``; no array of that shape is
    made. Terms are used up."""
    out = np.empty(shape[1:])
    _lowest(terms, shape, out)
    return out


def _lowest(terms: list[Table], shape: tuple[int, ...], out: Table) -> None:
    terms = _merged(terms)
    if len(terms) == 1:
        np.minimum.reduce(terms[0], axis=0, out=out)
        return
    size = math.prod(shape[1:])
    if size > BLOCK and len(shape) > 2:
        _sliced(terms, shape, out)
        return
    step = max(1, BLOCK // size)
    if step >= shape[0]:
        np.minimum.reduce(_sum(terms), axis=0, out=out)
        return
    block = np.empty((step, *shape[1:]))
    for start in range(0, shape[0], step):
        part = block[: min(step, shape[0] - start)]
        np.add(terms[0][start : start + step], terms[1][start : start + step], out=part)
        for term in terms[2:]:
            part += term[start : start + step]
        if start == 0:
            np.minimum.reduce(part, axis=0, out=out)
        elif len(part) == 1:
            np.minimum(out, part[0], out=out)
        else:
            np.minimum(out, np.minimum.reduce(part, axis=0), out=out)


def _sliced(terms: list[Table], shape: tuple[int, ...], out: Table) -> None:
    # An axis that only one term has is fixed first: then that term is small, and is added to another beforehand.
    axis = min(range(1, len(shape) - 1), key=lambda axis: sum(term.shape[axis] > 1 for term in terms))
    rest = math.prod(shape[1:]) // shape[axis]
    if rest >= BLOCK // 16:
        for place in range(shape[axis]):
            fixed: list[Table] = [np.take(term, 0 if term.shape[axis] == 1 else place, axis=axis) for term in terms]
            _lowest(fixed, shape[:axis] + shape[axis + 1 :], out[(slice(None),) * (axis - 1) + (place,)])
        return
    step = max(1, BLOCK // rest)
    for start in range(0, shape[axis], step):
        cut = (slice(None),) * (axis - 1) + (slice(start, start + step),)
        taken = [term if term.shape[axis] == 1 else term[(slice(None), *cut)] for term in terms]
        part = out[cut]
        _lowest(taken, (shape[0], *part.shape), part)


def _sum(terms: list[Table]) -> Table:
    total = terms[0] + terms[1]
    for term in terms[2:]:
        total = total + term
    return total


def _merged(terms: list[Table]) -> list[Table]:
    """A term whose axes another one has too is added to it once, instead of in every block."""
    if len(terms) == 1:
        return terms
    left = sorted(terms, key=lambda term: term.size)
    kept: list[Table] = []
    while left:
        term = left.pop(0)
        for place, other in enumerate(left):
            if all(length in (1, wide) for length, wide in zip(term.shape, other.shape, strict=True)):
                left[place] = other + term
                break
        else:
            kept.append(term)
    return kept
