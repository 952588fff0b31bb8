"""The estimate: peak memory and time of a training step before anything runs, at any batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from weft.errors import PlanError
from weft.hardware.gpus import CPU, Kernels, kernels
from weft.hardware.machine import Machine
from weft.hardware.machine import machine as machine_of
from weft.memory.allocator import AllocatorConfig
from weft.memory.replay import PeakMemory, fits, replay
from weft.memory.timeline import AllocationTimeline, weighted_sum
from weft.memory.tracer import Work
from weft.memory.train_step import Loss, Step, StepSpec, StepTrace, trace
from weft.memory.workspaces import SLOTS, workspaces
from weft.nn.batch import batch_size
from weft.utils.units import format_bytes as shown
from weft.utils.units import parse_bytes

LARGEST_BATCH = 2**22
"""Larger batches are not tried."""
CHECKED_AT = (13, 5), (7, 3)
"""Batches at which a polynomial is checked against a trace: (factor, samples more), chosen to have few divisors."""


def estimate(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    inputs: Sequence[str] | None = None,
    optimizer: str | Callable[[list[nn.Parameter]], torch.optim.Optimizer] = "adamw",
    options: Mapping[str, Any] | None = None,
    dtype: str | torch.dtype = "float32",
    recompute: bool | Callable[[nn.Module], None] = False,
    accumulate: int = 1,
    step: Step | None = None,
    device: str | Kernels = "h200",
    machine: Machine | str | None = None,
    expandable: bool = False,
) -> Estimate:
    """What a training step of the model takes on the device, from shapes alone: nothing is computed or allocated.

    Model and batch may be on any device, ``meta`` too. The batch is a tensor, a tuple or a mapping, whose first
    dimensions count the samples, or a dataclass, which the model takes as a whole. A mapping's entries ``inputs`` are
    the model's arguments in order; without them, all but the targets (``label``, ``targets``, ``y``) if there is a
    ``loss``, which is called with the outputs and the batch, else all by name, and the loss is the output's own, or its
    mean. ``bfloat16`` is autocast. ``recompute`` keeps only the inputs of blocks (`recomputed_parts`); a function does
    it its own way to the model it is given. ``step(model, optimizer, batch)`` takes the place of the usual step, with
    ``torch.autocast("cpu", ...)`` where it casts. The optimizer is one of torch by name, or a function of the
    parameters. On ``cpu`` the estimate counts the bytes of all tensors that live at once.

    `PlanError` names what cannot be traced. While it works, operators of the whole process have other kernels: let no
    other thread compute on the CPU meanwhile. Tensors that the model's code keeps by ``functools.cache`` are forgotten
    afterwards, since there is no data in them; those that it keeps in a global variable are left there.
    """
    constants = device if isinstance(device, Kernels) else CPU if device == "cpu" else kernels(device)
    kind = str(dtype).removeprefix("torch.")
    taken = StepSpec(model, constants, loss, inputs, optimizer, options or {}, kind, recompute, accumulate, step)
    size, on_cpu = batch_size(batch), constants == CPU
    if machine is None and isinstance(device, str) and not on_cpu:
        machine = device.upper()
    estimator = _EstimateBuilder(taken, batch, size, AllocatorConfig(expandable=expandable, exact=on_cpu), machine)
    return estimator.estimate(size, estimator.traced(size))


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one training step that is not the first; sizes are in bytes.

    ``allocated`` and ``reserved`` are what ``torch.cuda.max_memory_allocated`` and ``max_memory_reserved`` will say,
    ``context`` what the process takes beside. ``phases`` are the peaks of forward, backward and optimizer, ``parts``
    and ``modules`` what the highest consists of. ``assumptions`` are values that the step read and tracing made up.
    """

    batch: int
    allocated: int
    reserved: int
    context: int
    phases: Mapping[str, int]
    parts: Mapping[str, int]
    modules: Mapping[str, Mapping[str, int]] = field(repr=False)
    seconds: float | None
    why: str
    """The reason where ``seconds`` is None."""
    assumptions: tuple[str, ...]
    _estimator: _EstimateBuilder = field(repr=False, compare=False)

    def at(self, batch: int) -> Estimate:
        """The estimate at another batch size, equal to one traced there.

        Where each block's size is a line or a parabola in the batch size (checked once at further sizes), no trace is
        needed; else one is made.
        """
        if batch < 1:
            raise PlanError(f"a batch has at least 1 sample, not {batch}")
        return self if batch == self.batch else self._estimator.at(batch)

    def timeline(self, batch: int) -> tuple[AllocationTimeline, AllocatorConfig]:
        """The allocations of a step with so many samples, and the allocator's config, to be replayed in another way."""
        return self._estimator.timeline(batch), self._estimator.config

    def fits(self, memory: float | str, *, context: bool = True) -> bool:
        """Whether the step runs on a device with so much memory (bytes, or text such as ``80GiB``), if the allocator
        releases its cache where it must. The context counts unless the memory is the allocator's alone."""
        return self._estimator.fits(self.batch, int(parse_bytes(memory, PlanError)) - context * self.context)

    def largest_batch(self, memory: float | str, *, context: bool = True, margin: float = 0.02) -> int:
        """The largest batch size that fits, with this share of the memory left over; 0 if none does. `PlanError` where
        larger batches make more blocks, not larger ones: to trace them all might take for ever."""
        room = int(parse_bytes(memory, PlanError) * (1 - margin)) - context * self.context
        low, high = 0, 1 if self._estimator.curve else self.batch  # a trace may want more than one sample
        while high <= LARGEST_BATCH and self._estimator.fits(high, room):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._estimator.fits(middle, room) else (low, middle)
        return low

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {shown(size)}" for name, size in self.parts.items() if size)
        return f"batch {self.batch}: {shown(self.allocated)} allocated, {shown(self.reserved)} reserved ({parts})"


