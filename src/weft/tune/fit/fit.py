"""How a candidate fits a device: whole, in micro-batches, recomputed, split over several, offloaded, or not at all.

A function of the candidate and of the device's kind and nominal memory: never of what happens to be free.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.engine.rng import HostSeeder
from weft.errors import PlanError, TuneError
from weft.nn.state import ExtraState, to_plain
from weft.tune.fit.peaks import LossModule, StepMemory, build_meta, evaluates_midway, example_batch, step_memory
from weft.tune.jobs import After, Fit, FitStrategy
from weft.tune.recipe import CONTINUOUS, TrialConfig
from weft.tune.training.cuda_graphs import can_capture
from weft.tune.training.trainer import batch_norm
from weft.utils.rng import get_rng_state
from weft.utils.units import format_bytes

CACHED = 512
"""Fits that are cached: trials of one shape are common, and a trace takes seconds."""
_cache: dict[Hashable, Fit | str] = {}
"""How it fits, or why that cannot be estimated."""

MARGIN = 0.02
"""The share of a device that is left free: the allocator gives back what it caches before it fails, and what is
allocated is known to one percent."""
_DESCRIPTIONS: dict[FitStrategy, str] = {
    "whole": "the whole batch",
    "accumulate": "in micro-batches",
    "recompute": "recomputing",
    "split": "split over {} devices",
    "offload": "with activations on the host",
}
_STRATEGIES: tuple[FitStrategy, ...] = ("whole", "recompute", "split", "offload")
PLAN_SECONDS = 20.0
"""Of a search for a plan."""


def fit(config: TrialConfig, devices: int, memory: int, device: str = "h200", after: After | None = None) -> Fit:
    """The first of these that fits one of so many devices with so much memory each: the whole batch; equal
    micro-batches, whose gradients add up to the batch's; the same with activations recomputed; a plan that splits the
    candidate over 2, 4, ... devices; activations in host memory.

    ``device`` is the kind: ``cpu``, or a GPU's name. ``after`` is what took more than a device has when it ran: then
    only what comes after it is looked at. TuneError with all the figures where none fits, PlanError where the step
    cannot be traced.
    """
    key = (memory_key(config), devices, memory, device, after)
    if key not in _cache:
        while len(_cache) >= CACHED:
            del _cache[next(iter(_cache))]
        try:
            _cache[key] = _FitSearch(config, devices, memory, device, after).first()
        except PlanError as problem:
            _cache[key] = str(problem)
    found = _cache[key]
    if isinstance(found, str):
        raise PlanError(found)
    return found


def memory_key(config: TrialConfig) -> Hashable:
    """All that a trial's memory depends on: of what only scales numbers, whether it is there at all."""
    params = {name: bool(value) if name in CONTINUOUS else value for name, value in config.params.items()}
    made = config.optimizer
    options = {name: bool(value) if name in CONTINUOUS else repr(value) for name, value in made.options.items()}
    return (
        config.model,
        id(config.source),
        config.loss,
        tuple(sorted(params.items())),
        (config.batch_size, config.precision, bool(config.dropout), config.microbatch_batchnorm, config.model_inputs),
        (can_capture(config), evaluates_midway(config), config.objectives),
        (made.cls, tuple(sorted(options.items()))),
    )


