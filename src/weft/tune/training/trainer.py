"""The training of one trial on one device: a plain loop whose result is a function of its setting and its fit alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from weft.data import Batch, Data, Loader, Source
from weft.engine.optimizer import LayerOptimizer
from weft.engine.rng import HostSeeder, deterministic
from weft.errors import TuneError
from weft.nn.state import ExtraState, restore
from weft.tune.jobs import Fit
from weft.tune.recipe import TrialConfig, resident
from weft.tune.training.activation_checkpointing import offloading, recomputing
from weft.tune.training.checkpoint import TrialCheckpoint, load_latest, save
from weft.tune.training.cuda_graphs import Captured, Gradients, capturable, recorder, streamed
from weft.tune.training.evaluation import evaluate
from weft.tune.training.loss_check import require_mean_loss
from weft.tune.training.memory_limit import MemoryLimit, OutOfMemory

__all__ = ["OutOfMemory", "Pruned", "Result", "train"]

Report = Callable[[int, tuple[float, ...]], bool]
"""Takes the number of steps done and the value of each objective; says whether the trial is to end here."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a trial came to."""

    values: tuple[float, ...]
    """Of the objectives, in order, on the validation part at the end."""
    peak: int | None
    """Bytes of the device that it took at its peak, as the allocator reserved them; None where nobody counted."""
    seconds: float
    losses: tuple[float, ...]
    """Of the training steps."""


class Pruned(Exception):
    """A trial was told to end early. ``result`` is what it had come to, where that is known."""

    def __init__(self, result: Result | None = None) -> None:
        super().__init__("pruned")
        self.result = result


