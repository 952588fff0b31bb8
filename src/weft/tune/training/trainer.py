"""The training of one trial on one device: a plain loop whose result is a function of its config and its fit alone."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from weft.data import Batch, Data, Loader, Source
from weft.engine.optimizer import LayerOptimizer
from weft.engine.rng import HostSeeder, deterministic
from weft.errors import TuneError
from weft.nn.checkpointing import offloading, recompute
from weft.nn.state import ExtraState, restore
from weft.tune.jobs import Fit
from weft.tune.recipe import TrialConfig, resident
from weft.tune.training.checkpoint import TrialCheckpoint, load_latest, save
from weft.tune.training.cuda_graphs import Gradients, GraphedStep, GraphRecorder, can_capture, capture_stream
from weft.tune.training.loss_check import require_mean_loss
from weft.tune.training.memory_limit import MemoryLimit, OutOfMemory

Ran = TypeVar("Ran")
Report = Callable[[int, tuple[float, ...]], bool]
"""Takes the number of steps done and the value of each objective; says whether the trial is to end here."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a trial."""

    values: tuple[float, ...]
    """Of the objectives, in order, on the validation part at the end."""
    peak: int | None
    """Bytes of the device that it took at its peak, as the allocator reserved them; None where it was not counted."""
    seconds: float
    losses: tuple[float, ...]
    """Of the training steps."""


class Pruned(Exception):
    """Raised where a trial has to end early, with its ``result`` so far where that is known."""

    def __init__(self, result: Result | None = None) -> None:
        super().__init__("pruned")
        self.result = result


def train(
    config: TrialConfig,
    fit: Fit | None,
    *,
    device: torch.device | str,
    memory: int | None = None,
    directory: Path,
    report: Report,
) -> Result:
    """Trains a trial to its end, from the newest checkpoint in its directory if there is one.

    ``fit`` None takes whole batches. ``report`` is called every so many steps, as the recipe says, and at the end, when
    its answer is no longer of interest; what was reported since the checkpoint is reported again, the same. Raises
    Pruned, OutOfMemory where the trial wants more than ``memory`` bytes or the device has no more, and TuneError.
    """
    if fit is not None and fit.devices > 1:
        raise TuneError(f"a trial that is split over {fit.devices} devices cannot be trained on one")
    limit = MemoryLimit(torch.device(device), memory)
    return run_limited(limit, lambda: TrialTrainer(config, fit, limit, directory).run(report), config.cuda_graphs)


def run_limited(limit: MemoryLimit, run: Callable[[], Ran], cuda_graphs: bool = False) -> Ran:
    """What ``run`` returns, on the limit's device with deterministic kernels, and with ``cuda_graphs`` on the stream
    that can be captured. OutOfMemory where it wants more than the limit, TuneError for what weft can explain."""
    device = limit.device
    try:
        with ExitStack() as stack:
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
            stack.enter_context(deterministic(device))
            if cuda_graphs and device.type == "cuda":
                stack.enter_context(capture_stream(device))
            stack.enter_context(limit)
            return run()
    except Exception as problem:
        exceeded = limit.exceeded(problem)
        if exceeded is None and not isinstance(problem, TuneError) and is_fake(problem):
            raise TuneError(FAKE) from problem
        if exceeded is None and _NOT_DETERMINISTIC in str(problem):
            raise TuneError(
                f"'{str(problem).split(_NOT_DETERMINISTIC)[0]}' has no deterministic kernel on {device.type}: replace "
                "it in the model, since a trial's result must not depend on chance"
            ) from problem
        if exceeded is None:
            raise
    finally:
        limit.release()
    # Raised out here, where the frames of the failure, and with them its tensors, are gone.
    raise OutOfMemory(exceeded.needed, exceeded.limit)


_NOT_DETERMINISTIC = " does not have a deterministic implementation"
"""Torch's words."""

FAKE = (
    "the model computes with a FakeTensor, which has no values: something that outlives a model, such as a function "
    "under lru_cache, was first called while it was traced in this process, and kept what it made there"
)


def is_fake(found: object) -> bool:
    """Whether a tensor is a fake one, or a failure is caused by one."""
    if isinstance(found, BaseException):
        return type(found).__module__ == FakeTensor.__module__ or "FakeTensor" in str(found)
    return isinstance(found, FakeTensor)


