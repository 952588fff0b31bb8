"""The backward of a captured graph: where a gradient comes by, and what must be kept for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from weft.plan.capture.call import Space
from weft.plan.graph import Operator

Place = tuple[int, int]  # an operator, and which of its outputs


def reached(operators: Sequence[Operator], results: Iterable[Place]) -> list[Operator]:
    """The operators, without gradients for tensors that no result depends on in a way that autograd follows."""
    needed = set(results)
    found = list(operators)
    for place in reversed(range(len(found))):
        entry = found[place]
        outputs = tuple(
            replace(tensor, gradient=tensor.gradient and (place, number) in needed)
            for number, tensor in enumerate(entry.outputs)
        )
        reads = entry.reads
        if not any(tensor.gradient for tensor in outputs):
            reads = tuple(replace(read, tensor=replace(read.tensor, gradient=False)) for read in reads)
            entry = replace(entry, backward=0.0)
        needed.update((read.source, read.output) for read in reads if read.tensor.gradient)
        found[place] = replace(entry, outputs=outputs, reads=reads)
    return found


def saved(operators: Sequence[Operator], spaces: Mapping[int, Space]) -> Iterator[Operator]:
    """The operators, each with the bytes that are kept. A tensor is counted where it was made, once, however many need
    it; a view keeps what it looks at. Parameters, inputs and constants (which have no space) are there anyway."""
    roots: dict[Place, Place] = {}
    kept: set[Place] = set()
    for place, entry in enumerate(operators):
        sources = [roots[read.source, read.output] for read in entry.reads]
        space = spaces.get(place)
        for number in range(len(entry.outputs)):
            if space is not None and space.kind == "view" and sources:
                roots[place, number] = sources[number if len(sources) == len(entry.outputs) else 0]
            else:
                roots[place, number] = (place, number)
        if space is not None and any(tensor.gradient for tensor in entry.outputs):
            kept.update(sources[number] for number in space.keeps)
            kept.update(roots[place, number] for number in space.leaves)
    for place, entry in enumerate(operators):
        space = spaces.get(place)
        if space is None:
            yield entry
            continue
        own = sum(tensor.bytes for number, tensor in enumerate(entry.outputs) if (place, number) in kept)
        extra = space.extra if any(tensor.gradient for tensor in entry.outputs) else 0.0
        yield replace(entry, saved=float(own + extra))