def train(
    setting: TrialConfig,
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
    device = torch.device(device)
    if fit is not None and fit.degree > 1:
        raise TuneError(f"a trial that is split over {fit.degree} devices cannot be trained on one")
    cap = MemoryLimit(device, memory)
    device = cap.device
    try:
        with on(device, setting), cap:
            return TrialTrainer(setting, fit, device, directory, cap).run(report)
    except Exception as problem:
        exceeded = cap.exceeded(problem)
        if exceeded is None and not isinstance(problem, TuneError) and met_fake(problem):
            raise TuneError(FAKE) from problem
        if exceeded is None and _CHANCE in str(problem):
            raise TuneError(
                f"'{str(problem).split(_CHANCE)[0]}' has no deterministic kernel on {device.type}, and a trial's "
                "result must not depend on chance: replace it in the model"
            ) from problem
        if exceeded is None:
            raise
    finally:
        cap.release()
    # Raised out here, where the frames of the failure, and with them its tensors, are gone.
    raise OutOfMemory(exceeded.needed, exceeded.limit)


_CHANCE = " does not have a deterministic implementation"
"""So torch says it."""

FAKE = (
    "the model computes with a FakeTensor, which has no values: something that outlives a model, such as a function "
    "under lru_cache, was first called while it was traced in this process, and kept what it made there"
)


def met_fake(found: object) -> bool:
    """Whether a tensor is a fake one, or a failure the work of one."""
    if isinstance(found, BaseException):
        return type(found).__module__ == FakeTensor.__module__ or "FakeTensor" in str(found)
    return isinstance(found, FakeTensor)


class TrialTrainer:
    """A trial's model, optimizer and losses on a device, from its first or its next step to its last."""

    def __init__(
        self, setting: TrialConfig, fit: Fit | None, device: torch.device, directory: Path, cap: MemoryLimit
    ) -> None:
        self.setting, self.device, self._directory, self._cap = setting, device, directory / "checkpoints", cap
        self._began = time.perf_counter()
        self.micro = setting.batch_size if fit is None else min(fit.micro_batch, setting.batch_size)
        self._way = "whole" if fit is None else fit.way
        self._memory = None if fit is None else fit.memory
        self._train, self._validation = parts(setting.data(), device)
        self.model = setting.build()
        if self.micro < setting.batch_size and not setting.microbatch_batchnorm:
            refuse_norms(self.model, setting.batch_size, self.micro)
        self.model.to(device)
        self._remainder = ExtraState(self.model)
        self.updater = Whole(setting.optimizer, {n: p for n, p in self.model.named_parameters() if p.requires_grad})
        self._trained = list(self.updater.parameters.values())
        self.losses = torch.zeros(setting.steps, device=device)
        self._law = {**setting.describe(), "micro_batch": self.micro, "device": device.type}

    def run(self, report: Report) -> Result:
        setting, seeder = self.setting, HostSeeder(self.setting.seed, self.device)
        kept = load_latest(self._directory, self._law, self.device)
        if kept is not None:
            self._restore(kept)
        if kept is not None and kept.values is not None:
            report(setting.steps, kept.values)
            return self._result(kept.values)
        if kept is None and self.micro < setting.batch_size:
            require_mean_loss(setting, self.model, self._train, self.micro, self.device)
            self._cap.release()
        first = 0 if kept is None else kept.step
        states = (state for p in self.updater.parameters.values() for state in self.updater.state(p).values())
        held = [*self.model.parameters(), *self.model.buffers(), *states, self.losses]
        with ExitStack() as stack:
            stack.enter_context(seeder.preserved())
            stack.enter_context(self._cap.counted(held))
            if self._way == "recompute":
                stack.enter_context(recomputing(self.model))
            self._captured = self._capturing(setting.steps - first)
            stack.callback(self._captured.close)
            loader = Loader(self._train, setting.batch_size, setting.seed, device=self.device)
            batches = stack.enter_context(closing(loader.iterate(first, setting.steps)))
            for step, batch in enumerate(batches, first):
                self._step(step, batch, seeder)
                del batch
                done = step + 1
                if done < setting.steps:
                    self._pause(done, report)
            values = self.evaluate()
        report(setting.steps, values)
        self._keep(setting.steps, values)
        return self._result(values)

    def evaluate(self) -> tuple[float, ...]:
        """The objectives on the validation part, in order; no larger a batch than fits in training."""
        with self._captured.beside():
            return evaluate(self.setting, self.model, self._validation, self.micro, self.device)

    def _step(self, step: int, batch: Batch, seeder: HostSeeder) -> None:
        size, gradients = self.setting.batch_size, None
        for number, start in enumerate(range(0, size, self.micro)):
            part = batch if self.micro >= size else {k: v[start : start + self.micro] for k, v in batch.items()}
            seeder.set(step, number, "model")
            loss, gradients = self._captured(part, gradients)
            self.losses[step].add_(loss)  # stays on the device: nobody waits for it
        self._give(gradients)
        self.updater.step(self.setting.lr_schedule(step, self.setting.steps))

    def _part(self, part: Batch, gradients: Gradients | None) -> tuple[Tensor, Gradients]:
        """The loss of a micro-batch, and its gradients, in place, on top of those before it."""
        size = self.setting.batch_size
        share = 1.0 if self.micro >= size else len(next(iter(part.values()))) / size
        self._give(gradients)
        with self._saving(), self.setting.autocast(self.device):
            loss = self.setting.loss(self.model(*self.setting.enter(part)), part)
        if met_fake(loss):
            raise TuneError(FAKE)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TuneError(f"the loss must return a tensor with one number, not {got}")
        if share < 1.0:  # the mean over the batch is the mean of its parts, each by its size
            loss = loss * share
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), [parameter.grad for parameter in self._trained]

    def _give(self, gradients: Gradients | None) -> None:
        for parameter, gradient in zip(self._trained, gradients or repeat(None), strict=False):
            parameter.grad = gradient

    def _capturing(self, left: int) -> Captured:
        """What takes so many steps."""
        fits = self._way in ("whole", "accumulate") and capturable(self.setting, left, self._memory)
        made = recorder(self.device) if fits else None
        return Captured(self._part, made, self.model, self.setting.loss, self._cap.exceeded)

    def _pause(self, done: int, report: Report) -> None:
        """What is due between two steps."""
        every, saved = self.setting.report_every, self.setting.checkpoint_every
        if every is not None and done % every == 0:
            values = self.evaluate()
            if report(done, values):
                raise Pruned(self._result(values, done))
        if saved is not None and done % saved == 0:
            self._keep(done, None)

    def _saving(self) -> AbstractContextManager[Any]:
        return offloading(self.model, self._cap.uncounted) if self._way == "offload" else nullcontext()

    def _keep(self, step: int, values: tuple[float, ...] | None) -> None:
        """A trial that is done needs no optimizer any more."""
        states = {name: self.updater.state(p) for name, p in self.updater.parameters.items()} if values is None else {}
        beyond = self._remainder.changed(self.model)
        kept = TrialCheckpoint(step, self.model.state_dict(), states, self.losses[:step], values, *beyond)
        save(self._directory, self._law, kept)

    def _restore(self, kept: TrialCheckpoint) -> None:
        """As the trial was, also where it made weights as late as in its first step."""
        restore(self.model, kept.weights, kept.buffers, kept.attributes)
        self.losses[: kept.step].copy_(kept.losses)
        self.updater.load(kept.states)

    def _result(self, values: tuple[float, ...], steps: int | None = None) -> Result:
        losses = tuple(self.losses[:steps].tolist())
        return Result(values, self._cap.peak, time.perf_counter() - self._began, losses)


@contextmanager
def on(device: torch.device, setting: TrialConfig) -> Iterator[None]:
    """Where trials train: on the device, by deterministic kernels, and on the stream that can be captured."""
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(deterministic(device))
        if setting.cuda_graphs:
            stack.enter_context(streamed(device))
        yield


def parts(data: Data, device: torch.device) -> tuple[Source, Source]:
    """What a trial learns from and what it is judged by, on its device where that is worth it."""
    if device.type != "cpu" and resident(data):
        data = data.to(device)
    if data.validation is None:
        raise TuneError(f"a trial is judged on validation data, and '{data.name}' has none: split some off it")
    return data.train, data.validation


def refuse_norms(model: nn.Module, batch_size: int, micro: int) -> None:
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


class Whole(LayerOptimizer):
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