class TrainingLoop(ABC):
    """A trial's training from its first or its next step to its last, with reports and checkpoints on the way.

    ``home`` is where its data and the whole model lie. Its losses so far are ``losses``.
    """

    def __init__(
        self, config: TrialConfig, fit: Fit | None, limit: MemoryLimit, home: torch.device, directory: Path
    ) -> None:
        self.config, self.device, self._limit, self._directory = config, limit.device, limit, directory / "checkpoints"
        self._began = time.perf_counter()
        self._seeder = HostSeeder(config.seed, self.device)
        self.micro = config.batch_size if fit is None else min(fit.micro_batch, config.batch_size)
        self._contract = {**config.describe(), "micro_batch": self.micro, "device": self.device.type}
        train, self._validation = train_and_validation(config.data(), home)
        self._loader = Loader(train, config.batch_size, config.seed, device=home)
        self.model = config.build()
        if self.micro < config.batch_size and not config.microbatch_batchnorm:
            refuse_batch_norms(self.model, config.batch_size, self.micro)
        self.model.to(home)
        self.losses = torch.zeros(config.steps, device=home)

    def run(self, report: Report) -> Result:
        config, checkpoint = self.config, self._resume()
        if checkpoint is not None and checkpoint.values is not None:
            report(config.steps, checkpoint.values)
            return self._result(checkpoint.values)
        first = 0 if checkpoint is None else checkpoint.step
        with ExitStack() as stack:
            stack.enter_context(self._seeder.preserved())
            stack.enter_context(self._limit.count_cpu(self._held()))
            stack.callback(self._prepare(config.steps - first))
            batches = stack.enter_context(closing(self._loader.iterate(first, config.steps)))
            for step, batch in enumerate(batches, first):
                self._step(step, batch)
                del batch
                if step + 1 < config.steps:
                    self._between_steps(step + 1, report)
            values = self.evaluate()
        report(config.steps, values)
        self._save(config.steps, values)
        return self._result(values)

    @abstractmethod
    def evaluate(self) -> tuple[float, ...]:
        """The objectives on the validation part, in order."""

    @abstractmethod
    def _resume(self) -> TrialCheckpoint | None:
        """The checkpoint that the training goes on from, once its state is in place."""

    @abstractmethod
    def _held(self) -> list[Tensor]:
        """The tensors on the device that are there before the first step."""

    def _prepare(self, left: int) -> Callable[[], None]:
        """Called before the first of so many steps; what it returns is called after the last."""
        return lambda: None

    @abstractmethod
    def _step(self, step: int, batch: Batch) -> None: ...

    @abstractmethod
    def _save(self, step: int, values: tuple[float, ...] | None) -> None:
        """Writes a checkpoint. A trial that is done, with ``values``, needs no optimizer any more."""

    def _between_steps(self, done: int, report: Report) -> None:
        every, saved = self.config.report_every, self.config.checkpoint_every
        if every is not None and done % every == 0:
            values = self.evaluate()
            if report(done, values):
                raise Pruned(self._result(values, done))
        if saved is not None and done % saved == 0:
            self._save(done, None)

    def _check_loss(self) -> None:
        """TuneError where a batch is cut and its loss is not the mean of the losses of its parts."""
        if self.micro < self.config.batch_size:
            require_mean_loss(self.config, self.model, self._loader.source, self.micro, self.losses.device)
            self._limit.release()

    def _result(self, values: tuple[float, ...], steps: int | None = None) -> Result:
        losses = tuple(self.losses[:steps].tolist())
        return Result(values, self._limit.peak, time.perf_counter() - self._began, losses)


