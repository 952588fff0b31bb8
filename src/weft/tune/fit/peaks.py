"""What a trial's step takes of a device at its peak, by the samples of a micro-batch, before anything runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from weft.data import Batch, Loader
from weft.engine.optimizer import fuses
from weft.errors import PlanError, WeftError
from weft.hardware.gpus import kernels
from weft.memory.estimate import Estimate, estimate
from weft.memory.replay import reserved_in_two_pools
from weft.memory.timeline import AllocationTimeline
from weft.memory.train_step import Step
from weft.nn.checkpointing import offloading, recompute
from weft.nn.fake import clear_polluted_caches
from weft.nn.state import evaluation_mode
from weft.tune.devices import GPU, expandable
from weft.tune.jobs import FitStrategy
from weft.tune.recipe import TrialConfig, resident
from weft.tune.training.cuda_graphs import MAX_MEMORY, can_capture

SCALARS = 4096
"""Bytes of losses, counts and the like on a CPU; a batch's numbers in the data set take 8 each beside."""

_log = logging.getLogger("weft.tune")
_last: list[tuple[TrialConfig, str, EvaluationMemory | None]] = []
"""The newest evaluation, since a candidate is tried with several strategies that are evaluated alike."""


def step_memory(config: TrialConfig, strategy: FitStrategy, device: str, *, accumulate: bool) -> StepMemory:
    """Of a trial's step on a kind of device (``cpu`` or a GPU's name).

    With ``accumulate`` it is of a step in several parts, where gradients are kept beside the activations of the next
    part. PlanError where the step cannot be traced.
    """
    device = device if device == "cpu" else _known(device)
    step = _step(config, strategy, 2 if accumulate else 1)
    found = _estimate(config, config.batch_size, step, device, recompute if strategy == "recompute" else False)
    evaluation = evaluation_memory(config, device)
    sample = sum(part.numel() * part.element_size() for part in example_batch(config, 1).values())
    waiting = config.batch_size * sample if evaluates_midway(config) else 0
    if device == "cpu":
        return _CpuStepMemory(found, 0, config.batch_size, sample, False, evaluation, waiting)
    graphs = strategy == "whole" and can_capture(config)
    waiting += left_by_backwards(found.timeline(config.batch_size)[0])
    return StepMemory(found, resident(config.data()), config.batch_size, sample, graphs, evaluation, waiting)