@dataclass
class _EstimateBuilder:
    """Makes estimates at other batch sizes."""

    training: StepSpec
    batch: Any
    size: int
    config: AllocatorConfig
    machine: Machine | str | None
    traces: dict[int, StepTrace] = field(default_factory=dict)

    def traced(self, size: int) -> StepTrace:
        if size not in self.traces:
            self.traces[size] = trace(self.training, self.batch, self.size, size)
        return self.traces[size]

    def estimate(
        self, size: int, found: StepTrace, peaks: PeakMemory | None = None, work: Work | None = None
    ) -> Estimate:
        peaks = peaks or replay(found.timeline, self.config)
        seconds = self._seconds(work or found.work)
        sizes = (peaks.allocated, peaks.reserved, self.training.kernels.context)
        return Estimate(size, *sizes, peaks.phases, peaks.parts, peaks.modules, *seconds, found.assumptions, self)

    def timeline(self, size: int) -> AllocationTimeline:
        curve = None if size in self.traces else self.curve
        return self.traced(size).timeline if curve is None else curve.at(size)

    def at(self, size: int) -> Estimate:
        try:
            curve = self.curve
        except PlanError:  # such as of a step that makes more blocks for a larger batch
            curve = None
        if curve is None:
            return self.estimate(size, self.traced(size))
        traces = [self.traced(batch) for batch in curve.timelines]
        given, whole = lagrange_weights(tuple(curve.timelines), size)
        work = _between([trace.work for trace in traces], [share / whole for share in given])
        return self.estimate(size, traces[0], replay(curve.at(size), self.config), work)

    def fits(self, size: int, memory: int) -> bool:
        return memory > 0 and fits(self.timeline(size), memory, self.config)

    @cached_property
    def curve(self) -> BatchPolynomial | None:
        """The polynomial that holds for all batches; None if each has to be traced."""
        base = max(self.size, 2)
        while True:
            try:
                line = self._through(base, 2 * base)
                break
            except PlanError:
                # Small batches may meet other kernels than large ones do.
                base *= 2
                if base > 8 * max(self.size, 2):
                    raise
        third, there = self._first(base, *CHECKED_AT[0])
        if line.predicts(third, there):
            return line
        try:
            parabola = self._through(base, 2 * base, third)  # what is made of all pairs of samples, for example
        except PlanError:
            return None
        return parabola if parabola.predicts(*self._first(base, *CHECKED_AT[1])) else None

    def _through(self, *sizes: int) -> BatchPolynomial:
        return BatchPolynomial({size: self.traced(size).timeline for size in sizes}, self.training.kernels)

    def _first(self, base: int, times: int, more: int) -> tuple[int, AllocationTimeline]:
        """A batch far from the base, and the first step with it; a multiple of the base where others cannot be."""
        for size in (times * base + more, times * base):
            try:
                return size, trace(self.training, self.batch, self.size, size, steps=1).timeline
            except PlanError as error:
                problem = error
        raise problem

    def _seconds(self, work: Work) -> tuple[float | None, str]:
        if self.machine is None:
            return None, "no machine was given"
        try:
            machine = self.machine if isinstance(self.machine, Machine) else machine_of(self.machine)
            return step_seconds(work, machine), ""
        except PlanError as error:
            return None, str(error)


