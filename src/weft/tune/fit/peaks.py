"""What a trial's step takes of a device at its peak, by the samples of a micro-batch, before anything runs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.data import Batch
from weft.engine.optimizer import fuses
from weft.errors import PlanError, WeftError
from weft.hardware.gpus import kernels
from weft.memory.estimate import Estimate, estimate
from weft.memory.timeline import AllocationTimeline
from weft.nn.fake import clear_polluted_caches, fake_model
from weft.tune.devices import expandable
from weft.tune.fit.fake_step import FakeStorages
from weft.tune.fit.loss_model import build_meta, build_with_data, example_batch
from weft.tune.jobs import Way
from weft.tune.recipe import TrialConfig, resident
from weft.tune.training.activation_checkpointing import recompute
from weft.tune.training.cuda_graphs import SMALL, capturable, reserved_apart
from weft.tune.training.evaluation import evaluation_mode, scores
from weft.utils.live_memory import LiveStorages

GENEROUS = "h200"
"""Whose constants are taken for a GPU that has none: the largest workspaces that are known."""

SCALARS = 4096
"""Bytes of losses, counts and the like; a batch's numbers in the data set take 8 each beside."""

_log = logging.getLogger("weft.tune")
Step = Callable[[nn.Module, torch.optim.Optimizer, Any], None]


class StepMemory(Protocol):
    """Bytes and seconds by the samples of a micro-batch; ``context`` is what a process takes beside."""

    @property
    def context(self) -> int: ...
    def at(self, samples: int) -> int: ...
    def fits(self, samples: int, room: int) -> bool: ...
    def largest(self, room: int) -> int: ...
    def seconds(self, samples: int) -> float | None: ...


def step_memory(setting: TrialConfig, way: Way, device: str, *, accumulate: bool) -> StepMemory:
    """Of a trial's step on a kind of device (``cpu`` or a GPU's name); with ``accumulate`` of one in several parts,
    where gradients lie beside the activations of the next part. PlanError where the step cannot be traced."""
    if device == "cpu":
        return _Counted(setting, way, 2 if accumulate else 1)
    model, batch = build_meta(setting), example_batch(setting, setting.batch_size)
    found = estimate(
        model,
        batch,
        optimizer=_optimizer(setting),
        recompute=recompute if way == "recompute" else False,
        step=_step(setting, way, 2 if accumulate else 1),
        device=known(device),
        expandable=expandable(),
    )
    graphs = way == "whole" and capturable(setting)
    judged = judging(setting, _optimizer(setting), known(device))
    sizes = (resident(setting.data()), setting.batch_size, _sample(batch))
    waiting = setting.batch_size * _sample(batch) if paused(setting) else 0
    return _Estimated(found, *sizes, graphs, judged, waiting + left_by_backwards(found.timeline(setting.batch_size)[0]))


def paused(setting: TrialConfig) -> bool:
    """Whether the trial is judged before it ends, while its last batch lies there."""
    return setting.report_every is not None and setting.report_every < setting.steps


def known(device: str) -> str:
    """The device if its constants are known, else one whose are."""
    try:
        return kernels(device).name
    except PlanError:
        _log.warning("the memory constants of '%s' are not known: those of %s are taken", device, GENEROUS)
        return GENEROUS


@dataclass(frozen=True, slots=True)
class _Estimated:
    """On a GPU, as its caching allocator would reserve it, with the data that lies there: the whole batch, however it
    is cut, and all of a small data set."""

    estimate: Estimate
    data: int
    batch: int
    sample: int
    graphs: bool = False
    """Whether its steps are captured where they are small: a graph reads a copy of its micro-batch, and keeps its
    memory to itself."""
    judging: EvaluationMemory | None = None
    waiting: int = 0
    """Bytes that lie there while the trial is judged: its batch, and what backwards leave."""

    @property
    def context(self) -> int:
        return self.estimate.context

    def at(self, samples: int) -> int:
        found = self.estimate.at(samples).reserved + self._beside(samples)
        judged, beside = self.judging, self.data + self.waiting
        if judged is not None:
            found = max(found, judged.at(samples) + beside)
        if not self.graphs or found > SMALL:
            return found
        apart = reserved_apart(*self.estimate.timeline(samples)) + self._beside(samples)
        if judged is not None:
            apart = max(apart, judged.apart(samples) + beside)
        return max(found, apart) + samples * self.sample

    def fits(self, samples: int, room: int) -> bool:
        """Also where what is cached has to be given back for it, as it can be unless steps are captured."""
        needed, left = self.at(samples), room - self._beside(samples)
        if needed <= room or left <= 0 or (self.graphs and needed <= SMALL):
            return needed <= room
        judged = self.judging is None or self.judging.fits(samples, room - self.data - self.waiting)
        return judged and self.estimate.at(samples).fits(left, context=False)

    def largest(self, room: int) -> int:
        most = 0
        for _ in range(2):  # what is counted of a micro-batch does not lie beside it as well
            left = room - self._beside(most)
            most = self.estimate.largest_batch(left, context=False, margin=0.0) if left > 0 else 0
        if self.judging is not None:
            most = self.judging.largest(most, room - self.data - self.waiting)
        if not most or not self.graphs or self.at(most) > SMALL:
            return most
        least, beyond = 0, most + 1
        while beyond - least > 1:
            middle = (least + beyond) // 2
            least, beyond = (middle, beyond) if self.at(middle) <= room else (least, middle)
        return least

    def seconds(self, samples: int) -> float | None:
        return self.estimate.at(samples).seconds

    def _beside(self, samples: int) -> int:
        return self.data + max(0, self.batch - samples) * self.sample


