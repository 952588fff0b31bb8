"""Picking entries by index: what is indexed stays whole, the indices may be split."""

from __future__ import annotations

from weft.plan.capture.op_call import (
    AxisNames,
    IterationSpace,
    OpCall,
    TensorArgument,
    broadcast,
    iteration_space,
    names,
    rule,
)


@rule("embedding")
def embedding(call: OpCall) -> IterationSpace | None:
    """``(v, d), (i...) -> (i..., d)``; the vocabulary is whole."""
    indices = names("i", call.operands[1].rank)
    return iteration_space(
        call,
        "embedding",
        [("v", "d"), indices],
        [(*indices, "d")],
        unsplittable=("v",),
        moved=2.0 * call.results[0].bytes + call.operands[1].bytes,
        saved_operands=[1],
    )


@rule("index_select")
def index_select(call: OpCall) -> IterationSpace | None:
    """The indices are free; the axis they point into is whole."""
    rank = call.operands[0].rank
    axis = call.axis(rank)
    labels = names("a", rank)
    read: AxisNames = (*labels[:axis], None, *labels[axis + 1 :])
    if call.operands[1].rank != 1:
        return None
    return iteration_space(
        call, "copy", [read, (labels[axis],)], [labels], saved_operands=[1], moved=2.0 * call.results[0].bytes
    )


@rule("gather", "take_along_dim")
def gather(call: OpCall) -> IterationSpace | None:
    """Every axis of the indices is free; the first operand is cut along those that it has in full."""
    value, index = call.operands
    if call.given.get("dim") is None or value.rank != index.rank:
        return None
    axis = call.axis(value.rank)
    labels = names("a", value.rank)
    full = [each != axis and value.shape[each] == index.shape[each] for each in range(value.rank)]
    read = tuple(name if kept else None for name, kept in zip(labels, full, strict=True))
    partial = [name for each, name in enumerate(labels) if each != axis and not full[each]]
    return iteration_space(call, "copy", [read, labels], [labels], unsplittable=partial, saved_operands=[1])


@rule("index")
def index(call: OpCall) -> IterationSpace | None:
    """Axes that are not indexed are free, and so are the axes of the indices; those that they point into are whole."""
    value = call.operands[0]
    given = call.given["indices"]
    if any(operand.value.dtype.itemsize == 1 for operand in given if operand is not None):
        return None  # a mask
    indexed = [axis for axis, operand in enumerate(given) if operand is not None]
    shapes = [operand.value.shape for operand in given if isinstance(operand, TensorArgument)]
    rank = max((len(shape) for shape in shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    shape = tuple(max(sizes) for sizes in zip(*padded, strict=True))
    picked = names("i", rank)
    read = tuple(None if axis in indexed else f"a{axis}" for axis in range(value.rank))
    indices = [broadcast(found, shape, picked) for found in shapes]
    together = bool(indexed) and indexed == list(range(indexed[0], indexed[0] + len(indexed)))
    first = indexed[0] if together else 0  # where the axes of the indices go
    before, after = (
        [f"a{axis}" for axis in side if axis not in indexed] for side in (range(first), range(first, value.rank))
    )
    return iteration_space(
        call,
        "copy",
        [read, *indices],
        [(*before, *picked, *after)],
        saved_operands=range(1, len(call.operands)),
        moved=2.0 * call.results[0].bytes,
    )


@rule("index_put", "_unsafe_index_put")
def index_put(call: OpCall) -> IterationSpace | None:
    """Entries of the first operand replaced, or added to: only axes that are not indexed are free."""
    given = call.given["indices"]
    numbers = [operand.number for operand in given if operand is not None]
    value, source = call.operands[0], call.operands[-1]
    if any(call.operands[number].dtype.itemsize == 1 for number in numbers):
        return None
    indexed = [axis for axis, operand in enumerate(given) if operand is not None]
    labels = names("a", value.rank)
    # Only the axes behind all indices line up with those of what is put there.
    behind = value.rank - 1 - max(indexed, default=-1)
    trailing = labels[value.rank - behind :]
    read = [None] * source.rank
    for offset in range(1, min(behind, source.rank) + 1):
        if source.shape[-offset] == value.shape[-offset]:
            read[-offset] = trailing[-offset]  # type: ignore[call-overload]
    return iteration_space(
        call,
        "copy",
        [labels, *[(None,) * call.operands[number].rank for number in numbers], tuple(read)],
        [labels],
        unsplittable=labels[: value.rank - behind],
        saved_operands=numbers,
    )


@rule("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill")
def scatter(call: OpCall) -> IterationSpace | None:
    """The axis that is scattered along is whole; the others are free where all operands have them in full."""
    value = call.operands[0]
    axis = call.axis(value.rank)
    labels = names("a", value.rank)
    flat = call.target in ("aten.index_add", "aten.index_copy", "aten.index_fill")
    same = [each != axis for each in range(value.rank)]
    alike = [other for other in call.operands[2 if flat else 1 :] if other.rank]
    if any(other.rank != value.rank for other in alike):
        return None
    for other in alike:
        same = [kept and size == own for kept, size, own in zip(same, other.shape, value.shape, strict=True)]
    axes = tuple(name if kept else None for name, kept in zip(labels, same, strict=True))
    reads: list[AxisNames] = [labels]
    for number, other in enumerate(call.operands[1:]):
        reads.append((None,) * other.rank if (flat and number == 0) or other.rank == 0 else axes)
    whole = [name for name, kept in zip(labels, same, strict=True) if not kept]
    return iteration_space(call, "copy", reads, [labels], unsplittable=whole, saved_operands=[1])


@rule("searchsorted", "bucketize")
def search(call: OpCall) -> IterationSpace | None:
    """Each entry is looked up in a sorted vector, which is the second operand of bucketize."""
    labels = names("a", call.results[0].rank)
    reads: list[AxisNames] = [labels, (None,)] if call.target == "aten.bucketize" else [(None,), labels]
    if [len(axes) for axes in reads] != [value.rank for value in call.operands]:
        return None
    return iteration_space(call, "copy", reads, [labels])


@rule("cdist", "_cdist_forward")
def distances(call: OpCall) -> IterationSpace | None:
    """``(b..., p, m), (b..., r, m) -> (b..., p, r)``; the points' axis is whole."""
    result = call.results[0]
    batch = names("b", result.rank - 2)
    one, two = (broadcast(value.shape[:-2], result.shape[:-2], batch) for value in call.operands)
    return iteration_space(
        call, "along", [(*one, "p", "m"), (*two, "r", "m")], [(*batch, "p", "r")], unsplittable=("m",),
        flops=3.0 * result.elements * call.operands[0].shape[-1], saved_operands=[0, 1], saved_results=[0],
    )  # fmt: skip
