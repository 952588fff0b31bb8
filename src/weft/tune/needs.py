"""What a trial needs of a device before it runs, and which trials run as one."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.errors import PlanError
from weft.space import Value
from weft.tune.attempt import Terms
from weft.tune.job import After, Fit
from weft.tune.recipe import CONTINUOUS, Recipe

if TYPE_CHECKING:
    from weft.tune.setting import Setting

log = logging.getLogger("weft.tune")

BEYOND = 0.05
"""The part of its estimate that a trial may take beyond it, since others lie beside it."""
SLACK = 128 * 2**20
"""Bytes that a trial may take of a GPU beyond its estimate: what workers that live on leave lying between blocks."""
TINY = 16 * 2**10
"""The same on a CPU, where the smallest take a little more while they are scored."""
LANE = 1 / 32
"""The part of a device above which a trial is not fused: it keeps the device busy by itself."""


BESIDE = 2
"""What a lane of a fused training is taken to need where that is not traced, as on a GPU, by what the trial takes alone
(1.3 to 1.8 times where it was measured): all gradients of all lanes are there at once."""


@dataclass(frozen=True, slots=True)
class Need:
    """``memory`` None: all of a device, or nothing that is counted. ``shape`` is equal for trials that can be fused,
    ``kind`` for those that compute alike. ``lane`` is what it takes as one of several that are; None: not traced.
    ``note`` says why it was not estimated, where it should have been."""

    memory: int | None
    fit: Fit | None = None
    shape: str | None = None
    kind: str = ""
    steps: int | None = None
    lane: int | None = None
    note: str = ""

    @property
    def degree(self) -> int:
        return 1 if self.fit is None else self.fit.degree

    @property
    def seconds(self) -> float | None:
        """That the whole training should take, if that can be said."""
        step = None if self.fit is None else self.fit.seconds
        return None if step is None or self.steps is None else step * self.steps

    def of_lanes(self, lanes: int) -> int:
        """Bytes of a device that so many trials like it take as one; 0 where nothing is counted."""
        alone = self.memory or 0
        return alone if lanes == 1 else lanes * (alone * BESIDE if self.lane is None else self.lane)


def need(
    terms: Terms,
    params: Mapping[str, Value],
    memory: int | None,
    devices: int,
    kind: str,
    fuse: bool,
    after: After | None = None,
) -> Need:
    """Of a recipe's candidate: how it fits devices of a kind with so much memory, as a function of these alone; and of
    ``after``, how it was fitted when it took more than a device has. It is fused with none then.

    Raises TuneError, with the figures, for one that fits nowhere. What cannot be traced, such as a model whose shapes
    depend on data, gets all of a device as it is. A function needs what its study says.
    """
    if not isinstance(terms.objective, Recipe):
        return Need(memory)
    from weft.tune.setting import setting

    chosen = setting(terms.objective, params)
    if memory is None:
        return Need(None, None, _shape(chosen) if fuse else None, kind_of(params), chosen.steps)
    from weft.tune.fit import fit

    chosen.data()  # made once, here, where tensors are real
    try:
        found = fit(chosen, devices, memory, kind, after)
    except PlanError as problem:
        log.warning("a trial with %s has a device to itself, not estimated: %s", kind_of(params), problem)
        return Need(None, None, None, kind_of(params), chosen.steps, note=f"not estimated: {problem}")
    needed = min(_beyond(found.memory, kind), memory)
    # Lanes keep all that their forwards make: what recomputes, or lies on the host, is small only while it does.
    lane = after is None and found.way in ("whole", "accumulate") and found.memory <= memory * LANE
    shape = _shape(chosen) if fuse and lane else None
    each = None if shape is None or kind != "cpu" else _lane(chosen, found.micro_batch)
    return Need(needed, found, shape, kind_of(params), chosen.steps, None if each is None else _beyond(each, kind))


def _beyond(memory: int, kind: str) -> int:
    """With what a trial may take beyond its estimate."""
    return int(memory * (1 + BEYOND)) + (TINY if kind == "cpu" else SLACK)


def _lane(chosen: Setting, micro: int) -> int | None:
    from weft.tune.lanepeak import lane_peak

    return lane_peak(chosen, micro)


def _shape(chosen: Setting) -> str | None:
    from weft.tune.fusion import shape_key

    return shape_key(chosen)


def kind_of(params: Mapping[str, Value]) -> str:
    """Equal for candidates that compute alike and take the same memory: all but continuous choices.

    >>> kind_of({"width": 64, "lr": 0.1})
    '{"width": 64}'
    """
    return json.dumps({name: value for name, value in sorted(params.items()) if name not in CONTINUOUS})


def groups(needs: Mapping[int, Need], memory: int | None) -> list[tuple[int, ...]]:
    """Trials of one block that train as one, in order of number; as many at once as a device has room for.

    >>> groups({0: Need(4, shape="a"), 1: Need(4, shape="b"), 2: Need(4, shape="a"), 3: Need(4)}, 20)
    [(0, 2), (1,), (3,)]
    >>> groups({0: Need(6, shape="a"), 1: Need(6, shape="a")}, 20)
    [(0,), (1,)]
    """
    alike: dict[Any, list[int]] = {}
    for number, one in sorted(needs.items()):
        alike.setdefault(one.shape if one.shape is not None else number, []).append(number)
    found = []
    for numbers in alike.values():
        each = max(needs[number].of_lanes(2) for number in numbers)
        most = len(numbers) if memory is None or each == 0 else max(1, 2 * memory // each)
        found += [tuple(numbers[at : at + most]) for at in range(0, len(numbers), most)]
    return sorted(found)
