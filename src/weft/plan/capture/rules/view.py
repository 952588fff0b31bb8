"""Views and rearrangements: axes keep their names as far as a contiguous cut of one is a contiguous cut of the other.

Kind "view" shares its operand's memory; kind "copy" does not.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Which axes of a shape become which of another with as many elements, in the smallest groups; axes of size one are
    left out.

    >>> groups((4, 16, 768), (4, 16, 12, 64))
    [([0], [0]), ([1], [1]), ([2], [2, 3])]
    >>> groups((4, 1, 16), (64,))
    [([0, 2], [0])]
    """
    left = [axis for axis, size in enumerate(before) if size != 1]
    right = [axis for axis, size in enumerate(after) if size != 1]
    found: list[tuple[list[int], list[int]]] = []
    while left or right:
        ins, outs = [left.pop(0)], [right.pop(0)]
        first, second = before[ins[0]], after[outs[0]]
        while first != second:
            if first < second:
                ins.append(left.pop(0))
                first *= before[ins[-1]]
            else:
                outs.append(right.pop(0))
                second *= after[outs[-1]]
        found.append((ins, outs))
    return found


@rule("view reshape _unsafe_view flatten unflatten squeeze unsqueeze view_as reshape_as _reshape_alias")
def reshape(call: OpCall) -> IterationSpace | None:
    """The outermost axes of a group are cut alike: 768 into 12 heads of 64 is cut by whole heads. Inner axes are
    whole."""
    before, after = call.operands[0].shape, call.results[0].shape
    if 0 in before or call.operands[0].dtype != call.results[0].dtype or len(call.operands) > 1:
        return None
    read: list[str | None] = [None] * len(before)
    result: list[str | None] = [None] * len(after)
    whole: set[str] = set()
    for number, (ins, outs) in enumerate(groups(before, after)):
        read[ins[0]] = result[outs[0]] = f"a{number}"
        for labels, inner, side in ((read, ins[1:], "i"), (result, outs[1:], "o")):
            for position, axis in enumerate(inner):
                labels[axis] = f"a{number}{side}{position}"
                whole.add(f"a{number}{side}{position}")
    return iteration_space(call, "view", [tuple(read)], [tuple(result)], unsplittable=whole)


@rule("permute transpose t swapaxes numpy_T mT adjoint alias detach")
def permute(call: OpCall) -> IterationSpace | None:
    """All axes are free, in another order."""
    rank = call.operands[0].rank
    labels = names("a", rank)
    name = call.target.split(".")[1]
    order = list(range(rank))
    if name == "permute":
        order = [axis % rank for axis in call.given["dims"]]
    elif name == "numpy_T":
        order.reverse()
    elif rank > 1 and name not in ("alias", "detach"):
        pair = {"transpose": ("dim0", "dim1"), "swapaxes": ("axis0", "axis1")}.get(name)
        one, two = (call.axis(rank, key) for key in pair) if pair else (rank - 2, rank - 1)
        order[one], order[two] = order[two], order[one]
    return iteration_space(call, "view", [labels], [tuple(labels[axis] for axis in order)])


@rule("expand", "broadcast_to", "broadcast_tensors")
def expand(call: OpCall) -> IterationSpace | None:
    """Axes that are repeated are free, and the operands lack them."""
    labels = names("a", call.results[0].rank)
    reads = [broadcast(value.shape, call.results[0].shape, labels) for value in call.operands]
    return iteration_space(call, "view", reads, [labels] * len(reads))


@rule("select", "slice", "narrow", "split", "split_with_sizes", "chunk", "tensor_split", "unbind")
def cut(call: OpCall) -> IterationSpace | None:
    """The axis that is cut is whole, unless all of it is taken."""
    value = call.operands[0]
    labels = names("a", value.rank)
    axis = call.axis(value.rank)
    if call.target == "aten.slice" and call.results[0].shape == value.shape:
        return iteration_space(call, "view", [labels], [labels])
    results = [_part(labels, axis, found.rank) for found in call.results]
    return iteration_space(call, "view", [labels], results, unsplittable=(labels[axis],))


def _part(labels: AxisNames, axis: int, rank: int) -> AxisNames:
    """The axes of a part along one axis, which a part of lower rank lacks."""
    return (*labels[:axis], *((None,) if rank == len(labels) else ()), *labels[axis + 1 :])


@rule("cat", "concat", "concatenate", "stack")
def join(call: OpCall) -> IterationSpace | None:
    """The axis along which tensors are put together is whole."""
    rank = call.results[0].rank
    axis = call.axis(rank)
    labels = names("a", rank)
    reads: list[AxisNames] = []
    for value in call.operands:
        if call.target == "aten.stack":
            reads.append((*labels[:axis], *labels[axis + 1 :]))
        else:  # an empty tensor of any shape is allowed
            reads.append(labels if value.rank == rank else (None,) * value.rank)
    return iteration_space(call, "copy", reads, [labels], unsplittable=(labels[axis],))


@rule("pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d")
def pad(call: OpCall) -> IterationSpace | None:
    """Axes that grow (or shrink) are whole."""
    value = call.operands[0]
    labels = names("a", value.rank)
    sizes: list[int] = call.given["pad" if "pad" in call.given else "padding"]
    padded = {value.rank - 1 - number // 2 for number, size in enumerate(sizes) if size}
    result = tuple(None if axis in padded else name for axis, name in enumerate(labels))
    return iteration_space(call, "copy", [labels], [result], unsplittable=[labels[axis] for axis in padded])


@rule("repeat", "tile")
def repeat(call: OpCall) -> IterationSpace | None:
    """Axes that are repeated are whole."""
    value, result = call.operands[0], call.results[0]
    labels = names("a", result.rank)
    ones = (1,) * (result.rank - value.rank)
    kept = [name for name, size, left in zip(labels, (*ones, *value.shape), result.shape, strict=True) if size == left]
    read = tuple(name if name in kept else None for name in labels[len(ones) :])
    return iteration_space(call, "copy", [read], [labels], unsplittable=[name for name in labels if name not in kept])


@rule("repeat_interleave")
def interleave(call: OpCall) -> IterationSpace | None:
    """Each entry repeated in place: a cut between entries is a cut of the result."""
    if call.overload != "self_int" or isinstance(call.given["repeats"], TensorArgument) or call.given["dim"] is None:
        return None
    labels = names("a", call.operands[0].rank)
    return iteration_space(call, "copy", [labels], [labels])


@rule("view_as_complex", "view_as_real")
def paired(call: OpCall) -> IterationSpace | None:
    """The last axis of the real form holds the pair."""
    labels = names("a", min(call.operands[0].rank, call.results[0].rank))
    forms: list[list[AxisNames]] = [[labels], [(*labels, None)]]
    return iteration_space(call, "view", *(forms if call.target == "aten.view_as_real" else reversed(forms)))


@rule("pixel_shuffle", "pixel_unshuffle")
def shuffle(call: OpCall) -> IterationSpace | None:
    """Leading axes are free, and channels, by those of the coarser count."""
    rank = call.operands[0].rank
    labels: AxisNames = (*names("a", rank - 3), "c", None, None)
    return iteration_space(call, "copy", [labels], [labels])


@rule("select_scatter", "slice_scatter")
def replace_part(call: OpCall) -> IterationSpace | None:
    """A part of the first operand is replaced by the second; the axis of the part is whole."""
    value, source = call.operands
    labels = names("a", value.rank)
    axis = call.axis(value.rank)
    read = _part(labels, axis, source.rank)
    return iteration_space(call, "copy", [labels, read], [labels], unsplittable=(labels[axis],))