def evaluates_midway(config: TrialConfig) -> bool:
    """Whether the trial is evaluated before it ends, while its last batch is still in memory."""
    return config.report_every is not None and config.report_every < config.steps


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes and seconds by the samples of a micro-batch, as the device's caching allocator would reserve them.

    They include the whole batch, however it is cut, and all of a small data set.
    """

    estimate: Estimate
    data: int
    batch: int
    sample: int
    graphs: bool
    """Whether small steps are captured: a graph reads a copy of its micro-batch, and keeps its memory to itself."""
    evaluation: EvaluationMemory | None
    waiting: int
    """Bytes in use beside an evaluation: the batch of the last step, and what backwards leave."""

    @property
    def context(self) -> int:
        """What a process takes beside."""
        return self.estimate.context

    def bytes_at(self, samples: int) -> int:
        found = self.estimate.at(samples).reserved + self._beside(samples)
        evaluation, beside = self.evaluation, self.data + self.waiting
        if evaluation is not None:
            found = max(found, evaluation.bytes_at(samples) + beside)
        if not self.graphs or found > MAX_MEMORY:
            return found
        apart = reserved_in_two_pools(*self.estimate.timeline(samples)) + self._beside(samples)
        if evaluation is not None:
            apart = max(apart, evaluation.bytes_in_two_pools(samples) + beside)
        return max(found, apart) + samples * self.sample

    def fits(self, samples: int, room: int) -> bool:
        """Also where what is cached has to be given back for it, as it can be unless steps are captured."""
        needed, left = self.bytes_at(samples), room - self._beside(samples)
        if needed <= room or left <= 0 or (self.graphs and needed <= MAX_MEMORY):
            return needed <= room
        evaluated = self.evaluation is None or self.evaluation.fits(samples, room - self.data - self.waiting)
        return evaluated and self.estimate.at(samples).fits(left, context=False)

    def largest(self, room: int) -> int:
        """The largest number of samples that fits; 0 if none does."""
        most = 0
        for _ in range(2):  # what is counted of a micro-batch does not lie beside it as well
            left = room - self._beside(most)
            most = self.estimate.largest_batch(left, context=False, margin=0.0) if left > 0 else 0
        if self.evaluation is not None:
            most = self.evaluation.largest(most, room - self.data - self.waiting)
        if not most or not self.graphs or self.bytes_at(most) > MAX_MEMORY:
            return most
        return _largest(most, lambda samples: self.bytes_at(samples) <= room)

    def seconds(self, samples: int) -> float | None:
        return self.estimate.at(samples).seconds

    def _beside(self, samples: int) -> int:
        return self.data + max(0, self.batch - samples) * self.sample


class _CpuStepMemory(StepMemory):
    """On a CPU, bytes of the storages that are alive at once, as a trial's limit counts them."""

    def bytes_at(self, samples: int) -> int:
        # Between two steps, while the next batch is made, there are two batches; so there are in an evaluation.
        parts = self.estimate.parts
        between = parts["weights"] + parts["optimizer"] + 2 * self.batch * self.sample
        found = max(super().bytes_at(samples), between)
        if self.evaluation is not None:
            evaluated = min(samples, self.evaluation.most)
            found = max(found, parts["weights"] + parts["optimizer"] + 2 * evaluated * self.sample + self.waiting)
        return SCALARS + 8 * self.batch + found

    def fits(self, samples: int, room: int) -> bool:
        return self.bytes_at(samples) <= room

    def largest(self, room: int) -> int:
        return _largest(self.batch, lambda samples: self.bytes_at(samples) <= room)


class EvaluationMemory:
    """Bytes by the samples of a micro-batch; no batch is larger than the validation part."""

    def __init__(self, found: Estimate, most: int) -> None:
        self._found, self.most = found, most

    def bytes_at(self, samples: int) -> int:
        return self._at(samples).reserved

    def bytes_in_two_pools(self, samples: int) -> int:
        """Where steps are captured, with which evaluations share a pool of memory."""
        one = self._at(samples)
        return reserved_in_two_pools(*one.timeline(one.batch))

    def fits(self, samples: int, room: int) -> bool:
        return room > 0 and self._at(samples).fits(room, context=False)

    def largest(self, most: int, room: int) -> int:
        """The largest number of samples, up to ``most``, that fits."""
        return _largest(most, lambda samples: self.fits(samples, room))

    def _at(self, samples: int) -> Estimate:
        return self._found.at(min(samples, self.most))


def evaluation_memory(config: TrialConfig, device: str) -> EvaluationMemory | None:
    """Of an evaluation beside weights and optimizer. None where it cannot be traced: then it fails when it runs."""
    if not _last or _last[0][0] is not config or _last[0][1] != device:
        _last[:] = [(config, device, _trace_evaluation(config, device))]
    return _last[0][2]


def left_by_backwards(timeline: AllocationTimeline) -> int:
    """Bytes that libraries keep for the thread of backwards: they are in use during evaluations, too."""
    phase, kept = 0, dict[int, int]()
    for event in timeline.events:
        block = abs(event) - 1
        if event == 0:
            phase += 1
        elif event < 0:
            kept.pop(block, None)
        elif timeline.phases[phase] == "backward" and timeline.categories[block] == "workspaces":
            kept[block] = timeline.sizes[block]
    return sum(kept.values())