class TrialTrainer(TrainingLoop):
    """The training of a trial on one device."""

    _graphed: GraphedStep | None = None
    """Its micro-batches as CUDA graphs, where they are worth it."""

    def __init__(self, config: TrialConfig, fit: Fit | None, limit: MemoryLimit, directory: Path) -> None:
        super().__init__(config, fit, limit, limit.device, directory)
        self._strategy = "whole" if fit is None else fit.strategy
        self._memory = None if fit is None else fit.memory
        self._extra_state = ExtraState(self.model)
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = TrialOptimizer(config.optimizer, trained)
        self._trained = list(trained.values())

    def evaluate(self) -> tuple[float, ...]:
        """With no larger a batch than fits in training."""
        with self._graphed.outside_graph() if self._graphed else nullcontext():
            return self.config.evaluate(self.model, self._validation, self.micro, self.device)

    def _resume(self) -> TrialCheckpoint | None:
        """As the trial was, also where it made weights as late as in its first step."""
        checkpoint = load_latest(self._directory, self._contract, self.device)
        if checkpoint is None:
            self._check_loss()
            return None
        restore(self.model, checkpoint.weights, checkpoint.buffers, checkpoint.attributes)
        self.losses[: checkpoint.step].copy_(checkpoint.losses)
        self.optimizer.load(checkpoint.states)
        return checkpoint

    def _held(self) -> list[Tensor]:
        states = (state for p in self._trained for state in self.optimizer.state(p).values())
        return [*self.model.parameters(), *self.model.buffers(), *states, self.losses]

    def _prepare(self, left: int) -> Callable[[], None]:
        if self._strategy == "recompute":
            recompute(self.model)
        able = self._strategy in ("whole", "accumulate")
        recorder = make_recorder(self.device, self.config, left, self._memory) if able else None
        if recorder is None:
            return super()._prepare(left)
        loss, exceeded = self.config.loss, self._limit.exceeded
        self._graphed = GraphedStep(self._micro_step, recorder, self.model, loss, exceeded)
        return self._graphed.close

    def _step(self, step: int, batch: Batch) -> None:
        size, gradients = self.config.batch_size, None
        for number, start in enumerate(range(0, size, self.micro)):
            part = batch if self.micro >= size else {k: v[start : start + self.micro] for k, v in batch.items()}
            self._seeder.set(step, number, "model")
            loss, gradients = (self._graphed or self._micro_step)(part, gradients)
            self.losses[step].add_(loss)  # stays on the device, so that the host need not wait
        self._set_gradients(gradients)
        self.optimizer.step(self.config.lr_schedule(step, self.config.steps))

    def _micro_step(self, part: Batch, gradients: Gradients | None) -> tuple[Tensor, Gradients]:
        """The loss of a micro-batch, and its gradients, in place, on top of those before it."""
        size = self.config.batch_size
        share = 1.0 if self.micro >= size else len(next(iter(part.values()))) / size
        self._set_gradients(gradients)
        with self._offloading(), self.config.autocast(self.device):
            loss = self.config.loss(self.model(*self.config.enter(part)), part)
        if is_fake(loss):
            raise TuneError(FAKE)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TuneError(f"the loss must return a tensor with one number, not {got}")
        if share < 1.0:  # the mean over the batch is the mean of its parts, each by its size
            loss = loss * share
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), [parameter.grad for parameter in self._trained]

    def _set_gradients(self, gradients: Gradients | None) -> None:
        for parameter, gradient in zip(self._trained, gradients or repeat(None), strict=False):
            parameter.grad = gradient

    def _offloading(self) -> AbstractContextManager[Any]:
        """A CPU with a limit behaves as a device would: copies are not counted."""
        if self._strategy != "offload":
            return nullcontext()

        def to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
            with self._limit.pause():
                copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
                copy.copy_(tensor, non_blocking=True)
            return tensor.device, copy

        def to_device(stored: tuple[torch.device, Tensor]) -> Tensor:
            return stored[1].to(stored[0], non_blocking=True, copy=True)

        return offloading(self.model, to_host, to_device)

    def _save(self, step: int, values: tuple[float, ...] | None) -> None:
        parameters = self.optimizer.parameters if values is None else {}
        states = {name: self.optimizer.state(parameter) for name, parameter in parameters.items()}
        extra = self._extra_state.changed(self.model)
        checkpoint = TrialCheckpoint(step, self.model.state_dict(), states, self.losses[:step], values, *extra)
        save(self._directory, self._contract, checkpoint)


def make_recorder(device: torch.device, config: TrialConfig, left: int, memory: int | None) -> GraphRecorder | None:
    """For CUDA graphs of the steps that are left; None where there are none, or they are not worth it."""
    return GraphRecorder(device) if device.type == "cuda" and can_capture(config, left, memory) else None


def train_and_validation(data: Data, device: torch.device) -> tuple[Source, Source]:
    """Both parts of the data, on the trial's device where that is worth it."""
    if device.type != "cpu" and resident(data):
        data = data.to(device)
    if data.validation is None:
        raise TuneError(f"a trial is evaluated on validation data, and '{data.name}' has none: split some off it")
    return data.train, data.validation


def refuse_batch_norms(model: nn.Module, batch_size: int, micro: int) -> None:
    """TuneError if the model has a batch norm, which would see other statistics in a part of a batch."""
    if (name := batch_norm(model)) is not None:
        raise TuneError(
            f"batch norm '{name}' would see {micro} samples at a time of a batch of {batch_size}, which changes what "
            "is trained: use a smaller batch_size, a model without batch norms, or microbatch_batchnorm=True"
        )


def batch_norm(model: nn.Module) -> str | None:
    """The name of a batch norm in the model, if there is one."""
    return next((name for name, part in model.named_modules() if isinstance(part, BatchNorm)), None)


# The optimizer of a trial, which trains all its weights at once.


class TrialOptimizer(LayerOptimizer):
    """Updates every parameter that holds a gradient, in one call while all of them always do."""

    _uneven = False
    """Whether a parameter may have less state than others, which fused kernels do not take together."""

    def step(self, factor: float) -> None:
        """One update at ``factor`` times the base learning rate; no parameter has a gradient afterwards."""
        given = [(p, p.grad) for p in self.parameters.values() if p.grad is not None]
        self._uneven = self._uneven or len(given) < len(self.parameters)
        if self._uneven:
            self.apply([p for p, _ in given], [gradient for _, gradient in given], factor)
            return
        for optimizer, rates in zip(self._optimizers, self._base, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad()

    def load(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        super().load(states)
        self._uneven = any(not states.get(name) for name in self.parameters)