@dataclass(slots=True)
class _Counted:
    """On a CPU, the storages that are alive at once, as a cap counts them."""

    setting: TrialConfig
    way: Way
    parts: int
    context: int = 0
    _known: dict[int, int] = field(default_factory=dict)
    _valued: nn.Module | None = None

    def at(self, samples: int) -> int:
        if samples not in self._known:
            self._known[samples] = self._traced(samples)
        return self._known[samples]

    def fits(self, samples: int, room: int) -> bool:
        return self.at(samples) <= room

    def largest(self, room: int) -> int:
        low, high = 0, self.setting.batch_size + 1
        few, many = min(2, high - 1), high - 1
        slope = (self.at(many) - self.at(few)) / max(many - few, 1)
        # Peaks lie on a line but for small batches: look where it says, and one further, before halving.
        looks = [few + int((room - self.at(few)) / slope) + further for further in (0, 1)] if slope > 0 else []
        while high - low > 1:
            look = looks.pop(0) if looks else (low + high) // 2
            if low < look < high:
                low, high = (look, high) if self.at(look) <= room else (low, look)
        return low

    def seconds(self, samples: int) -> float | None:
        return None

    def _traced(self, samples: int) -> int:
        setting, size = self.setting, self.setting.batch_size
        like, data = example_batch(setting, samples), setting.data()  # out here, where the data set is real
        seen = samples if data.validation is None else min(samples, len(data.validation))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        model = self._fake(mode)
        with mode, clear_polluted_caches(model, setting.loss):
            if self.way == "recompute":
                recompute(model)
            optimizer = _optimizer(setting)([p for p in model.parameters() if p.requires_grad])
            try:
                kept, peak = self._steps(model, optimizer, _empty(like, samples))
            except ValueError as problem:  # such as a batch norm's of a single sample
                if samples < size:
                    return sys.maxsize
                raise _untraceable(problem) from problem
            except Exception as problem:
                raise problem if isinstance(problem, WeftError) else _untraceable(problem) from problem
            judging = self._judging(model, optimizer, kept, _empty(like, seen))
            with LiveStorages(kept) as between:
                pass
        # The whole batch lies there, however it is cut; between two steps, while the next is made, two of them do. So
        # do two of those that a trial is judged by, which goes on with its own afterwards.
        sample = _sample(like)
        beside = size * sample if paused(setting) else 0
        peaks = (
            peak + (size - samples) * sample,
            int(between.now) + 2 * size * sample,
            int(between.now) + 2 * seen * sample + beside,
            judging + beside,
        )
        return SCALARS + 8 * size + max(peaks)

    def _steps(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> tuple[list[Tensor], int]:
        """What lasts from step to step, and the most that is there during the second."""
        step = _step(self.setting, self.way, self.parts)
        with FakeStorages(optimizer):
            step(model, optimizer, batch)  # from here on the optimizer has its state
        states = [value for state in optimizer.state.values() for value in state.values()]
        kept = [*model.parameters(), *model.buffers(), *(value for value in states if isinstance(value, Tensor))]
        with FakeStorages(optimizer, [*kept, *batch.values()]) as live:
            step(model, optimizer, batch)
        return kept, int(live.peak)

    def _judging(self, model: nn.Module, optimizer: torch.optim.Optimizer, kept: list[Tensor], batch: Batch) -> int:
        """The most that is there while the trial is judged; what fails then, fails when it runs."""
        setting, live = self.setting, FakeStorages(optimizer, [*kept, *batch.values()])
        with live, suppress(Exception), torch.no_grad(), evaluation_mode(model), setting.autocast(torch.device("cpu")):
            scores(setting).add(model(*setting.enter(batch)), batch)
        return int(live.peak)

    def _fake(self, mode: FakeTensorMode) -> nn.Module:
        """The module in fake tensors; one that reads values while it is built is built with them, once."""
        if self._valued is None:
            try:
                with mode, clear_polluted_caches(self.setting.model):
                    return self.setting.bare()
            except Exception:
                self._valued = build_with_data(self.setting)  # whose failure is the trial's
        with mode:
            return fake_model(self._valued)


def _empty(like: Batch, samples: int) -> Batch:
    return {name: torch.empty((samples, *part.shape[1:]), dtype=part.dtype) for name, part in like.items()}


def _untraceable(problem: Exception) -> PlanError:
    said = str(problem).partition("\n")[0][:300]
    return PlanError(f"the step cannot be traced without data: {type(problem).__name__}: {said}")


def _sample(batch: Batch) -> int:
    """Bytes of one sample."""
    return sum(part[0].numel() * part.element_size() for part in batch.values())


def _step(setting: TrialConfig, way: Way, parts: int) -> Step:
    """What ``training`` does in a step, on the CPU's fake tensors."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        for _ in range(parts):
            with _elsewhere(model) if way == "offload" else nullcontext(), setting.autocast(torch.device("cpu")):
                loss = setting.loss(model(*setting.enter(batch)), batch)
            if parts > 1:
                loss = loss * 0.5
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _optimizer(setting: TrialConfig) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """As a trial's optimizer is made: one kernel for all parameters, where torch has it."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = setting.optimizer
        if issubclass(made.cls, getattr(torch.optim, "Muon", ())):
            return torch.optim.AdamW(parameters, fused=True)  # Muon keeps less
        options = dict(made.options)
        if fuses(made.cls, options, parameters):
            options.setdefault("fused", True)
        return made.cls(parameters, **options)

    return make


def _elsewhere(model: nn.Module) -> AbstractContextManager[Any]:
    """Within the block, what forwards keep is gone from the device, and made there again when the backward wants it."""
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}

    def pack(tensor: Tensor) -> Any:
        if tensor.untyped_storage()._cdata in own:
            return tensor
        return tuple(tensor.shape), tensor.stride(), tensor.dtype

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        shape, strides, dtype = packed
        return torch.empty_strided(shape, strides, dtype=dtype)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


