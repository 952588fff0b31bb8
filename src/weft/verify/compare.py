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
from weft.verify.diagnose import KERNEL, UNKNOWN, Cause, Suspect, kernel_cause
from weft.verify.record import (
    PLACES,
    Difference,
    LayerUse,
    RecordingFactory,
    RunRecord,
    first_difference,
    first_loss,
    fresh,
    read_records,
)

log = logging.getLogger("weft.pipeline")


@dataclass(frozen=True, slots=True)
class RunVariant:
    stages: int
    resumed: bool = False

    def __str__(self) -> str:
        return f"{self.stages} stage{'s' * (self.stages > 1)}{', stopped and resumed' * self.resumed}"


@dataclass(frozen=True, slots=True)
class Outcome:
    variant: RunVariant
    folder: Path
    seconds: float
    fingerprint: str | None
    error: str | None

    @property
    def run(self) -> Run:
        return Run.open(self.folder / "run")

    def row(self, equal: bool) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ("fingerprint", "seconds", "error")}
        return {**asdict(self.variant), **values, "equal": equal}


def rate_of_whole_run(optimizer: Optimizer, whole: int, step: int, steps: int) -> float:
    """The schedule of a run of which only the first steps are trained."""
    return optimizer.lr_factor(step, whole)


@dataclass(frozen=True)
class VerifyCase:
    """The first steps of a run, with the learning rates that they have in the whole of it, and without validation."""

    net: Chain | Factory
    data: Any
    config: TrainConfig
    execution: Execution
    chain: Chain
    step: TrainStep

    def train(self, variant: RunVariant, folder: Path, record: bool = False) -> Outcome:
        """Trains one variant. An error that only this variant meets is part of the outcome; an error that the run also
        has on one device is raised."""
        folder.mkdir()
        steps, cut = self.config.steps, self.execution.cut
        execution = replace(
            self.execution,
            stages=variant.stages,
            cut=cut if cut is not None and len(cut) == variant.stages - 1 else None,
            max_restarts=0,
            # The replay of a graph would not call the hooks that record.
            cuda_graphs=self.execution.cuda_graphs and not record,
        )
        every = max(1, steps // 2) if variant.resumed else steps
        run = RunConfig(name="run", folder=folder, checkpoint_every=every)
        resume = False
        net = RecordingFactory(self.net, folder) if record else partial(fresh, self.net)
        began = time.perf_counter()
        fingerprint = error = None
        log.addFilter(_is_error)
        try:
            if variant.resumed and steps > 1:
                with suppress(_Stopped):
                    train(net, self.data, self.config, execution=execution, run=run, callbacks=[_stop_at_checkpoint])
                resume = True
            done = train(net, self.data, self.config, execution=execution, run=run, resume=resume)
            fingerprint = done.fingerprint
        except Exception as problem:
            error = str(problem)
            if kernel_cause(error) is None and (variant == RunVariant(1) or not isinstance(problem, WeftError)):
                raise
        finally:
            log.removeFilter(_is_error)
        return Outcome(variant, folder, time.perf_counter() - began, fingerprint, error)

    def layer_use(self) -> LayerUse:
        s, chain = self.step, self.chain
        routes = [[layer.name for layer in chain.route(s.subnet(n))] for n in range(s.steps * s.microbatches)]
        schedules = {
            name: version_schedule(s.consistency[name], layer.block, len(chain.blocks), s.microbatches, s.steps)
            for name, layer in chain.layers.items()
        }
        return LayerUse(s.microbatches, routes, schedules)

    def evidence(self, outcome: Outcome) -> RunRecord:
        """Losses, the last checkpoint and, if the run was recorded, every forward."""
        run, use = outcome.run, self.layer_use()
        losses = {event["step"]: event["loss"] for event in run.events.read() if event["event"] == "step"}
        saved = run.checkpoints.load().tensors
        layers = {
            layer: tensors_digest({name: saved[name] for name in saved if name.startswith((f"{layer}.", f"{layer}+"))})
            for layer in self.chain.layers
        }
        return RunRecord(losses, layers, read_records(outcome.folder, self.step.seed, use))


def make_case(net: Chain | Factory, data: Any, parts: Parts, stages: Sequence[int], steps: int) -> VerifyCase:
    """The case of a run's configuration; raises PipelineError for numbers of stages that the chain cannot have."""
    if read_env() is not None:
        raise PipelineError("verification starts the stages by itself: run it without torchrun")
    if steps < 1:
        raise TrainError(f"steps={steps}: at least one step must be trained to compare anything")
    config, execution, _ = parts
    optimizer = config.optimizer
    assert isinstance(optimizer, Optimizer)
    whole = optimizer.with_schedule(partial(rate_of_whole_run, optimizer, config.steps))
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


STEPS = 50
"""Steps that are trained at most if the user does not say."""


def verify_run(
    net: Chain | Factory,
    data: Any,
    parts: Parts,
    stages: Sequence[int],
    *,
    steps: int = STEPS,
    on_variant: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Trains the first steps on one stage, again with a stop and a resume in the middle, and on every number of stages.

    ``net``, ``data`` and the three ``parts`` of the configuration are those of ``weft.train``. ``equal`` says whether
    all ``rows`` have the fingerprint of the first. If not, ``difference`` has the first step and layer in which they
    differ, and ``cause`` the likely cause, which is found by running that layer twice in one process. ``on_variant``
    gets the name of each variant before it is trained.
    """
    case = make_case(net, data, parts, stages, steps)
    say = on_variant or (lambda name: None)
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="weft-verify-") as folder:
        for variant in (RunVariant(1), RunVariant(1, resumed=True), *map(RunVariant, sorted(set(stages) - {1}))):
            say(str(variant))
            found.append(case.train(variant, Path(folder) / f"row{len(found)}"))
        first = found[0]
        failed = [outcome for outcome in found if outcome.error or outcome.fingerprint != first.fingerprint]
        verdict: dict[str, Any] = {
            "equal": not failed,
            "steps": case.config.steps,
            "threads": torch.get_num_threads(),
            "rows": [outcome.row(outcome not in failed) for outcome in found],
            "difference": None,
            "cause": None,
        }
        if failed:
            say("what differs")
            where, why = _explained(case, first, failed[0], Path(folder))
            what = "it is not known where" if where.place is None else PLACES[where.place]
            difference = {**asdict(where), "what": what, "run": str(failed[0].variant)}
            verdict |= {"difference": difference, "cause": asdict(why)}
    return verdict


def _explained(case: VerifyCase, first: Outcome, failed: Outcome, folder: Path) -> tuple[Difference, Cause]:
    """Where and why a run differs from the first one."""

    def load() -> Any:
        return as_data(case.data, case.config.seed)

    suspect = Suspect(case.net, load, case.step, case.execution)
    if failed.error is not None:
        return _error_explained(suspect, failed)
    variants = {"first": first.variant, "second": failed.variant}
    pair = [case.train(variant, folder / f"recorded-{name}", record=True) for name, variant in variants.items()]
    where = first_difference(case.layer_use(), case.evidence(pair[0]), case.evidence(pair[1]))
    if where is not None:
        return where, suspect.cause(where) or _process_dependent(where, failed.variant)
    # With records, the same two runs agree: only the losses of the first ones are left to compare.
    step = first_loss(case.evidence(first), case.evidence(failed))
    where = Difference(case.config.steps - 1 if step is None else step, None, None)
    return where, _not_reproduced(case)


def _error_explained(suspect: Suspect, failed: Outcome) -> tuple[Difference, Cause]:
    assert failed.error is not None
    try:
        step = next((event["at"] for event in failed.run.events.read() if event["event"] == "failed"), 0)
    except RunError:  # it had not begun
        step = 0
    cause = kernel_cause(failed.error)
    if cause is not None:
        layer = re.match(r".*?layer '(.*?)' fails", failed.error)
        name = layer[1] if layer else next((n for n, wrong in suspect.layers(step) if wrong), None)
        return Difference(step, name, "kernel"), cause
    where = Difference(0, None, "batch")
    cause = suspect.cause(where)
    if cause is None:
        raise PipelineError(f"on {failed.variant}: {failed.error}")
    return where, cause


def _process_dependent(where: Difference, variant: RunVariant) -> Cause:
    part = "the batch" if where.place == "batch" else "the loss" if where.layer is None else f"layer '{where.layer}'"
    why = f"{part} gives the same when it is done twice in one process, and another result on {variant}"
    threads = torch.get_num_threads()
    hint = "it may depend on its process (environment, number, order of files or sets) or on what ran before it there"
    if threads > 1:
        hint += f"; or on its {threads} threads: try execution.threads = 1"
    return Cause(UNKNOWN, f"{why}: {hint}", "make it a function of its inputs alone")


def _not_reproduced(case: VerifyCase) -> Cause:
    if torch.device(case.execution.device).type == "cuda" and case.execution.cuda_graphs:
        why = "without CUDA graphs the same runs agree"
        return Cause(KERNEL, why, "set execution.cuda_graphs = false, and report it with the layers that you use")
    why = "the same two runs, done again, agree: the difference comes and goes"
    return Cause(UNKNOWN, why, "look for work that runs beside the training, such as a thread that changes the data")