def _trace_evaluation(config: TrialConfig, device: str) -> EvaluationMemory | None:
    validation = config.data().validation
    most = config.batch_size if validation is None else min(config.batch_size, len(validation))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        with torch.no_grad(), evaluation_mode(model), config.autocast(torch.device("cpu")):
            config.scores().add(model(*config.enter(batch)), batch)
        # An update, for the state that is there the next time; with no more gradients than training has at once.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    try:
        found = _estimate(config, most, step, device)
    except WeftError as problem:
        _log.info("the evaluation of trials like %s is not estimated: %s", dict(config.params), problem)
        return None
    return EvaluationMemory(found, most)


def _estimate(config: TrialConfig, size: int, step: Step, device: str, again: Any = False) -> Estimate:
    """Of a trial's model with so many samples; ``again`` recomputes activations."""
    model, batch, optimizer = build_meta(config), example_batch(config, size), _optimizer(config)
    return estimate(
        model, batch, loss=config.loss, optimizer=optimizer, recompute=again, step=step, device=device,
        expandable=expandable(),
    )  # fmt: skip


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to ``most`` that fits, where all smaller ones do; 0 if none does."""
    if not most or fits(most):
        return most
    least = 0
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def _known(device: str) -> str:
    """The device if its constants are known, else one whose are."""
    try:
        return kernels(device).name
    except PlanError:
        _log.warning("the memory constants of '%s' are not known: those of %s are taken", device, GPU)
        return GPU


def _step(config: TrialConfig, strategy: FitStrategy, parts: int) -> Step:
    """What a trainer does in a step, on the CPU's fake tensors."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        for _ in range(parts):
            # What is offloaded is gone from the device, and made there again when the backward wants it.
            away = offloading(model, _shape, _empty) if strategy == "offload" else nullcontext()
            with away, config.autocast(torch.device("cpu")):
                loss = config.loss(model(*config.enter(batch)), batch)
            if parts > 1:
                loss = loss * 0.5
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _empty(stored: tuple[Any, ...]) -> Tensor:
    shape, strides, dtype = stored
    return torch.empty_strided(shape, strides, dtype=dtype)


def _optimizer(config: TrialConfig) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """As a trial's optimizer is made: one kernel for all parameters, where torch has it."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = config.optimizer
        if issubclass(made.cls, getattr(torch.optim, "Muon", ())):
            return torch.optim.AdamW(parameters, fused=True)  # Muon keeps less
        options = dict(made.options)
        if fuses(made.cls, options, parameters):
            options.setdefault("fused", True)
        return made.cls(parameters, **options)

    return make


# A trial's model with its loss, and batches, as estimates and the planner take them.


class LossModule(nn.Module):
    """Called with the entries of a batch in the order of ``names``, gives the loss."""

    def __init__(self, config: TrialConfig, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names, self._config = model, names, config

    def forward(self, *tensors: Tensor) -> Tensor:
        batch = dict(zip(self.names, tensors, strict=True))
        with self._config.autocast(tensors[0].device):
            return self._config.loss(self.model(*self._config.enter(batch)), batch)

    def tensors(self, batch: Batch) -> tuple[Tensor, ...]:
        """A batch as it is called with."""
        return tuple(batch[name] for name in self.names)


def example_batch(config: TrialConfig, size: int, device: str = "meta") -> Batch:
    """A batch of so many samples with the shapes and types of the trial's own, and no values of meaning."""
    batch = Loader(config.data().train, 1, config.seed).batch(0)
    return {name: torch.zeros((size, *part.shape[1:]), dtype=part.dtype, device=device) for name, part in batch.items()}


def build_meta(config: TrialConfig) -> nn.Module:
    """The trial's module for its shapes alone: without values where it can be built so."""
    try:
        with torch.device("meta"), clear_polluted_caches(config.model):
            made = config.bare()
        if not _is_lazy(made):
            return made
    except Exception as problem:  # it computes with its weights as it builds them
        _log.debug("the model is built with values: %s", problem)
    made = config.build()
    if _is_lazy(made):  # its shapes follow from a batch
        with torch.no_grad(), evaluation_mode(made):
            made(*config.enter(example_batch(config, 2, "cpu")))
    return made


def _is_lazy(module: nn.Module) -> bool:
    return any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers()))
