"""Progressive shrinking: the largest first, then options from the last to the first, kind after kind."""

from __future__ import annotations

import pytest

from weft.errors import StreamError
from weft.space import Shrinking, Space, make_stream


def space_of(constrained: bool = False) -> Space:
    space = Space()
    depth = space.integer("depth0", [2, 3, 4])
    kernel = space.integer("kernel0", [3, 5, 7])
    space.integer("kernel1", [3, 5], when=depth > 2)
    space.integer("expand", [3, 6])
    if constrained:
        space.require(kernel >= depth, "kernels at least as large as deep")
    return space


def test_options_open_from_the_last_on_and_kind_after_kind() -> None:
    stream = Shrinking(space_of(), 100, ("kernel", "depth"), alone=0.2)
    seen: dict[str, list[int]] = {}
    for step in range(100):
        (subnet,) = stream[step]
        for name, value in subnet.values.items():
            if value not in seen.setdefault(name, []):
                seen[name].append(int(value))
        if step < 20:
            assert subnet == stream.space.last()
        if step < 40:
            assert subnet["kernel0"] in (5, 7)
        if step < 60:
            assert subnet["depth0"] == 4
        if step < 80:
            assert subnet["depth0"] >= 3
    assert seen == {"depth0": [4, 3, 2], "kernel0": [7, 5, 3], "kernel1": [5, 3], "expand": [6, 3]}
    assert {subnet["expand"] for (subnet,) in (stream[i] for i in range(20, 40))} == {3, 6}


def test_every_subnet_meets_the_constraints() -> None:
    space = space_of(constrained=True)
    stream = make_stream(space, "shrinking:kernel,depth", steps=60)
    for step in range(60):
        assert all(space.contains(subnet) for subnet in stream[step])
        assert all(subnet["kernel0"] >= subnet["depth0"] for subnet in stream[step])
    with pytest.raises(StreamError, match="no choice begins with 'width'"):
        make_stream(space, "shrinking:width", steps=10)
    with pytest.raises(StreamError, match="steps >= 1"):
        Shrinking(space, 0)