# What a trial takes of a GPU while it is judged, before anything runs: an evaluation beside weights and optimizer.
_last: list[tuple[TrialConfig, str, EvaluationMemory | None]] = []
"""The newest, since a candidate is looked at in several ways that are judged alike."""


class EvaluationMemory:
    """Bytes by the samples of a micro-batch; no batch is larger than what a trial is judged by."""

    def __init__(self, found: Estimate, most: int) -> None:
        self._found, self._most = found, most

    def at(self, samples: int) -> int:
        return self._at(samples).reserved

    def apart(self, samples: int) -> int:
        """Where steps are captured, with which judging shares a pool of memory."""
        one = self._at(samples)
        return reserved_apart(*one.timeline(one.batch))

    def fits(self, samples: int, room: int) -> bool:
        return room > 0 and self._at(samples).fits(room, context=False)

    def largest(self, most: int, room: int) -> int:
        """The largest number of samples, up to ``most``, that fits."""
        if not most or self.fits(most, room):
            return most
        least = 0
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if self.fits(middle, room) else (least, middle)
        return least

    def _at(self, samples: int) -> Estimate:
        return self._found.at(min(samples, self._most))


def judging(
    setting: TrialConfig, optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer], device: str
) -> EvaluationMemory | None:
    """None where it cannot be traced: what fails then, fails when it runs."""
    if not _last or _last[0][0] is not setting or _last[0][1] != device:
        _last[:] = [(setting, device, _traced(setting, optimizer, device))]
    return _last[0][2]


def left_by_backwards(tape: AllocationTimeline) -> int:
    """Bytes that libraries keep for the thread of backwards: they lie there while a trial is judged, too."""
    phase, kept = 0, dict[int, int]()
    for event in tape.events:
        block = abs(event) - 1
        if event == 0:
            phase += 1
        elif event < 0:
            kept.pop(block, None)
        elif tape.phases[phase] == "backward" and tape.categories[block] == "workspaces":
            kept[block] = tape.sizes[block]
    return sum(kept.values())


def _traced(setting: TrialConfig, optimizer: Any, device: str) -> EvaluationMemory | None:
    validation = setting.data().validation
    most = setting.batch_size if validation is None else min(setting.batch_size, len(validation))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        with torch.no_grad(), evaluation_mode(model), setting.autocast(torch.device("cpu")):
            scores(setting).add(model(*setting.enter(batch)), batch)
        # An update, for the state that lies there the next time; with no more gradients than training has at once.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    try:
        found = estimate(
            build_meta(setting), example_batch(setting, most), optimizer=optimizer, step=step, device=device,
            expandable=expandable(),
        )  # fmt: skip
    except WeftError as problem:
        _log.info("judging trials like %s is not estimated: %s", dict(setting.params), problem)
        return None
    return EvaluationMemory(found, most)
