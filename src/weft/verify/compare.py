"""The run that is verified, cut to its first steps, and the ways to train it."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from weft.errors import PipelineError, TrainError, WeftError
from weft.pipeline.consistency import clock
from weft.pipeline.fingerprint import tensors_digest
from weft.pipeline.ranks import ranks
from weft.pipeline.rate import Schedule, make_schedule
from weft.pipeline.settings import Settings, make_settings
from weft.pipeline.train import train
from weft.plan.cut import check_stages
from weft.runs import Run
from weft.supernet import Chain, Factory, initialise
from weft.verification.cause import kernel
from weft.verification.difference import Evidence, Plan
from weft.verification.recorder import Recorded, fresh, read_records

log = logging.getLogger("weft.pipeline")

_SETTINGS = inspect.signature(make_settings).parameters


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the same law."""

    stages: int
    resumed: bool = False

    def __str__(self) -> str:
        return f"{self.stages} stage{'s' * (self.stages > 1)}{', stopped and resumed' * self.resumed}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one run."""

    way: Way
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

    kind: str | Schedule
    warmup: int
    steps: int

    def __call__(self, step: int, steps: int) -> float:
        return make_schedule(self.kind, self.warmup)(step, self.steps)


@dataclass(frozen=True)
class Case:
    """The first steps of a run, with the learning rates that they have in the whole of it, and without validation."""

    net: Chain | Factory
    data: Any
    arguments: Mapping[str, Any]
    chain: Chain
    settings: Settings

    def train(self, way: Way, folder: Path, record: bool = False) -> Outcome:
        """Trains it one way. What another way of running makes of it, an error included, is the outcome; what is wrong
        with the run itself is raised."""
        folder.mkdir()
        steps, cut = self.settings.steps, self.arguments.get("cut")
        placed = self.arguments.get("stages") == way.stages
        options: dict[str, Any] = {
            **self.arguments,
            "runs": folder,
            "run": "run",
            "stages": way.stages,
            "ranks": self.arguments.get("ranks") if placed else None,
            "placement": self.arguments.get("placement") if placed else None,
            "cut": cut if cut is not None and len(cut) == way.stages - 1 else None,
            "checkpoint_every": max(1, steps // 2) if way.resumed else steps,
            "restarts": 0,
        }
        if record:
            options["cuda_graphs"] = False  # a replay passes by what records
        net = Recorded(self.net, folder) if record else partial(fresh, self.net)
        began = time.perf_counter()
        fingerprint = error = None
        log.addFilter(_is_error)
        try:
            if way.resumed and steps > 1:
                with suppress(_Stopped):
                    train(net, self.data, **options, callbacks=[_stop_at_checkpoint])
                options["resume"] = True
            fingerprint = train(net, self.data, **options).fingerprint
        except Exception as problem:
            error = str(problem)
            if kernel(error) is None and (way == Way(1) or not isinstance(problem, WeftError)):
                raise
        finally:
            log.removeFilter(_is_error)
        return Outcome(way, folder, time.perf_counter() - began, fingerprint, error)

    def plan(self) -> Plan:
        """Which layers every micro-batch uses."""
        s, blocks = self.settings, len(self.chain.blocks)
        picks = [s.stream[step] for step in range(s.steps)]
        subnets = [step[j % len(step)] for step in picks for j in range(s.microbatches)]
        clocks = {
            name: clock(s.consistency[name], layer.block, blocks, s.microbatches, s.steps)
            for name, layer in self.chain.layers.items()
        }
        return Plan(s.microbatches, [[layer.name for layer in self.chain.route(subnet)] for subnet in subnets], clocks)

    def evidence(self, outcome: Outcome) -> Evidence:
        """Losses, the last checkpoint and, if the run was recorded, every forward."""
        run, s, plan = outcome.run, self.settings, self.plan()
        losses = {event["step"]: event["loss"] for event in run.events.read() if event["event"] == "step"}
        layers: dict[str, dict[str, Any]] = {name: {} for name in self.chain.layers}
        for name, tensor in run.checkpoints.load().tensors.items():
            layers[_layer_of(name, tuple(layers))][name] = tensor
        records = read_records(outcome.folder, s.seed, s.microbatches, plan.routes)
        return Evidence(losses, {name: tensors_digest(tensors) for name, tensors in layers.items()}, records)


def make_case(net: Chain | Factory, data: Any, arguments: Mapping[str, Any], stages: Sequence[int], steps: int) -> Case:
    """The case that the arguments of ``weft.train`` mean; numbers of stages that cannot be are refused."""
    if ranks() is not None:
        raise PipelineError("verification starts the stages by itself: run it without torchrun")
    if steps < 1:
        raise TrainError(f"steps={steps}: at least one step must be trained to compare anything")
    total = int(arguments["steps"])
    given = {**arguments, "steps": min(steps, total), "warmup": 0, "validate": None, "trace": False}
    given["schedule"] = WholeRun(arguments.get("schedule", "cosine"), int(arguments.get("warmup", 0)), total)
    chain = initialise(partial(fresh, net), int(given.get("seed", 0)))
    for count in stages:
        check_stages(count, len(chain.blocks))
    settings = make_settings(chain, **{name: value for name, value in given.items() if name in _SETTINGS})
    return Case(net, data, given, chain, settings)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR  # how fast it would be is not asked


class _Stopped(KeyboardInterrupt):
    """Ends a run as Ctrl-C does."""


def _stop_at_checkpoint(event: Mapping[str, Any]) -> None:
    if event["event"] == "checkpoint":
        raise _Stopped


def _layer_of(name: str, layers: Sequence[str]) -> str:
    return max((layer for layer in layers if name.startswith((f"{layer}.", f"{layer}+"))), key=len)
