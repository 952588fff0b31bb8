"""How a candidate fits a device: whole, in smaller micro-batches, recomputing, split over several, or not at all.

A function of the candidate and of the device's kind and nominal memory: never of what happens to be free.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import nn

from weft.errors import PlanError, TuneError
from weft.tune.captured import capturable
from weft.tune.complete import Complete, example, shaped
from weft.tune.drawing import standing
from weft.tune.job import After, Fit, Way
from weft.tune.outside import kept_outside
from weft.tune.peaks import Peaks, paused, peaks
from weft.tune.recipe import CONTINUOUS
from weft.tune.setting import Setting
from weft.tune.training import batch_norm
from weft.units import size

KNOWN = 512
"""Fits that are remembered: trials of one shape are common, and a trace takes seconds."""
_known: dict[Hashable, Fit | str] = {}
"""How it fits, or why that cannot be estimated."""

MARGIN = 0.02
"""The share of a device that is left free: the allocator gives back what it caches before it fails, and what is
allocated is known to one percent."""
AT_ONCE = 2
"""Gradients of the largest parameter, whole, that a split step holds for a while beside what the planner counts: as it
comes out, and as it travels."""
_WORDS: dict[Way, str] = {
    "whole": "the whole batch",
    "accumulate": "in micro-batches",
    "recompute": "recomputing",
    "split": "split over {} devices",
    "offload": "with activations on the host",
}
_ORDER: tuple[Way, ...] = ("whole", "recompute", "split", "offload")
SECONDS = 20.0
"""Of a search for a plan."""


def fit(setting: Setting, devices: int, memory: int, device: str = "h200", after: After | None = None) -> Fit:
    """The first of these that fits one of so many devices with so much memory each: the whole batch; equal
    micro-batches, whose gradients add up to the batch's; the same with activations recomputed; a plan that splits the
    candidate over 2, 4, ... devices; activations in host memory.

    ``device`` is the kind: ``cpu``, or a GPU's name. ``after`` is what took more than a device has when it ran: then
    only what comes after it is looked at. TuneError with all the figures where none fits, PlanError where the step
    cannot be traced.
    """
    key = (likeness(setting), devices, memory, device, after)
    if key not in _known:
        while len(_known) >= KNOWN:
            del _known[next(iter(_known))]
        try:
            _known[key] = _Fitting(setting, devices, memory, device, after).first()
        except PlanError as problem:
            _known[key] = str(problem)
    found = _known[key]
    if isinstance(found, str):
        raise PlanError(found)
    return found


def likeness(setting: Setting) -> Hashable:
    """All that a trial's memory depends on: of what only scales numbers, whether it is there at all."""
    params = {name: bool(value) if name in CONTINUOUS else value for name, value in setting.params.items()}
    made = setting.optimizer
    options = {name: bool(value) if name in CONTINUOUS else repr(value) for name, value in made.options.items()}
    return (
        setting.model,
        id(setting.source),
        setting.loss,
        tuple(sorted(params.items())),
        (setting.batch_size, setting.precision, bool(setting.dropout), setting.accumulate_norms, setting.inputs),
        (capturable(setting), paused(setting), setting.objectives),
        (made.cls, tuple(sorted(options.items()))),
    )


