"""The estimate: peak memory and time of a training step before anything runs, at any batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from weft.errors import PlanError
from weft.hardware.gpus import CPU, Kernels, kernels
from weft.hardware.machine import Machine
from weft.hardware.machine import machine as machine_of
from weft.memory.allocator import AllocatorConfig
from weft.memory.replay import Peaks, fits, replay
from weft.memory.roofline import Work, step_seconds
from weft.memory.tensor_shape import combined
from weft.memory.timeline import AllocationTimeline
from weft.memory.train_step import Loss, Step, Trace, Training, trace
from weft.memory.workspaces import SLOTS, workspaces
from weft.nn.fake import batch_size
from weft.utils.units import format_bytes as shown
from weft.utils.units import parse_bytes

MOST = 2**22
"""No batch above it is looked for."""
FAR = (13, 5), (7, 3)
"""Where a curve is compared with a trace: so many times the batch, and so many samples more, which few divide."""


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
    mean. ``bfloat16`` is autocast. ``recompute`` keeps only the inputs of blocks (`recompute.parts`); a function does
    it its own way to the model it is given. ``step(model, optimizer, batch)`` takes the place of the usual step, with
    ``torch.autocast("cpu", ...)`` where it casts. The optimizer is one of torch by name, or a function of the
    parameters. On ``cpu`` the estimate counts the bytes of all tensors that live at once.

    `PlanError` names what cannot be traced. While it works, operators of the whole process have other kernels: let no
    other thread compute on the CPU meanwhile. Tensors that the model's code keeps by ``functools.cache`` are forgotten
    afterwards, since there is no data in them; those that it keeps in a global variable are left there.
    """
    if isinstance(device, str):
        constants = CPU if device == "cpu" else kernels(device)
    else:
        constants = device
    taken = Training(
        model,
        constants,
        loss,
        inputs,
        optimizer,
        options or {},
        str(dtype).removeprefix("torch."),
        recompute,
        accumulate,
        step,
    )
    size = batch_size(batch)
    on_cpu = constants == CPU
    if machine is None and isinstance(device, str) and not on_cpu:
        machine = device.upper()
    source = _Source(taken, batch, size, AllocatorConfig(expandable=expandable, exact=on_cpu), machine)
    return source.estimate(size, source.traced(size))


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one training step that is not the first; sizes are in bytes.

    ``allocated`` and ``reserved`` are what ``torch.cuda.max_memory_allocated`` and ``max_memory_reserved`` will say,
    ``context`` what the process takes beside. ``phases`` are the peaks of forward, backward and optimizer, ``parts``
    and ``modules`` what the highest consists of. ``assumed`` are values that the step asked for and tracing made up.
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
    """Why there are no seconds."""
    assumed: tuple[str, ...]
    _source: _Source = field(repr=False, compare=False)

    def at(self, batch: int) -> Estimate:
        """The estimate at another batch size, the same as that of a trace there. None is needed where each block is a
        straight line in the size, or a parabola, which is looked at once at a third and a fourth; else one is made."""
        if batch < 1:
            raise PlanError(f"a batch has at least 1 sample, not {batch}")
        return self if batch == self.batch else self._source.at(batch)

    def tape(self, batch: int) -> tuple[AllocationTimeline, AllocatorConfig]:
        """What a step of so many samples takes and gives back, in order, and the rules of the allocator that it asks:
        for those who replay it another way."""
        return self._source.tape(batch), self._source.rules

    def fits(self, memory: float | str, *, context: bool = True) -> bool:
        """Whether it runs on a device with so much memory (bytes, or text such as ``80GiB``), which the allocator
        gives back what it caches for; the context counts unless the memory is the allocator's alone."""
        return self._source.fits(self.batch, _bytes(memory) - context * self.context)

    def largest_batch(self, memory: float | str, *, context: bool = True, margin: float = 0.02) -> int:
        """The largest batch size that fits, with this share of the memory left over; 0 if none does. `PlanError` where
        larger batches make more blocks, not larger ones: to trace them all might take for ever."""
        room = int(_bytes(memory) * (1 - margin)) - context * self.context
        low, high = 0, 1 if self._source.curve() else self.batch  # a trace may want more than one sample
        while high <= MOST and self._source.fits(high, room):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._source.fits(middle, room) else (low, middle)
        return low

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {shown(size)}" for name, size in self.parts.items() if size)
        return f"batch {self.batch}: {shown(self.allocated)} allocated, {shown(self.reserved)} reserved ({parts})"


