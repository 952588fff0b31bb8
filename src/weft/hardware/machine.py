"""What a plan runs on: devices that compute at a rate, and links between them, level by level."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from weft.errors import PlanError, RunError, nearest
from weft.utils.files import read_json

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One device.

    ``peak`` is FLOP/s by the name of a dtype. ``efficiency`` is the fraction of it that one kernel reaches, as points
    (FLOP of the kernel in float32, fraction) in ascending order: straight lines over the logarithm of the FLOP between
    them, level outside. In a faster dtype a kernel needs as many times the FLOP to last as long. ``bandwidth`` is of
    its memory in bytes a second, ``capacity`` in bytes, ``overhead`` the seconds that a kernel takes beside its work.
    ``launch`` is what a host needs to start a kernel while the device computes: no step is faster than its launches.
    """

    peak: Mapping[str, float] = field(hash=False)
    efficiency: tuple[tuple[float, float], ...]
    bandwidth: float
    capacity: float
    overhead: float
    launch: float = 0.0

    def __post_init__(self) -> None:
        if not self.peak:
            raise PlanError("a device has a peak for at least one dtype, such as {'float32': 1e13}")
        for name, peak in self.peak.items():
            _positive(f"peak of {name}", peak)
        _positive("memory bandwidth", self.bandwidth)
        _positive("memory capacity", self.capacity)
        for name, seconds in (("overhead", self.overhead), ("launch", self.launch)):
            if not seconds >= 0:
                raise PlanError(f"the {name} of a kernel is at least 0 s, not {seconds}")
        flops = [point[0] for point in self.efficiency]
        if not flops or flops[0] <= 0 or any(b <= a for a, b in pairwise(flops)):
            raise PlanError(f"an efficiency curve has points of ascending FLOP above 0, not {flops}")
        for _, fraction in self.efficiency:
            if not 0 < fraction <= 1:
                raise PlanError(f"an efficiency lies above 0 and is at most 1, not {fraction}")


