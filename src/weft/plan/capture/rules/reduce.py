"""Sums and means: what is reduced may be split, and leaves partial sums."""

from __future__ import annotations

from weft.plan.capture.call import Call, Space, names, rule, space


@rule("sum", "mean")
def total(call: Call) -> Space | None:
    """Kind "sum", or "mean": the mean of a part must be divided by the number of parts before parts are added."""
    value = call.operands[0]
    labels = names("a", value.rank)
    axes = call.axes(value.rank)
    if call.results[0].rank == value.rank:
        result = tuple(None if axis in axes else name for axis, name in enumerate(labels))
    else:
        result = tuple(name for axis, name in enumerate(labels) if axis not in axes)
    # A sum of truth values or of integers that are counted in another type adds up just the same.
    return space(call, call.target.split(".")[1], [labels], [result], flops=value.elements)


@rule("histc")
def histogram(call: Call) -> Space | None:
    """Counts of the parts add up where the range is given, not taken from the data."""
    if call.given["min"] == call.given["max"]:
        return None
    labels = names("a", call.operands[0].rank)
    return space(call, "sum", [labels], [(None,)], flops=call.operands[0].elements)
