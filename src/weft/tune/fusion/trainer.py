"""Fusion: trials of one shape train as one batched training, each to the result that it has alone, to float tolerance.

A lane is one trial of it, with weights, data order, dropout, optimizer and schedule of its own. A lane that is pruned
leaves, and the others go on without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
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
from weft.tune.fusion.compatibility import outline, shape_key
from weft.tune.fusion.dropout import drawn
from weft.tune.fusion.optimizers import refused
from weft.tune.fusion.stacked_model import StackedModel
from weft.tune.fusion.vmap import Batched, CannotFuse
from weft.tune.jobs import Fit
from weft.tune.recipe import TrialConfig
from weft.tune.training.checkpoint import TrialCheckpoint, load_latest, save
from weft.tune.training.cuda_graphs import Captured, Gradients, capturable, recorder
from weft.tune.training.loss_check import require_mean_loss
from weft.tune.training.memory_limit import MemoryLimit, OutOfMemory
from weft.tune.training.trainer import FAKE, Pruned, Result, met_fake, on, parts, refuse_norms, train

log = logging.getLogger("weft.tune")

__all__ = ["shape_key", "train_fused"]

WRITERS = 8
"""Checkpoints that are written at once."""

Report = Callable[[int, int, tuple[float, ...]], bool]
"""Takes a lane, the number of steps done and the value of each objective; says whether the lane is to end here."""
End = Callable[[int, Result | Literal["pruned"]], None]


def train_fused(
    settings: Sequence[TrialConfig],
    fit: Fit | None,
    *,
    device: torch.device | str,
    memory: int | None = None,
    directories: Sequence[Path],
    report: Report,
    ended: End,
) -> None:
    """Trains trials of one shape to their ends, from the newest checkpoint that all of them have.

    Lanes are numbered by their place in ``settings``. ``ended`` is called once for each, with its result or "pruned".
    Lanes that turn out not to run together on this device are trained one after another. Raises OutOfMemory for all
    that have not ended.
    """
    device = torch.device(device)
    cap = MemoryLimit(device, memory)
    device = cap.device
    failure, exceeded, fused = "", None, None
    try:
        with on(device, settings[0]), cap:
            fused = Fused(settings, fit, device, directories, cap, report, ended)
            fused.run()
        return
    except CannotFuse as problem:
        failure = str(problem)
    except Exception as problem:
        exceeded = cap.exceeded(problem)
        if exceeded is None and not isinstance(problem, TuneError) and met_fake(problem):
            raise TuneError(FAKE) from problem
        if exceeded is None:
            raise
    finally:
        cap.release()
    if exceeded is not None or fused is None:
        assert exceeded is not None
        # Raised out here, where the frames of the failure, and with them its tensors, are gone.
        raise OutOfMemory(exceeded.needed, exceeded.limit)
    left, fused = fused.alive, None
    log.warning("%d trials train one after another, since they cannot together: %s", len(left), failure)
    for lane in left:
        try:
            own = partial(report, lane)
            result = train(settings[lane], fit, device=device, memory=memory, directory=directories[lane], report=own)
        except Pruned:
            ended(lane, "pruned")
        else:
            ended(lane, result)


class Fused:
    """One batched training. ``alive`` are the numbers of the lanes that go on, in the order in which they stand."""

    def __init__(
        self,
        settings: Sequence[TrialConfig],
        fit: Fit | None,
        device: torch.device,
        directories: Sequence[Path],
        cap: MemoryLimit,
        report: Report,
        ended: End,
    ) -> None:
        # By what they say alone: a trace, as was made to find their shape, would leave fake tensors in this process.
        if len({outline(one) for one in settings}) != 1 or refused(settings[0].optimizer):
            raise TuneError("trials that are fused must be of one shape, and of one that can be fused")
        if fit is not None and fit.way not in ("whole", "accumulate"):
            raise TuneError(f"trials that fit by '{fit.way}' alone are not fused: lanes keep what their forwards make")
        self._settings, self._device, self._cap, self._report, self._ended = settings, device, cap, report, ended
        self._folders = [directory / "checkpoints" for directory in directories]
        self._began = time.perf_counter()
        self._common = common = settings[0]
        self._micro = common.batch_size if fit is None else min(fit.micro_batch, common.batch_size)
        self._memory = None if fit is None else fit.memory  # of a lane
        self._train, self._validation = parts(common.data(), device)
        self._laws = [{**s.describe(), "micro_batch": self._micro, "device": device.type} for s in settings]
        self.alive = list(range(len(settings)))
        self._writers, self._writes = ThreadPoolExecutor(WRITERS, "lanes"), list[Future[None]]()
        self._seeders = [Seeder(one.seed, device) for one in settings]
        self._loaders = [Loader(self._train, one.batch_size, one.seed) for one in settings]

    def run(self) -> None:
        steps = self._common.steps
        first, found = self._resume()
        if not self.alive:
            return
        if self._micro < self._common.batch_size and not found:
            require_mean_loss(
                self._common, self._common.build().to(self._device), self._train, self._micro, self._device
            )
            self._cap.release()
        self.lanes = lanes = StackedModel([self._settings[lane] for lane in self.alive], self._device)
        if self._micro < self._common.batch_size and not self._common.microbatch_batchnorm:
            refuse_norms(lanes.module, self._common.batch_size, self._micro)
        self._work = FusedStep(self._common, lanes, self._device, self._micro)
        self._losses = torch.zeros(len(self.alive), steps, device=self._device)
        for place, kept in enumerate(found):
            lanes.load(place, kept)
            self._losses[place, :first].copy_(kept.losses)
        with ExitStack() as stack:
            stack.enter_context(self._writers)  # leaving waits for what is being written
            stack.enter_context(self._seeders[0].preserved())
            stack.enter_context(self._cap.counted([*lanes.tensors(), self._losses]))
            self._captured = self._capturing(steps - first)
            stack.callback(lambda: self._captured.close())
            for step in range(first, steps):
                with self._together():
                    self._step(step)
                if step + 1 < steps:
                    self._pause(step + 1)
                if not self.alive:
                    return
            values = self._evaluate()
            for place, lane in enumerate(self.alive):
                self._report(lane, steps, values[place])
            self._keep(steps, values)
            self._written()
        for place, lane in enumerate(self.alive):
            self._ended(lane, self._result(place, values[place]))

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, NotImplementedError) as problem:
            if self._cap.exceeded(problem) is not None:
                raise
            raise CannotFuse(f"{type(problem).__name__}: {problem}") from problem

    def _step(self, step: int) -> None:
        batch, shared = self._batch(step)
        seeders, rates = self._own(self._seeders), [one.dropout for one in self._own(self._settings)]
        gradients: Gradients | None = None
        for given in self._work.micro_batches(batch, shared, seeders, rates, step):
            losses, gradients = self._captured(given, gradients)
            if met_fake(losses):
                raise TuneError(FAKE)
            self._losses[:, step].add_(losses)
        assert gradients is not None
        assert gradients[0] is not None
        self.lanes.update(gradients[0], self._common.lr_schedule(step, self._common.steps))

    def _capturing(self, left: int) -> Captured:
        """What takes so many steps."""
        made = recorder(self._device) if capturable(self._common, left, self._memory) else None
        return Captured(self._work.part, made, self.lanes.module, self._common.loss, self._cap.exceeded)

    def _batch(self, step: int) -> tuple[Batch, bool]:
        """The batches of all lanes, (lanes, batch, ...); without lanes, and True, where all have the same."""
        loaders = self._own(self._loaders)
        shared = len({loader.seed for loader in loaders}) == 1
        samples = [loader.samples(step) for loader in (loaders[:1] if shared else loaders)]
        batch = {k: v.to(self._device, non_blocking=True) for k, v in self._train.take(np.concatenate(samples)).items()}
        return batch if shared else {k: v.view(len(loaders), -1, *v.shape[1:]) for k, v in batch.items()}, shared

    def _pause(self, done: int) -> None:
        """What is due between two steps."""
        every, saved = self._common.report_every, self._common.checkpoint_every
        if every is not None and done % every == 0:
            values = self._evaluate()
            pruned = [self._report(lane, done, values[place]) for place, lane in enumerate(self.alive)]
            self._leave([place for place, gone in enumerate(pruned) if gone], self._common.steps - done)
        if saved is not None and done % saved == 0:
            self._keep(done, None)

    def _leave(self, places: Sequence[int], left: int) -> None:
        if not places:
            return
        self._captured.close()  # what stays lies elsewhere
        for place in places:
            self._ended(self.alive[place], "pruned")
        stay = [place for place in range(len(self.alive)) if place not in places]
        self.alive = [self.alive[place] for place in stay]
        if stay:
            self.lanes.keep(stay)
            self._losses = self._losses[stay]
        self._captured = self._capturing(left)

    def _evaluate(self) -> list[tuple[float, ...]]:
        """The objectives of each lane on the validation part, as a trial alone is judged."""
        with self._together(), self._captured.beside():
            return self._judged()

    def _judged(self) -> list[tuple[float, ...]]:
        scores = self._work.batched.scores(len(self.alive))
        loader = Loader(self._validation, self._micro, 0, shuffle=False, device=self._device)
        with torch.no_grad(), closing(loader.all()) as batches:
            for batch in batches:
                outputs = self._work.batched.outputs(self.lanes.parameters, self.lanes.fixed, batch)
                for place, score in enumerate(scores):
                    with self._common.autocast(self._device):
                        score.add(_lane(outputs, place), batch)
        return [tuple(means[name] for name in self._common.objectives) for means in (one.means() for one in scores)]

    def _resume(self) -> tuple[int, list[TrialCheckpoint]]:
        """The newest step that all lanes were kept at, with what was kept; lanes that were done end here."""
        newest_of = {lane: load_latest(self._folders[lane], self._laws[lane]) for lane in self.alive}
        for lane, kept in newest_of.items():
            if kept is not None and kept.values is not None:
                self._report(lane, kept.step, kept.values)
                losses = tuple(kept.losses.tolist())
                self._ended(lane, Result(kept.values, None, time.perf_counter() - self._began, losses))
        self.alive = [lane for lane in self.alive if (kept := newest_of[lane]) is None or kept.values is None]
        steps = [None if (kept := newest_of[lane]) is None else kept.step for lane in self.alive]
        if not steps or None in steps:
            return 0, []
        first = min(step for step in steps if step is not None)
        for lane in self.alive:  # a crash between the checkpoints of two lanes leaves one of them ahead
            Checkpoints(self._folders[lane]).drop_after(first)
        found = [load_latest(self._folders[lane], self._laws[lane]) for lane in self.alive]
        whole = [kept for kept in found if kept is not None and kept.step == first]
        return (first, whole) if len(whole) == len(found) else (0, [])

    def _keep(self, step: int, values: Sequence[tuple[float, ...]] | None) -> None:
        """A checkpoint of each lane, written at once and beside the training: the disk is slow, not busy."""
        self._written()
        with self._cap.uncounted():  # in host memory
            lanes, losses = self.lanes.copied(), self._losses[:, :step].cpu().clone()

        def write(place: int, lane: int) -> None:
            states, own = (lanes.states(place), None) if values is None else ({}, values[place])
            kept = TrialCheckpoint(step, lanes.weights(place), states, losses[place], own, lanes.buffers(place))
            save(self._folders[lane], self._laws[lane], kept)

        self._writes = [self._writers.submit(write, place, lane) for place, lane in enumerate(self.alive)]

    def _written(self) -> None:
        """Waits for the checkpoints that are being written; raises what went wrong with them."""
        writes, self._writes = self._writes, []
        for write in writes:
            write.result()

    def _result(self, place: int, values: tuple[float, ...]) -> Result:
        losses = tuple(self._losses[place].tolist())
        return Result(values, self._cap.peak, time.perf_counter() - self._began, losses)

    def _own(self, of_all: Sequence[Any]) -> list[Any]:
        return [of_all[lane] for lane in self.alive]


def _lane(outputs: Any, place: int) -> Any:
    return outputs[place] if isinstance(outputs, Tensor) else tuple(output[place] for output in outputs)


# A step of lanes: its micro-batches, each with what dropout draws in it, and their losses and gradients.

_MASK = "mask of dropout "
"""Begins the names under which masks stand beside the entries of a batch."""


class FusedStep:
    """What lanes of one shape do in a step, whether they train or are estimated; ``micro`` samples at a time."""

    def __init__(self, setting: TrialConfig, lanes: StackedModel, device: torch.device, micro: int) -> None:
        self.lanes, self.batched = lanes, Batched(setting, lanes.module, device)
        self._device, self._micro, self._size, self._shared = device, micro, setting.batch_size, False

    def micro_batches(
        self, batch: Batch, shared: bool, seeders: Sequence[Seeder], rates: Sequence[float | None], step: int
    ) -> Iterator[Batch]:
        """The parts of a batch, (lanes, batch, ...), or without lanes where all ``shared`` it; each with its masks,
        which are drawn out here, by each lane's own seed, as no graph could."""
        self._shared = shared
        for part, start in enumerate(range(0, self._size, self._micro)):
            end = min(start + self._micro, self._size)
            cut = batch if self._micro >= self._size else _cut(batch, start, end, shared)
            draws = self.batched.draws(self.lanes.parameters, self.lanes.fixed, cut, shared)
            masks = drawn(draws, seeders, rates, step, part, self._device)
            yield {**cut, **{f"{_MASK}{number}": mask for number, mask in enumerate(masks)}}

    def part(self, given: Batch, gradients: Gradients | None) -> tuple[Tensor, Gradients]:
        """The losses of a micro-batch with its masks, and its gradients, in place, on top of those before it."""
        batch = {name: value for name, value in given.items() if not name.startswith(_MASK)}
        masks = [value for name, value in given.items() if name.startswith(_MASK)]
        samples = next(iter(batch.values())).shape[0 if self._shared else 1]
        losses = self.batched.losses(self.lanes.parameters, self.lanes.fixed, batch, lambda draws: masks, self._shared)
        if self._micro < self._size:
            losses = losses * (samples / self._size)
        found = self.lanes.joined(torch.autograd.grad(losses.sum(), list(self.lanes.parameters.values())))
        before = None if gradients is None else gradients[0]
        return losses.detach(), [found if before is None else before.add_(found)]


def _cut(batch: Batch, start: int, end: int, shared: bool) -> Batch:
    return {name: value[start:end] if shared else value[:, start:end] for name, value in batch.items()}