@dataclass(frozen=True, slots=True)
class _FitSearch:
    config: TrialConfig
    devices: int
    memory: int
    device: str
    after: After | None

    def first(self) -> Fit:
        tried: list[str] = []
        for strategy in self._untried(tried):
            found = self._split(tried) if strategy == "split" else self._on_one(strategy, tried)
            if found is not None:
                return found
        raise TuneError(
            f"the candidate fits nowhere, with {self.devices} {'device' if self.devices == 1 else 'devices'} of "
            f"{format_bytes(self.memory)}: {'; '.join(tried)}. Use a smaller model or batch, or larger devices"
        )

    def _untried(self, tried: list[str]) -> tuple[FitStrategy, ...]:
        """The strategies that did not run yet; a split is one of several, by its number of devices."""
        if self.after is None:
            return _STRATEGIES
        strategy, degree = self.after
        what = _DESCRIPTIONS[strategy].format(degree)
        tried.append(f"{what}, it took more than {format_bytes(self.memory)} when it ran")
        at = _STRATEGIES.index("whole" if strategy == "accumulate" else strategy)
        return _STRATEGIES[at if strategy == "split" else at + 1 :]

    def _on_one(self, strategy: FitStrategy, tried: list[str]) -> Fit | None:
        batch = self.config.batch_size
        once = step_memory(self.config, strategy, self.device, accumulate=False)
        room = int(self.memory * (1 - MARGIN)) - once.context
        if once.fits(batch, room):
            return self._fit(strategy, once, batch, room, tried)
        why = f"{_DESCRIPTIONS[strategy]}, {batch} samples, it takes {format_bytes(once.bytes_at(batch))}"
        if (norm := self._forbidding_norm()) is not None:
            tried.append(f"{why}, and batch norm '{norm}' forbids micro-batches")
            return None
        several = step_memory(self.config, strategy, self.device, accumulate=True)
        largest = min(several.largest(room), batch - 1)
        if largest < 1:
            tried.append(f"{why}, and {min(2, batch)} samples {format_bytes(several.bytes_at(min(2, batch)))}")
            return None
        tried.append(f"{why}, and at most {largest} samples fit")
        micro = math.ceil(batch / math.ceil(batch / largest))
        return self._fit(strategy, several, micro, room, tried)

    def _forbidding_norm(self) -> str | None:
        """The name of a batch norm that would see less in a micro-batch, where that was not asked for."""
        return None if self.config.microbatch_batchnorm else batch_norm(build_meta(self.config))

    def _fit(self, strategy: FitStrategy, found: StepMemory, micro: int, room: int, tried: list[str]) -> Fit:
        parts = math.ceil(self.config.batch_size / micro)
        needed, what = min(found.bytes_at(micro), room), _DESCRIPTIONS[strategy]
        takes = f"{format_bytes(needed)} of {format_bytes(self.memory)}"
        outcome = f"{what} takes {takes}" if parts == 1 else f"{what}, {parts} micro-batches of {micro} take {takes}"
        seconds = None if (step := found.seconds(micro)) is None else step * parts
        if strategy == "whole" and parts > 1:
            strategy = "accumulate"
        return Fit(strategy, micro, parts, 1, needed, seconds, "; ".join([*tried, outcome]))

    def _split(self, tried: list[str]) -> Fit | None:
        """The plan with the fewest devices that fits, if this machine has them."""
        if self.devices < 2:
            tried.append("there is no second device to split it with")
            return None
        if (name := state_outside_graph(self.config)) is not None:
            tried.append(f"it cannot be split: '{name}' of its model changes as it trains, and in a graph would not")
            return None
        # With data, as the processes that will run it capture it: without, casts and some operators are others.
        batch = example_batch(self.config, self.config.batch_size, "cpu")
        whole = LossModule(self.config, self.config.bare(), tuple(batch))
        degree, tensors = 2, whole.tensors(batch)
        if self.after is not None and self.after[0] == "split":
            degree = 2 * self.after[1]
        stand = get_rng_state()
        try:
            scale = self._scale(whole, tensors)
        except PlanError as problem:
            tried.append(f"it cannot be split: {problem}")
            return None
        if get_rng_state() != stand:
            tried.append(
                "it cannot be split: its model draws from Python's or NumPy's generator, and a graph would not"
            )
            return None
        norm = self._forbidding_norm()
        choices = {} if norm is None else {"microbatches": 1}
        while degree <= self.devices:
            try:
                made, needed = self._plan_within_memory(whole, tensors, degree, scale, **choices)
            except PlanError as problem:
                why = "" if norm is None else f", where batch norm '{norm}' forbids micro-batches"
                tried.append(f"over {degree} devices{why}: {problem}")
            else:
                why = "; ".join([*tried, f"split over {degree} devices it takes {format_bytes(needed)} of each"])
                parts = made.microbatches
                micro = self.config.batch_size // parts
                return Fit("split", micro, parts, degree, needed, made.cost.step_time, why, made.to_json())
            degree *= 2
        return None

    def _scale(self, whole: nn.Module, tensors: Any) -> float:
        """By how much the planner's figures, which know no workspaces, are below the estimate of one device."""
        alone = self._plan(whole, tensors, 1, 2**62, stages=1, microbatches=1, recompute=False)
        found = step_memory(self.config, "whole", self.device, accumulate=False)
        return max(1.0, (found.bytes_at(self.config.batch_size) + found.context) / float(alone.cost.memory))

    def _plan_within_memory(
        self, whole: nn.Module, tensors: Any, degree: int, scale: float, **choices: Any
    ) -> tuple[Any, int]:
        """A plan, and the bytes that it takes of each device."""
        for microbatches in (1, 2):
            room = (self.memory * (1 - MARGIN) - uncounted_gradients(whole, degree, microbatches)) / scale
            made = self._plan(whole, tensors, degree, max(1, int(room)), **choices)
            if made.microbatches <= microbatches:
                break
        return made, int(made.cost.memory * scale) + uncounted_gradients(whole, degree, made.microbatches)

    def _plan(self, whole: nn.Module, tensors: Any, degree: int, memory: int, **choices: Any) -> Any:
        from weft.plan.planner import plan

        made = plan(
            whole,
            tensors,
            "cpu" if self.device == "cpu" else "h200",
            devices=degree,
            memory=memory,
            optimizer=self.config.optimizer.cls.__name__.lower(),
            dtype={"fp32": "float32", "bf16": "bfloat16"}[self.config.precision],
            compare=False,
            time_limit=PLAN_SECONDS,
            **choices,
        )
        if reasons := made.unsupported():
            raise PlanError(f"the plan cannot be run: {reasons[0]}")
        return made


def uncounted_gradients(model: nn.Module, devices: int, microbatches: int) -> int:
    """Bytes of gradients of a device, at the peak of a split step, that the planner does not count: the largest one as
    it travels, and with several micro-batches the sums so far of its share, beside the gradients that are added."""
    sizes = [parameter.nbytes for parameter in model.parameters()]
    return max(sizes) + (sum(sizes) // devices if microbatches > 1 else 0)


def state_outside_graph(config: TrialConfig) -> str | None:
    """The name of an attribute or extra state that every forward in training changes, such as a counter; None if there
    is none. A graph has it as it was when the graph was made.

    It is what the second of two forwards of two samples changes: what the first alone does is a cache that it fills. A
    model that cannot take two samples is not looked at.
    """
    model, batch = config.bare(), example_batch(config, min(2, config.batch_size), "cpu")
    seeder = HostSeeder(config.seed, torch.device("cpu"))
    with suppress(Exception), seeder.preserved():
        model(*config.enter(batch))
        remainder, extra = ExtraState(model), _extra(model)
        model(*config.enter(batch))
        now = _extra(model)
        changed = [*remainder.changed(model)[1], *(name for name in now if now[name] != extra.get(name))]
        return next(iter(changed), None)
    return None


def _extra(model: nn.Module) -> dict[str, tuple[str, list[Any]]]:
    """Extra states as text, with the numbers of their tensors."""
    found = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            tensors: dict[str, Tensor] = {}
            text = json.dumps(to_plain(value, tensors, ""))
            found[name] = text, [tensor.tolist() for tensor in tensors.values()]
    return found