@dataclass(slots=True)
class _Source:
    """Where estimates at other batch sizes come from."""

    training: Training
    batch: Any
    size: int
    rules: AllocatorConfig
    machine: Machine | str | None
    curves: list[BatchPolynomial | None] = field(default_factory=list)
    traces: dict[int, Trace] = field(default_factory=dict)

    def traced(self, size: int) -> Trace:
        if size not in self.traces:
            self.traces[size] = trace(self.training, self.batch, self.size, size)
        return self.traces[size]

    def estimate(self, size: int, found: Trace, peaks: Peaks | None = None, work: Work | None = None) -> Estimate:
        peaks = peaks or replay(found.tape, self.rules)
        seconds, why = self._seconds(work or found.work)
        own = self.training.kernels.context
        figures = (peaks.phases, peaks.parts, peaks.modules)
        return Estimate(size, peaks.allocated, peaks.reserved, own, *figures, seconds, why, found.assumed, self)

    def curve(self) -> BatchPolynomial | None:
        """What all batches lie on; None if each has to be traced by itself."""
        if not self.curves:
            self.curves.append(self._curve())
        return self.curves[0]

    def tape(self, size: int) -> AllocationTimeline:
        curve = None if size in self.traces else self.curve()
        return self.traced(size).tape if curve is None else curve.at(size)

    def at(self, size: int) -> Estimate:
        try:
            curve = self.curve()
        except PlanError:  # such as of a step that makes more blocks for a larger batch
            curve = None
        if curve is None:
            return self.estimate(size, self.traced(size))
        traces = [self.traced(batch) for batch in curve.tapes]
        given, whole = shares(tuple(curve.tapes), size)
        work = _between([trace.work for trace in traces], [share / whole for share in given])
        return self.estimate(size, traces[0], replay(curve.at(size), self.rules), work)

    def fits(self, size: int, memory: int) -> bool:
        return memory > 0 and fits(self.tape(size), memory, self.rules)

    def _curve(self) -> BatchPolynomial | None:
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
        (third, there), fourth = self._first(base, *FAR[0]), FAR[1]
        if line.meets(third, there):
            return line
        try:
            parabola = self._through(base, 2 * base, third)  # what is made of all pairs of samples, for example
        except PlanError:
            return None
        return parabola if parabola.meets(*self._first(base, *fourth)) else None

    def _through(self, *sizes: int) -> BatchPolynomial:
        return BatchPolynomial({size: self.traced(size).tape for size in sizes}, self.training.kernels)

    def _first(self, base: int, times: int, more: int) -> tuple[int, AllocationTimeline]:
        """A batch far from the base, and the first step with it; no more than a multiple where it must be one."""
        for size in (times * base + more, times * base):
            try:
                return size, trace(self.training, self.batch, self.size, size, steps=1).tape
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


def _bytes(memory: float | str) -> int:
    return int(parse_bytes(memory, PlanError))


# How a tape goes with the batch size: polynomials through the tapes of a few batches.


@dataclass(frozen=True, slots=True)
class BatchPolynomial:
    """Blocks of tapes with the same blocks in the same order, by batch: through two each size is a straight line in the
    batch size, through three a parabola. Workspaces follow their rules from shapes that are such curves."""

    tapes: Mapping[int, AllocationTimeline]
    kernels: Kernels

    def __post_init__(self) -> None:
        (batch, first), *others = self.tapes.items()
        for other, tape in others:
            alike = [call.name for call in first.calls] == [call.name for call in tape.calls]
            if first.order != tape.order or not alike:
                raise PlanError(
                    f"steps with batches of {batch} and {other} allocate in a different order "
                    f"({len(first)} and {len(tape)} blocks): estimate each batch by itself"
                )

    def at(self, batch: int) -> AllocationTimeline:
        given, tapes = shares(tuple(self.tapes), batch), list(self.tapes.values())
        sizes = [combined(each, *given) for each in zip(*(tape.sizes for tape in tapes), strict=True)]
        for calls in zip(*(tape.calls for tape in tapes), strict=True):
            args, result = combined([(call.args, call.result) for call in calls], *given)
            begin = calls[0].block
            sizes[begin : begin + SLOTS] = workspaces(calls[0].name, args, result, self.kernels)
        return replace(tapes[0], sizes=tuple(sizes))

    def meets(self, batch: int, traced: AllocationTimeline) -> bool:
        """Whether a trace with this batch, which may have the first step alone, gives the blocks that lie on it."""
        here = self.at(batch)
        made = max(place for place, event in enumerate(traced.order) if event >= 0) + 1
        return here.order[:made] == traced.order[:made] and here.sizes[: len(traced)] == traced.sizes


def shares(batches: Sequence[int], batch: int) -> tuple[list[int], int]:
    """By how much each of some values at these batches counts at another, and what that is a share of: whole numbers,
    so that a polynomial through the values has no error.

    >>> shares((2, 4), 7)
    ([-3, 5], 2)
    """
    above = [math.prod(batch - other for other in batches if other != one) for one in batches]
    below = [math.prod(one - other for other in batches if other != one) for one in batches]
    whole = math.lcm(*below)
    return [up * (whole // down) for up, down in zip(above, below, strict=True)], whole