@dataclass(frozen=True, slots=True)
class _Fitting:
    setting: Setting
    devices: int
    memory: int
    device: str
    after: After | None

    def first(self) -> Fit:
        tried: list[str] = []
        for way in self._left(tried):
            found = self._split(tried) if way == "split" else self._on_one(way, tried)
            if found is not None:
                return found
        raise TuneError(
            f"the candidate fits nowhere, with {self.devices} {'device' if self.devices == 1 else 'devices'} of "
            f"{size(self.memory)}: {'; '.join(tried)}. Use a smaller model or batch, or larger devices"
        )

    def _left(self, tried: list[str]) -> tuple[Way, ...]:
        """The ways that were not tried in earnest; a split is one of several, by its number of devices."""
        if self.after is None:
            return _ORDER
        way, degree = self.after
        tried.append(f"{_WORDS[way].format(degree)}, it took more than {size(self.memory)} when it ran")
        at = _ORDER.index("whole" if way == "accumulate" else way)
        return _ORDER[at if way == "split" else at + 1 :]

    def _on_one(self, way: Way, tried: list[str]) -> Fit | None:
        batch = self.setting.batch_size
        once = peaks(self.setting, way, self.device, accumulate=False)
        room = int(self.memory * (1 - MARGIN)) - once.context
        what = _WORDS[way]
        needed = once.at(batch)
        if once.fits(batch, room):
            return self._fit(way, once, batch, min(needed, room), tried, what)
        why = f"{what}, {batch} samples, it takes {size(needed)}"
        if (norm := self._forbidding()) is not None:
            tried.append(f"{why}, and batch norm '{norm}' forbids micro-batches")
            return None
        several = peaks(self.setting, way, self.device, accumulate=True)
        largest = min(several.largest(room), batch - 1)
        if largest < 1:
            tried.append(f"{why}, and {min(2, batch)} samples {size(several.at(min(2, batch)))}")
            return None
        tried.append(f"{why}, and at most {largest} samples fit")
        micro = math.ceil(batch / math.ceil(batch / largest))
        return self._fit(
            "accumulate" if way == "whole" else way, several, micro, min(several.at(micro), room), tried, what
        )

    def _forbidding(self) -> str | None:
        """The name of a batch norm that would see less in a micro-batch, where that was not asked for."""
        return None if self.setting.accumulate_norms else batch_norm(shaped(self.setting))

    def _fit(self, way: Way, found: Peaks, micro: int, needed: int, tried: list[str], what: str) -> Fit:
        parts = math.ceil(self.setting.batch_size / micro)
        takes = f"{size(needed)} of {size(self.memory)}"
        told = f"{what} takes {takes}" if parts == 1 else f"{what}, {parts} micro-batches of {micro} take {takes}"
        seconds = found.seconds(micro)
        return Fit(
            way,
            micro,
            parts,
            1,
            needed,
            None if seconds is None else seconds * parts,
            "; ".join([*tried, told]),
        )

    def _split(self, tried: list[str]) -> Fit | None:
        """The plan with the fewest devices that fits, if this machine has them."""
        if self.devices < 2:
            tried.append("there is no second device to split it with")
            return None
        if (name := kept_outside(self.setting)) is not None:
            tried.append(f"it cannot be split: '{name}' of its model changes as it trains, and in a graph would not")
            return None
        # With data, as the processes that will run it capture it: without, casts and some operators are others.
        batch = example(self.setting, self.setting.batch_size, "cpu")
        whole = Complete(self.setting, self.setting.bare(), tuple(batch))
        degree, tensors = 2, whole.tensors(batch)
        if self.after is not None and self.after[0] == "split":
            degree = 2 * self.after[1]
        stand = standing()
        try:
            scale = self._scale(whole, tensors)
        except PlanError as problem:
            tried.append(f"it cannot be split: {problem}")
            return None
        if standing() != stand:
            tried.append(
                "it cannot be split: its model draws from Python's or NumPy's generator, and a graph would not"
            )
            return None
        beside = AT_ONCE * max(parameter.nbytes for parameter in whole.parameters())
        room = max(1, int((self.memory * (1 - MARGIN) - beside) / scale))
        norm = self._forbidding()
        choices = {} if norm is None else {"microbatches": 1}
        while degree <= self.devices:
            try:
                made = self._plan(whole, tensors, degree, room, **choices)
            except PlanError as problem:
                why = "" if norm is None else f", where batch norm '{norm}' forbids micro-batches"
                tried.append(f"over {degree} devices{why}: {problem}")
            else:
                needed = int(made.cost.memory * scale) + beside
                told = f"split over {degree} devices it takes {size(needed)} of each"
                parts = made.microbatches
                micro = self.setting.batch_size // parts
                why = "; ".join([*tried, told])
                return Fit("split", micro, parts, degree, needed, made.cost.step, why, made.to_json())
            degree *= 2
        return None

    def _scale(self, whole: nn.Module, tensors: Any) -> float:
        """By how much the planner's figures, which know no workspaces, are below the estimate of one device."""
        alone = self._plan(whole, tensors, 1, 2**62, stages=1, microbatches=1, recompute=False)
        found = peaks(self.setting, "whole", self.device, accumulate=False)
        return max(1.0, (found.at(self.setting.batch_size) + found.context) / float(alone.cost.memory))

    def _plan(self, whole: nn.Module, tensors: Any, degree: int, memory: int, **choices: Any) -> Any:
        from weft.plan.planner import plan

        made = plan(
            whole,
            tensors,
            "cpu" if self.device == "cpu" else "h200",
            devices=degree,
            memory=memory,
            optimizer=self.setting.optimizer.cls.__name__.lower(),
            dtype={"fp32": "float32", "bf16": "bfloat16"}[self.setting.precision],
            compare=False,
            seconds=SECONDS,
            **choices,
        )
        if reasons := made.reasons():
            raise PlanError(f"the plan cannot be run: {reasons[0]}")
        return made