@dataclass(frozen=True, slots=True)
class Link:
    """One level of a topology: joins ``devices`` units of the level within (devices, at the innermost level; a number
    without bound if None) by links of ``bandwidth`` bytes a second each way for each device, and ``latency`` seconds.

    A unit's link is as wide as those of its devices together: eight devices behind one network card of 12.5e9 B/s have
    12.5e9 / 8 each.
    """

    name: str
    devices: int | None
    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        if self.devices is not None and self.devices < 1:
            raise PlanError(f"level '{self.name}' joins at least 1 unit, not {self.devices}")
        _positive(f"bandwidth of level '{self.name}'", self.bandwidth)
        if not self.latency >= 0:
            raise PlanError(f"the latency of level '{self.name}' is at least 0 s, not {self.latency}")


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices of one kind, and the levels of links between them, innermost first."""

    name: str
    device: DeviceSpec
    levels: tuple[Link, ...]

    def __post_init__(self) -> None:
        if not self.levels:
            raise PlanError(f"machine '{self.name}' has no level: give at least one, with its bandwidth and latency")
        for level in self.levels[:-1]:
            if level.devices is None:
                raise PlanError(f"only the outermost level may be without bound: level '{level.name}' needs a count")

    @property
    def devices(self) -> int | None:
        """How many devices there are, None if without bound."""
        counts = [level.devices for level in self.levels]
        return None if counts[-1] is None else math.prod(count or 1 for count in counts)

    def compute_seconds(self, flops: ArrayLike, moved_bytes: ArrayLike, dtype: str) -> Seconds:
        """Seconds that kernels take, each of so many FLOP and bytes read and written: whichever takes longer, and the
        overhead. A kernel with neither is none, and takes nothing. Arrays give arrays."""
        if dtype not in self.device.peak:
            raise PlanError(f"machine '{self.name}' has no peak for '{dtype}'{nearest(dtype, self.device.peak)}")
        work, moved = np.asarray(flops, dtype=np.float64), np.asarray(moved_bytes, dtype=np.float64)
        points, fractions = zip(*self.device.efficiency, strict=True)
        faster = self.device.peak[dtype] / self.device.peak.get("float32", self.device.peak[dtype])
        reached = np.interp(np.log(np.maximum(work / faster, points[0])), np.log(points), fractions)
        busy = np.maximum(work / (self.device.peak[dtype] * reached), moved / self.device.bandwidth)
        return np.where(busy > 0, busy + self.device.overhead, 0.0)

    def axis_link(self, mesh_sizes: tuple[int, ...], axis: int) -> tuple[float, float]:
        """(bytes a second, seconds of latency) between neighbours along an axis of a mesh while all its groups send.

        Devices are numbered along the last axis first, so that a group along axis k has strides of prod(sizes[k+1:]),
        and they fill the levels in that order. A group goes round in a ring: where it lies in several units of a level,
        it crosses the link of each once each way. A unit's link is as wide as those of its devices together, and the
        groups that cross it share it. The slowest link of the slowest group counts, and the greatest latency crossed.
        A group of one device sends nothing: (inf, 0).
        """
        asked = math.prod(mesh_sizes)
        if self.devices is not None and asked > self.devices:
            raise PlanError(
                f"the mesh {mesh_sizes} needs {asked} devices, and machine '{self.name}' has {self.devices}: "
                "take a smaller mesh, or a machine whose outermost level joins more"
            )
        return _link(self.levels, tuple(mesh_sizes), axis)

    def to_json(self) -> dict[str, Any]:
        """The value in the types of JSON, as `from_json` reads it."""
        found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return found

    @classmethod
    def from_json(cls, value: Any, where: str = "machine") -> Machine:
        """The machine that `to_json` gave; `PlanError` names a field that is missing, unknown or of a wrong type."""
        try:
            found = msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise PlanError(f"{where} cannot be read: {error}") from error
        _refuse_unknown(value, found.to_json(), where)
        return found


def machine(name_or_path: str | Path | Machine) -> Machine:
    """A preset by its name, whatever its case, or the machine in a JSON file; `PlanError` if it is neither. A machine
    is itself."""
    from weft.hardware.presets import PRESETS, preset

    if isinstance(name_or_path, Machine):
        return name_or_path
    word = str(name_or_path)
    if isinstance(name_or_path, str) and not word.lower().endswith(".json") and not Path(word).is_file():
        return preset(word)
    try:
        return Machine.from_json(read_json(word), f"'{word}'")
    except RunError as error:
        raise PlanError(f"{error}; presets: {', '.join(PRESETS)}") from error


@lru_cache(maxsize=4096)
def _link(levels: tuple[Link, ...], sizes: tuple[int, ...], axis: int) -> tuple[float, float]:
    length, stride = sizes[axis], math.prod(sizes[axis + 1 :])
    count = math.prod(sizes)
    if length == 1:
        return math.inf, 0.0
    # Row g: the devices of group g, in ascending order.
    groups = np.arange(count).reshape(-1, length, stride).swapaxes(1, 2).reshape(-1, length)
    bandwidth, latency, unit = math.inf, 0.0, 1
    for level in levels:
        units = groups // unit
        crossing = units[units[:, 0] != units[:, -1]]
        if len(crossing):
            # How many groups each unit's link carries: a group counts once in each unit that it visits.
            first = np.ones(crossing.shape, dtype=bool)
            first[:, 1:] = crossing[:, 1:] != crossing[:, :-1]
            busiest = np.bincount(crossing[first]).max()
            bandwidth = min(bandwidth, float(level.bandwidth * unit / busiest))
            latency = max(latency, level.latency)
        unit *= level.devices or 1
    return bandwidth, latency


def _refuse_unknown(value: Any, known: Any, where: str) -> None:
    """A name in a mapping that reading passed over is a mistyped one."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name not in known:
                raise PlanError(f"{where} has the unknown field '{name}'{nearest(name, known)}")
            _refuse_unknown(item, known[name], f"{where}.{name}")
    elif isinstance(value, list):
        for number, (item, other) in enumerate(zip(value, known, strict=True)):
            _refuse_unknown(item, other, f"{where}[{number}]")


def _positive(what: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise PlanError(f"the {what} is above 0 and finite, not {value}")
