"""weft verify: the first steps of a run, trained in several ways and compared bit for bit."""

from __future__ import annotations

import logging
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.data import as_data
from weft.distributed.env import read_env
from weft.engine.consistency import version_schedule
from weft.engine.layer_state import tensors_digest
from weft.engine.optimizer import Optimizer
from weft.engine.train_step import TrainStep
from weft.errors import PipelineError, RunError, TrainError, WeftError
from weft.runs import Run
from weft.supernet import Chain, Factory, initialise
from weft.supernet.partition import check_stages
from weft.trainer.api import train
from weft.trainer.config import Execution, Parts, RunConfig, TrainConfig, resolve
from weft.verify.diagnose import KERNEL, UNKNOWN, Cause, Subject, kernel
from weft.verify.record import (
    PLACES,
    Difference,
    LayerUse,
    Recorded,
    RunRecord,
    first_difference,
    first_loss,
    fresh,
    read_records,
)

log = logging.getLogger("weft.pipeline")


@dataclass(frozen=True, slots=True)
class RunVariant:
    """One way to train the same run."""

    stages: int
    resumed: bool = False

    def __str__(self) -> str:
        return f"{self.stages} stage{'s' * (self.stages > 1)}{', stopped and resumed' * self.resumed}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one way of training ended."""

    way: RunVariant
    folder: Path
    seconds: float
    fingerprint: str | None = None
    error: str | None = None

    @property
    def run(self) -> Run:
        return Run.open(self.folder / "run")


@dataclass(frozen=True)
class WholeRun:
    """The schedule of a run of which only the first steps are trained."""

    optimizer: Optimizer
    steps: int

    def __call__(self, step: int, steps: int) -> float:
        return self.optimizer.lr_factor(step, self.steps)


