"""Fusion: trials of one shape train as one batched training, each to the result that it has alone, to float tolerance.

Each trial has weights, data order, dropout, optimizer and schedule of its own. A trial that is pruned leaves, and the
others go on without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from weft.data import Batch, Loader
from weft.engine.rng import Seeder
from weft.errors import TuneError
from weft.runs import Checkpoints
from weft.tune.fusion.compatibility import outline
from weft.tune.fusion.stacked_model import StackedModel, why_not_stackable
from weft.tune.fusion.vmap import BatchedForward, CannotFuse, draw_masks
from weft.tune.jobs import Fit
from weft.tune.recipe import TrialConfig
from weft.tune.training.checkpoint import TrialCheckpoint, load_latest, save
from weft.tune.training.cuda_graphs import Gradients, GraphedStep
from weft.tune.training.loss_check import require_mean_loss
from weft.tune.training.memory_limit import MemoryLimit
from weft.tune.training.trainer import (
    FAKE,
    Pruned,
    Result,
    is_fake,
    make_recorder,
    refuse_batch_norms,
    run_limited,
    train,
    train_and_validation,
)

log = logging.getLogger("weft.tune")

WRITERS = 8
"""Checkpoints that are written at once."""

Report = Callable[[int, int, tuple[float, ...]], bool]
"""Takes the number of a trial, the steps done and the value of each objective; says whether the trial is to end."""
End = Callable[[int, Result | Literal["pruned"]], None]


def train_fused(
    configs: Sequence[TrialConfig],
    fit: Fit | None,
    *,
    device: torch.device | str,
    memory: int | None = None,
    directories: Sequence[Path],
    report: Report,
    ended: End,
) -> None:
    """Trains trials of one shape to their ends, from the newest checkpoint that all of them have.

    Trials are numbered by their place in ``configs``. ``ended`` is called once for each, with its result or "pruned".
    Trials that turn out not to run together on this device are trained one after another. Raises OutOfMemory for all
    that have not ended.
    """
    limit = MemoryLimit(torch.device(device), memory)

    def fuse() -> tuple[str, list[int]]:
        """Why trials do not run together, and which are left."""
        trainer = FusedTrainer(configs, fit, limit, directories, report, ended)
        try:
            trainer.run()
        except CannotFuse as problem:
            return str(problem), trainer.alive
        return "", []

    failure, left = run_limited(limit, fuse, configs[0].cuda_graphs)
    if not left:
        return
    log.warning("%d trials train one after another, since they cannot together: %s", len(left), failure)
    for trial in left:
        try:
            own = partial(report, trial)
            result = train(configs[trial], fit, device=device, memory=memory, directory=directories[trial], report=own)
        except Pruned:
            ended(trial, "pruned")
        else:
            ended(trial, result)


class FusedTrainer:
    """One batched training. ``alive`` are the numbers of the trials that go on, in the order of their rows."""

    def __init__(
        self,
        configs: Sequence[TrialConfig],
        fit: Fit | None,
        limit: MemoryLimit,
        directories: Sequence[Path],
        report: Report,
        ended: End,
    ) -> None:
        # By their outlines alone: to find their key again, a trace would leave fake tensors in this process.
        if len({outline(one) for one in configs}) != 1 or why_not_stackable(configs[0].optimizer):
            raise TuneError("trials that are fused must be of one shape, and of one that can be fused")
        if fit is not None and fit.strategy not in ("whole", "accumulate"):
            raise TuneError(
                f"trials that fit by '{fit.strategy}' alone are not fused: fused trials keep all activations"
            )
        self._configs, self._limit, self._report, self._ended = configs, limit, report, ended
        self._device = device = limit.device
        self._directories = [directory / "checkpoints" for directory in directories]
        self._began = time.perf_counter()
        self._common = common = configs[0]
        self._micro = common.batch_size if fit is None else min(fit.micro_batch, common.batch_size)
        self._memory = None if fit is None else fit.memory  # of one trial
        self._train, self._validation = train_and_validation(common.data(), device)
        self._contracts = [{**c.describe(), "micro_batch": self._micro, "device": device.type} for c in configs]
        self.alive = list(range(len(configs)))
        self._writers, self._writes = ThreadPoolExecutor(WRITERS, "checkpoints"), list[Future[None]]()
        self._seeders = [Seeder(one.seed, device) for one in configs]
        self._loaders = [Loader(self._train, one.batch_size, one.seed) for one in configs]

    def run(self) -> None:
        common, steps = self._common, self._common.steps
        first, checkpoints = self._resume()
        if not self.alive:
            return
        if self._micro < common.batch_size and not checkpoints:
            require_mean_loss(common, common.build().to(self._device), self._train, self._micro, self._device)
            self._limit.release()
        self._model = model = StackedModel([self._configs[trial] for trial in self.alive], self._device)
        if self._micro < common.batch_size and not common.microbatch_batchnorm:
            refuse_batch_norms(model.module, common.batch_size, self._micro)
        self._forward = BatchedForward(common, model.module, self._device)
        self._losses = torch.zeros(len(self.alive), steps, device=self._device)
        for row, checkpoint in enumerate(checkpoints):
            model.load(row, checkpoint)
            self._losses[row, :first].copy_(checkpoint.losses)
        with ExitStack() as stack:
            stack.enter_context(self._writers)  # leaving waits for what is being written
            stack.enter_context(self._seeders[0].preserved())
            stack.enter_context(self._limit.count_cpu([*model.tensors(), self._losses]))
            self._graphed = self._make_graphed_step(steps - first)
            stack.callback(self._close_graphed)
            for step in range(first, steps):
                with self._refuse_if_failed():
                    self._step(step)
                if step + 1 < steps:
                    self._between_steps(step + 1)
                if not self.alive:
                    return
            values = self._evaluate()
            for row, trial in enumerate(self.alive):
                self._report(trial, steps, values[row])
            self._save(steps, values)
            self._wait_for_writes()
        for row, trial in enumerate(self.alive):
            self._ended(trial, self._result(row, values[row]))

    @contextmanager
    def _refuse_if_failed(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, NotImplementedError) as problem:
            if self._limit.exceeded(problem) is not None:
                raise
            raise CannotFuse(f"{type(problem).__name__}: {problem}") from problem

    def _step(self, step: int) -> None:
        batch, self._shared = self._batch(step)
        gradients: Gradients | None = None
        compute = self._graphed or self._micro_step
        for given in self._micro_batches(batch, step):
            losses, gradients = compute(given, gradients)
            if is_fake(losses):
                raise TuneError(FAKE)
            self._losses[:, step].add_(losses)
        assert gradients is not None
        assert gradients[0] is not None
        self._model.update(gradients[0], self._common.lr_schedule(step, self._common.steps))

    def _batch(self, step: int) -> tuple[Batch, bool]:
        """The batches of all trials, (trials, batch, ...); or (batch, ...), and True, where all have the same."""
        loaders = self._of_alive(self._loaders)
        shared = len({loader.seed for loader in loaders}) == 1
        samples = [loader.samples(step) for loader in (loaders[:1] if shared else loaders)]
        batch = {k: v.to(self._device, non_blocking=True) for k, v in self._train.take(np.concatenate(samples)).items()}
        return batch if shared else {k: v.view(len(loaders), -1, *v.shape[1:]) for k, v in batch.items()}, shared

    def _micro_batches(self, batch: Batch, step: int) -> Iterator[Batch]:
        """The parts of a batch, each with its masks, which are drawn here, by each trial's own seed: no graph could."""
        size, model = self._common.batch_size, self._model
        seeders = self._of_alive(self._seeders)
        rates = [config.dropout for config in self._of_alive(self._configs)]
        for number, start in enumerate(range(0, size, self._micro)):
            end = min(start + self._micro, size)
            part = batch if self._micro >= size else _slice(batch, start, end, self._shared)
            calls = self._forward.dropout_calls(model.parameters, model.fixed, part, self._shared)
            masks = draw_masks(calls, seeders, rates, step, number, self._device)
            yield {**part, **{f"{_MASK}{index}": mask for index, mask in enumerate(masks)}}

    def _micro_step(self, given: Batch, gradients: Gradients | None) -> tuple[Tensor, Gradients]:
        """The losses of a micro-batch with its masks, and its gradients, in place, on top of those before it."""
        size, model = self._common.batch_size, self._model
        batch = {name: value for name, value in given.items() if not name.startswith(_MASK)}
        masks = [value for name, value in given.items() if name.startswith(_MASK)]
        samples = next(iter(batch.values())).shape[0 if self._shared else 1]
        losses = self._forward.losses(model.parameters, model.fixed, batch, lambda calls: masks, self._shared)
        if self._micro < size:
            losses = losses * (samples / size)
        joined = model.join(torch.autograd.grad(losses.sum(), list(model.parameters.values())))
        before = None if gradients is None else gradients[0]
        return losses.detach(), [joined if before is None else before.add_(joined)]

    def _make_graphed_step(self, left: int) -> GraphedStep | None:
        """For so many steps."""
        recorder = make_recorder(self._device, self._common, left, self._memory)
        if recorder is None:
            return None
        return GraphedStep(self._micro_step, recorder, self._model.module, self._common.loss, self._limit.exceeded)

    def _close_graphed(self) -> None:
        if self._graphed is not None:
            self._graphed.close()

    def _between_steps(self, done: int) -> None:
        every, saved = self._common.report_every, self._common.checkpoint_every
        if every is not None and done % every == 0:
            values = self._evaluate()
            pruned = [self._report(trial, done, values[row]) for row, trial in enumerate(self.alive)]
            self._remove([row for row, ends in enumerate(pruned) if ends], self._common.steps - done)
        if saved is not None and done % saved == 0:
            self._save(done, None)

    def _remove(self, rows: Sequence[int], left: int) -> None:
        if not rows:
            return
        self._close_graphed()  # the trials that stay are copied to other memory
        for row in rows:
            self._ended(self.alive[row], "pruned")
        stay = [row for row in range(len(self.alive)) if row not in rows]
        self.alive = [self.alive[row] for row in stay]
        if stay:
            self._model.keep(stay)
            self._losses = self._losses[stay]
        self._graphed = self._make_graphed_step(left)

    def _evaluate(self) -> list[tuple[float, ...]]:
        """The objectives of each trial on the validation part, as for a trial alone."""
        with self._refuse_if_failed(), self._graphed.outside_graph() if self._graphed else nullcontext():
            return self._objectives()  # whose tensors are gone when it returns, as graphs want it

    def _objectives(self) -> list[tuple[float, ...]]:
        common, model = self._common, self._model
        scores = [common.scores() for _ in self.alive]
        loader = Loader(self._validation, self._micro, 0, shuffle=False, device=self._device)
        with torch.no_grad(), closing(loader.all()) as batches:
            for batch in batches:
                outputs = self._forward.outputs(model.parameters, model.fixed, batch)
                for row, score in enumerate(scores):
                    with common.autocast(self._device):
                        score.add(_row(outputs, row), batch)
        return [tuple(means[name] for name in common.objectives) for means in (one.means() for one in scores)]

    def _resume(self) -> tuple[int, list[TrialCheckpoint]]:
        """The newest step that all trials have a checkpoint of, with these; trials that were done end here."""
        newest = {trial: self._load(trial) for trial in self.alive}
        for trial, checkpoint in newest.items():
            if checkpoint is not None and checkpoint.values is not None:
                self._report(trial, checkpoint.step, checkpoint.values)
                losses = tuple(checkpoint.losses.tolist())
                self._ended(trial, Result(checkpoint.values, None, time.perf_counter() - self._began, losses))
        self.alive = [trial for trial, one in newest.items() if one is None or one.values is None]
        steps = [None if (one := newest[trial]) is None else one.step for trial in self.alive]
        if not steps or None in steps:
            return 0, []
        first = min(step for step in steps if step is not None)
        for trial in self.alive:  # a crash between the checkpoints of two trials leaves one of them ahead
            Checkpoints(self._directories[trial]).drop_after(first)
        found = [one for one in map(self._load, self.alive) if one is not None and one.step == first]
        return (first, found) if len(found) == len(self.alive) else (0, [])

    def _load(self, trial: int) -> TrialCheckpoint | None:
        return load_latest(self._directories[trial], self._contracts[trial])

    def _save(self, step: int, values: Sequence[tuple[float, ...]] | None) -> None:
        """A checkpoint of each trial, written at once and beside the training: the disk is slow, not busy."""
        self._wait_for_writes()
        with self._limit.pause():  # in host memory
            model, losses = self._model.copy_to_host(), self._losses[:, :step].cpu().clone()

        def write(row: int, trial: int) -> None:
            states, own = (model.states(row), None) if values is None else ({}, values[row])
            checkpoint = TrialCheckpoint(step, model.weights(row), states, losses[row], own, model.buffers(row))
            save(self._directories[trial], self._contracts[trial], checkpoint)

        self._writes = [self._writers.submit(write, row, trial) for row, trial in enumerate(self.alive)]

    def _wait_for_writes(self) -> None:
        """Raises what went wrong with a checkpoint."""
        writes, self._writes = self._writes, []
        for write in writes:
            write.result()

    def _result(self, row: int, values: tuple[float, ...]) -> Result:
        return Result(values, self._limit.peak, time.perf_counter() - self._began, tuple(self._losses[row].tolist()))

    def _of_alive(self, of_all: Sequence[Any]) -> list[Any]:
        return [of_all[trial] for trial in self.alive]


_MASK = "mask of dropout "
"""Begins the names under which masks stand beside the entries of a batch."""


def _slice(batch: Batch, start: int, end: int, shared: bool) -> Batch:
    return {name: value[start:end] if shared else value[:, start:end] for name, value in batch.items()}


def _row(outputs: Any, row: int) -> Any:
    return outputs[row] if isinstance(outputs, Tensor) else tuple(output[row] for output in outputs)