def step_seconds(work: Work, machine: Machine) -> float:
    """Seconds of the kernels one after the other by a roofline model, but no less than the host needs to launch them.

    `PlanError` where the machine has no peak for a dtype of the step."""
    busy, kernels = 0.0, 0
    for dtype, rows in work.items():
        name = dtype if dtype in ("float16", "bfloat16") else "float32"
        busy += float(machine.compute_seconds([r[0] for r in rows], [r[1] for r in rows], name).sum())
        kernels += len(rows)
    if not kernels:
        raise PlanError("the step has no kernel to time")
    return max(busy, kernels * machine.device.launch)


def _between(works: Sequence[Work], counts: Sequence[float]) -> Work:
    first, *others = works
    if any(len(rows) != len(other.get(name, ())) for name, rows in first.items() for other in others):
        return first

    def one(values: Sequence[float]) -> float:
        return max(0.0, sum(value * count for value, count in zip(values, counts, strict=True)))

    return {
        name: [
            (one([row[0] for row in rows]), one([row[1] for row in rows]))
            for rows in zip(*(work[name] for work in works), strict=True)
        ]
        for name in first
    }


# How a timeline depends on the batch size: polynomials through the timelines of a few batches.


@dataclass(frozen=True, slots=True)
class BatchPolynomial:
    """Timelines with the same blocks in the same order, by batch size. Between two of them each block's size is a
    straight line in the batch size, between three a parabola. Workspaces follow their rules from shapes that do so."""

    timelines: Mapping[int, AllocationTimeline]
    kernels: Kernels

    def __post_init__(self) -> None:
        (batch, first), *others = self.timelines.items()
        for other, timeline in others:
            alike = [call.name for call in first.calls] == [call.name for call in timeline.calls]
            if first.events != timeline.events or not alike:
                raise PlanError(
                    f"steps with batches of {batch} and {other} allocate in a different order "
                    f"({len(first)} and {len(timeline)} blocks): estimate each batch by itself"
                )

    def at(self, batch: int) -> AllocationTimeline:
        given, timelines = lagrange_weights(tuple(self.timelines), batch), list(self.timelines.values())
        sizes = [weighted_sum(each, *given) for each in zip(*(timeline.sizes for timeline in timelines), strict=True)]
        for calls in zip(*(timeline.calls for timeline in timelines), strict=True):
            args, result = weighted_sum([(call.args, call.result) for call in calls], *given)
            begin = calls[0].block
            sizes[begin : begin + SLOTS] = workspaces(calls[0].name, args, result, self.kernels)
        return replace(timelines[0], sizes=tuple(sizes))

    def predicts(self, batch: int, traced: AllocationTimeline) -> bool:
        """Whether a trace with this batch, which may be of the first step alone, has the blocks predicted here."""
        here = self.at(batch)
        made = max(place for place, event in enumerate(traced.events) if event >= 0) + 1
        return here.events[:made] == traced.events[:made] and here.sizes[: len(traced)] == traced.sizes


def lagrange_weights(batches: Sequence[int], batch: int) -> tuple[list[int], int]:
    """Numerators and the common denominator of Lagrange's weights at ``batch`` for values at ``batches``: whole
    numbers, so that the polynomial has no rounding error.

    >>> lagrange_weights((2, 4), 7)
    ([-3, 5], 2)
    """
    above = [math.prod(batch - other for other in batches if other != one) for one in batches]
    below = [math.prod(one - other for other in batches if other != one) for one in batches]
    whole = math.lcm(*below)
    return [up * (whole // down) for up, down in zip(above, below, strict=True)], whole