@dataclass(frozen=True)
class VerifyCase:
    """The first steps of a run, with the learning rates that they have in the whole of it, and without validation."""

    net: Chain | Factory
    data: Any
    config: TrainConfig
    execution: Execution
    chain: Chain
    step: TrainStep

    def train(self, way: RunVariant, folder: Path, record: bool = False) -> Outcome:
        """Trains it one way. An error that only this way meets is part of the outcome; an error that the run also has
        on one device is raised."""
        folder.mkdir()
        steps, cut = self.config.steps, self.execution.cut
        execution = replace(
            self.execution,
            stages=way.stages,
            cut=cut if cut is not None and len(cut) == way.stages - 1 else None,
            max_restarts=0,
            # The replay of a graph would not call the hooks that record.
            cuda_graphs=self.execution.cuda_graphs and not record,
        )
        kept = RunConfig(name="run", folder=folder, checkpoint_every=max(1, steps // 2) if way.resumed else steps)
        resume = False
        net = Recorded(self.net, folder) if record else partial(fresh, self.net)
        began = time.perf_counter()
        fingerprint = error = None
        log.addFilter(_is_error)
        try:
            if way.resumed and steps > 1:
                with suppress(_Stopped):
                    train(net, self.data, self.config, execution=execution, run=kept, callbacks=[_stop_at_checkpoint])
                resume = True
            done = train(net, self.data, self.config, execution=execution, run=kept, resume=resume)
            fingerprint = done.fingerprint
        except Exception as problem:
            error = str(problem)
            if kernel(error) is None and (way == RunVariant(1) or not isinstance(problem, WeftError)):
                raise
        finally:
            log.removeFilter(_is_error)
        return Outcome(way, folder, time.perf_counter() - began, fingerprint, error)

    def layer_use(self) -> LayerUse:
        """Which layers every micro-batch uses."""
        s, blocks = self.step, len(self.chain.blocks)
        subnets = [s.subnet(n) for n in range(s.steps * s.microbatches)]
        clocks = {
            name: version_schedule(s.consistency[name], layer.block, blocks, s.microbatches, s.steps)
            for name, layer in self.chain.layers.items()
        }
        return LayerUse(
            s.microbatches, [[layer.name for layer in self.chain.route(subnet)] for subnet in subnets], clocks
        )

    def evidence(self, outcome: Outcome) -> RunRecord:
        """Losses, the last checkpoint and, if the run was recorded, every forward."""
        run, use = outcome.run, self.layer_use()
        losses = {event["step"]: event["loss"] for event in run.events.read() if event["event"] == "step"}
        layers: dict[str, dict[str, Any]] = {name: {} for name in self.chain.layers}
        for name, tensor in run.checkpoints.load().tensors.items():
            layers[_layer_of(name, tuple(layers))][name] = tensor
        records = read_records(outcome.folder, self.step.seed, use)
        return RunRecord(losses, {name: tensors_digest(tensors) for name, tensors in layers.items()}, records)


def make_case(net: Chain | Factory, data: Any, parts: Parts, stages: Sequence[int], steps: int) -> VerifyCase:
    """The case of a run's configuration; raises PipelineError for numbers of stages that the chain cannot have."""
    if read_env() is not None:
        raise PipelineError("verification starts the stages by itself: run it without torchrun")
    if steps < 1:
        raise TrainError(f"steps={steps}: at least one step must be trained to compare anything")
    config, execution, _ = parts
    optimizer = config.optimizer
    assert isinstance(optimizer, Optimizer)
    whole = optimizer.with_schedule(WholeRun(optimizer, config.steps))
    config = replace(config, steps=min(steps, config.steps), optimizer=whole)
    chain = initialise(partial(fresh, net), config.seed)
    for count in stages:
        check_stages(count, len(chain.blocks))
    return VerifyCase(net, data, config, replace(execution, trace=False), chain, resolve(config, chain))


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR  # verification measures no speed


class _Stopped(KeyboardInterrupt):
    """Ends a run as Ctrl-C does."""


def _stop_at_checkpoint(event: Mapping[str, Any]) -> None:
    if event["event"] == "checkpoint":
        raise _Stopped


def _layer_of(name: str, layers: Sequence[str]) -> str:
    return max((layer for layer in layers if name.startswith((f"{layer}.", f"{layer}+"))), key=len)


STEPS = 50
"""Steps that are trained at most if the user does not say."""


def verify_run(
    net: Chain | Factory,
    data: Any,
    parts: Parts,
    stages: Sequence[int],
    *,
    steps: int = STEPS,
    on_way: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Trains the first steps on one stage, again with a stop and a resume in the middle, and on every number of stages.

    ``net``, ``data`` and the three ``parts`` of the configuration are those of ``weft.train``. ``equal`` says whether
    all ``rows`` have the fingerprint of the first. If not, ``difference`` has the first step and layer in which they
    differ, and ``cause`` the likely cause, which is found by running that layer twice in one process. ``on_way`` gets
    the name of each way before it is trained.
    """
    case = make_case(net, data, parts, stages, steps)
    say = on_way or (lambda name: None)
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="weft-verify-") as folder:
        for way in (RunVariant(1), RunVariant(1, resumed=True), *map(RunVariant, sorted(set(stages) - {1}))):
            say(str(way))
            found.append(case.train(way, Path(folder) / f"row{len(found)}"))
        first = found[0]
        failed = [outcome for outcome in found if outcome.error or outcome.fingerprint != first.fingerprint]
        verdict: dict[str, Any] = {
            "equal": not failed,
            "steps": case.config.steps,
            "threads": torch.get_num_threads(),
            "rows": [_row(outcome, outcome not in failed) for outcome in found],
            "difference": None,
            "cause": None,
        }
        if failed:
            say("what differs")
            where, why = _explained(case, first, failed[0], Path(folder))
            what = "it is not known where" if where.place is None else PLACES[where.place]
            verdict |= {"difference": {**asdict(where), "what": what, "run": str(failed[0].way)}, "cause": asdict(why)}
    return verdict


def _row(outcome: Outcome, equal: bool) -> dict[str, Any]:
    way = {"stages": outcome.way.stages, "resumed": outcome.way.resumed}
    return {
        **way,
        "fingerprint": outcome.fingerprint,
        "equal": equal,
        "seconds": outcome.seconds,
        "error": outcome.error,
    }


def _explained(case: VerifyCase, first: Outcome, failed: Outcome, folder: Path) -> tuple[Difference, Cause]:
    """Where and why a run differs from the first one."""

    def load() -> Any:
        return as_data(case.data, case.config.seed)

    subject = Subject(case.net, load, case.step, case.execution)
    if failed.error is not None:
        return _error_explained(subject, failed)
    ways = {"first": first.way, "second": failed.way}
    pair = [case.train(way, folder / f"recorded-{name}", record=True) for name, way in ways.items()]
    where = first_difference(case.layer_use(), case.evidence(pair[0]), case.evidence(pair[1]))
    if where is not None:
        return where, subject.cause(where) or _elsewhere(where, failed.way)
    # With records, the same two runs agree: only the losses of the first ones are left to compare.
    step = first_loss(case.evidence(first), case.evidence(failed))
    where = Difference(case.config.steps - 1 if step is None else step, None, None)
    return where, _gone(case)


def _error_explained(subject: Subject, failed: Outcome) -> tuple[Difference, Cause]:
    assert failed.error is not None
    try:
        step = next((event["at"] for event in failed.run.events.read() if event["event"] == "failed"), 0)
    except RunError:  # it had not begun
        step = 0
    cause = kernel(failed.error)
    if cause is not None:
        layer = re.match(r".*?layer '(.*?)' fails", failed.error)
        name = layer[1] if layer else next((n for n, wrong in subject.layers(step) if wrong), None)
        return Difference(step, name, "kernel"), cause
    where = Difference(0, None, "batch")
    cause = subject.cause(where)
    if cause is None:
        raise PipelineError(f"on {failed.way}: {failed.error}")
    return where, cause


def _elsewhere(where: Difference, way: RunVariant) -> Cause:
    part = "the batch" if where.place == "batch" else "the loss" if where.layer is None else f"layer '{where.layer}'"
    why = f"{part} gives the same when it is done twice in one process, and another result on {way}"
    threads = torch.get_num_threads()
    hint = "it may depend on its process (environment, number, order of files or sets) or on what ran before it there"
    if threads > 1:
        hint += f"; or on its {threads} threads: try execution.threads = 1"
    return Cause(UNKNOWN, f"{why}: {hint}", "make it a function of its inputs alone")


def _gone(case: VerifyCase) -> Cause:
    if torch.device(case.execution.device).type == "cuda" and case.execution.cuda_graphs:
        why = "without CUDA graphs the same runs agree"
        return Cause(KERNEL, why, "set execution.cuda_graphs = false, and report it with the layers that you use")
    why = (
        "the same two runs, done again, agree: the difference comes and goes, as with threads of your own or memory "
        "that nobody initialised"
    )
    return Cause(
        UNKNOWN, why, "look for work that runs beside the training, such as another thread that changes the data"
    )
