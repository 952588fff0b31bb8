"""Machines: what kernels and links cost, what is refused, and the presets."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import PlanError
from weft.hardware.machine import DeviceSpec, Link, Machine, machine
from weft.hardware.presets import PRESETS

SMALL = Machine(
    "small",
    DeviceSpec({"float32": 1e12, "bfloat16": 4e12}, ((1e6, 0.1), (1e8, 0.5)), 1e11, 8e9, 1e-6),
    (Link("node", 4, 100e9, 1e-6), Link("rack", 2, 10e9, 5e-6), Link("hall", None, 1e9, 9e-6)),
)


def test_a_kernel_takes_the_longer_of_computing_and_moving_and_the_overhead() -> None:
    assert SMALL.compute_seconds(1e8, 0, "float32") == pytest.approx(1e8 / 0.5e12 + 1e-6)
    # Four times as fast: it takes four times the work for a kernel to last as long, and be as efficient.
    assert SMALL.compute_seconds(4e8, 0, "bfloat16") == pytest.approx(4e8 / 2e12 + 1e-6)
    assert SMALL.compute_seconds(1e8, 0, "bfloat16") > 1e8 / 2e12 + 1e-6
    assert SMALL.compute_seconds(1e8, 1e9, "float32") == pytest.approx(1e-2 + 1e-6)
    assert SMALL.compute_seconds([0, 0], [0, 1e9], "float32").tolist() == [0.0, pytest.approx(1e-2 + 1e-6)]


def test_efficiency_is_straight_over_the_logarithm_and_level_outside() -> None:
    work = np.array([1e3, 1e6, 1e7, 1e8, 1e12])
    reached = work / (SMALL.compute_seconds(work, 0, "float32") - 1e-6) / 1e12
    np.testing.assert_allclose(reached, [0.1, 0.1, 0.3, 0.5, 0.5], rtol=1e-6)


@given(st.lists(st.tuples(st.floats(0, 1e15), st.floats(0, 1e12)), min_size=1, max_size=20))
def test_an_array_of_kernels_takes_what_each_takes(kernels: list[tuple[float, float]]) -> None:
    flops, moved = zip(*kernels, strict=True)
    together = SMALL.compute_seconds(flops, moved, "float32")
    assert together.tolist() == [float(SMALL.compute_seconds(a, b, "float32")) for a, b in kernels]


@pytest.mark.parametrize(
    ("sizes", "axis", "bandwidth", "latency"),
    [
        ((4,), 0, 100e9, 1e-6),  # within a node
        ((2, 4), 1, 100e9, 1e-6),
        ((8,), 0, 40e9, 5e-6),  # one ring has the whole link of its node, four devices wide
        ((2, 4), 0, 10e9, 5e-6),  # four groups share it
        ((4, 2), 0, 20e9, 5e-6),  # two groups of two devices a node
        ((16,), 0, 8e9, 9e-6),  # out of a rack of eight
        ((2, 8), 0, 1e9, 9e-6),
        ((1, 4), 0, math.inf, 0.0),  # alone
    ],
)
def test_the_link_of_an_axis_by_hand(sizes: tuple[int, ...], axis: int, bandwidth: float, latency: float) -> None:
    assert SMALL.axis_link(sizes, axis) == (bandwidth, latency)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.data())
def test_a_link_is_no_faster_than_its_innermost_level_and_as_slow_as_a_walk_finds(
    sizes: list[int], data: st.DataObject
) -> None:
    axis = data.draw(st.integers(0, len(sizes) - 1))
    bandwidth, latency = SMALL.axis_link(tuple(sizes), axis)
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, at in enumerate(np.ndindex(*sizes)):
        groups.setdefault(at[:axis] + at[axis + 1 :], []).append(number)
    slowest, longest, unit = math.inf, 0.0, 1
    for level in SMALL.levels:
        carried: dict[int, int] = {}
        for members in groups.values():
            visited = {member // unit for member in members}
            for one in visited if len(visited) > 1 else ():
                carried[one] = carried.get(one, 0) + 1
        if carried:
            slowest = min(slowest, level.bandwidth * unit / max(carried.values()))
            longest = max(longest, level.latency)
        unit *= level.devices or 1
    assert (bandwidth, latency) == (pytest.approx(slowest), longest)


def test_a_mesh_beyond_the_machine_and_a_dtype_without_a_peak_are_refused() -> None:
    with pytest.raises(PlanError, match="no peak for 'float23'; did you mean 'float32'"):
        SMALL.compute_seconds(1, 1, "float23")
    bounded = replace(SMALL, levels=SMALL.levels[:2])
    assert (bounded.devices, SMALL.devices) == (8, None)
    with pytest.raises(PlanError, match=r"\(3, 3\) needs 9 devices, and machine 'small' has 8"):
        bounded.axis_link((3, 3), 0)


@pytest.mark.parametrize("value", [SMALL, *PRESETS.values()], ids=lambda value: value.name)
def test_a_machine_comes_back_from_its_file_as_it_was(value: Machine, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(value.to_json()))
    assert machine(file) == machine(str(file)) == value
    assert hash(machine(file)) == hash(value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("name"), "missing required field `name`"),
        (lambda m: m["levels"][1].pop("latency"), r"missing required field `latency` - at `\$.levels\[1\]`"),
        (lambda m: m["levels"][0].update(bandwidht=1), r"levels\[0\] has the unknown field 'bandwidht'; did you mean"),
        (lambda m: m["device"].update(bandwidth="fast"), r"Expected `float`, got `str` - at `\$.device.bandwidth`"),
        (lambda m: m["device"].update(bandwidth=math.nan), "memory bandwidth is above 0 and finite, not nan"),
        (lambda m: m["device"].update(overhead=-1), "overhead of a kernel is at least 0 s"),
        (lambda m: m["device"].update(peak={}), "a peak for at least one dtype"),
        (lambda m: m["device"].update(efficiency=[[2, 0.1], [1, 0.2]]), "ascending FLOP"),
        (lambda m: m["device"].update(efficiency=[[1, 1.5]]), "at most 1, not 1.5"),
        (lambda m: m.update(levels=[]), "has no level"),
        (lambda m: m["levels"][0].update(devices=None), "only the outermost level may be without bound"),
        (lambda m: m["levels"][0].update(devices=0), "joins at least 1 unit, not 0"),
        (lambda m: m["levels"][0].update(latency=-1), "latency of level 'node' is at least 0 s"),
    ],
)
def test_a_wrong_file_is_refused_by_the_name_of_the_field(
    change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path
) -> None:
    value = json.loads(json.dumps(SMALL.to_json()))
    change(value)
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(value))
    with pytest.raises(PlanError, match=message):
        machine(file)


def test_a_preset_is_found_in_any_case_and_what_is_none_is_refused_with_what_there_is() -> None:
    for word in ("1080Ti", "2080ti", "V100", "a100", "H200", "cpu", "gtx 1080-ti"):
        assert set(machine(word).device.peak) == {"float32", "tf32", "bfloat16", "float16"}
    with pytest.raises(PlanError, match="unknown machine 'H1000'; did you mean 'h100'"):
        machine("H1000")
    with pytest.raises(PlanError, match=r"cannot read 'none.json'.*presets: 1080Ti"):
        machine("none.json")
