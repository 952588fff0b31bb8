"""One run from its first, or its next, step to its last: its log, validation, checkpoints, resume and fingerprint.

The steps themselves are the work of an engine: ``DeviceEngine`` on one device, the sequential reference step after
step; ``PipelineEngine`` on several stages, where every process has a trainer of its own and that of rank 0 writes the
log.
"""

from __future__ import annotations

import json
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from weft.data import Data, Loader
from weft.distributed.env import on_signals
from weft.distributed.store import ControlStore
from weft.distributed.transport import PeerLost
from weft.elastic.mixture import choice_options
from weft.engine.cuda_graphs import CudaGraphCache
from weft.engine.layer_state import CheckpointPart, fingerprint, layer_digest
from weft.engine.reference import SequentialReference
from weft.engine.rng import deterministic
from weft.engine.train_step import TrainedLayers, TrainStep
from weft.errors import CheckpointError, TrainError, WeftError
from weft.offload import OffloadConfig, OffloadManager
from weft.offload.setup import attach, move_buffers
from weft.runs import Run
from weft.runs.events import Callback
from weft.space import Subnet
from weft.supernet import Chain
from weft.supernet.mixed_chain import MixedChain
from weft.trainer.checkpointing import CheckpointWriter
from weft.trainer.config import Execution, Validation
from weft.trainer.evaluate import evaluate, recalibrated
from weft.trainer.metrics_log import AsyncReadback, LossDigest, StepRecord
from weft.utils.malloc import keep_freed_memory
from weft.utils.rng import generator

OFFLOAD_EVENT = 0.5
"""Seconds between two events about what lies on the device."""

Event = tuple[str, Mapping[str, Any]]
"""What else an engine has to say: the name of an event and its fields."""


class Engine(ABC):
    """Trains the steps of a run; a subclass makes its ``layers``."""

    layers: TrainedLayers

    def __init__(self, chain: Chain, data: Data, config: TrainStep, execution: Execution) -> None:
        self.chain, self.data, self.config, self.execution = chain, data, config, execution
        self.device = torch.device(execution.device)
        self.reached = 0
        self.stopped = False
        self.offload: OffloadManager | None = None
        if execution.offload is not None:
            move_buffers(chain, self.device)

    def graphs(self, one_at_a_time: bool) -> CudaGraphCache | None:
        """CUDA graphs where the run has them. A captured layer reads its weights at one address, and an offload gives
        them many."""
        wanted = self.device.type == "cuda" and self.execution.cuda_graphs and self.execution.offload is None
        return CudaGraphCache(one_at_a_time=one_at_a_time) if wanted else None

    def start_offload(self, subnets: Mapping[str, Subnet]) -> None:
        """Where the run offloads, layers live on the host from here on; ``subnets`` are those that are scored on the
        way."""
        if isinstance(self.execution.offload, OffloadConfig):
            self.offload = attach(self.layers, self.execution.offload, subnets.values())

    @abstractmethod
    def begin(self, step: int) -> None:
        """Before the first call of ``train``: the run begins, or goes on, at this step."""

    @abstractmethod
    def train(
        self, stop: int, checkpoint_every: int, stopping: Callable[[], bool]
    ) -> Iterator[StepRecord | CheckpointPart | Event | None]:
        """Trains until step ``stop``, or the next whole step after ``stopping`` says so; None now and then, for whoever
        has to look after something else."""

    @abstractmethod
    def evaluate(
        self, step: int, subnets: Mapping[str, Subnet], validation: Validation
    ) -> Iterator[tuple[str, Mapping[str, float]]]:
        """The scores of some subnets on the validation data; on a pipeline only rank 0 gets any."""

    @abstractmethod
    def end(self) -> list[Any]:
        """After the last step: what an offload has moved, by rank."""

    @abstractmethod
    def close(self) -> None:
        """Ends what prepares batches."""


class DeviceEngine(Engine):
    def __init__(self, chain: Chain, data: Data, config: TrainStep, execution: Execution) -> None:
        super().__init__(chain, data, config, execution)
        self.layers = self._reference = SequentialReference(chain, config, self.device, self.graphs(one_at_a_time=True))
        self.loader = config.loader(data, self.device, execution.data_workers)
        self._readback = AsyncReadback(self.device)
        self._last_offload_event = 0.0

    def begin(self, step: int) -> None:
        self.reached = step
        self._batches = self.loader.iterate(step, self.config.steps)

    def train(
        self, stop: int, checkpoint_every: int, stopping: Callable[[], bool]
    ) -> Iterator[StepRecord | CheckpointPart | Event]:
        config = self.config
        while self.reached < stop:
            result = self._reference.step(self.reached, next(self._batches))
            yield from self._finite(self._readback.add(result))
            if self.offload is not None and time.perf_counter() - self._last_offload_event > OFFLOAD_EVENT:
                self._last_offload_event = time.perf_counter()
                yield "offload", {"step": self.reached, "stages": [self.offload.stats()]}
            self.reached += 1
            self.stopped = stopping()
            if self.stopped or self.reached % checkpoint_every == 0 or self.reached == config.steps:
                yield from self._finite(self._readback.drain())
                yield self._reference.snapshot(self.reached * config.microbatches)
            if self.stopped:
                return
        yield from self._finite(self._readback.drain())

    def evaluate(
        self, step: int, subnets: Mapping[str, Subnet], validation: Validation
    ) -> Iterator[tuple[str, Mapping[str, float]]]:
        assert self.data.validation is not None
        config = self.config
        loader = Loader(self.data.validation, validation.batch_size, 0, shuffle=False, device=self.device)
        for name, subnet in subnets.items():
            with recalibrated(self.chain, subnet, (self.loader.batch(k) for k in range(validation.bn_batches))):
                batches = config.validation_batches(loader, step)
                yield name, evaluate(self.chain, subnet, batches, config.loss, config.metrics, config.precision)

    def end(self) -> list[Any]:
        if self.offload is None:
            return []
        self.offload.flush()
        return [self.offload.stats()]

    def close(self) -> None:
        self._batches.close()

    def _finite(self, records: Iterator[StepRecord]) -> Iterator[StepRecord]:
        """The records; on a GPU a loss that is not a number is seen some steps late, and explained then."""
        for record in records:
            bad = next((j for j, loss in enumerate(record.losses) if not math.isfinite(loss)), None)
            if self.config.on_nonfinite == "stop" and bad is not None:
                # The batch is a function of its number, so the forward can be run again.
                part = self.config.parts(self.loader.batch(record.step))[bad]
                raise self._reference.explain_nonfinite(record.step * self.config.microbatches + bad, part)
            yield record


class Trainer:
    """A run in its directory. ``extremes`` are the chain's largest and smallest subnet."""

    def __init__(
        self,
        chain: Chain,
        data: Data,
        config: TrainStep,
        engine: Engine,
        store: ControlStore,
        extremes: Mapping[str, Subnet],
        validation: Validation | None = None,
    ) -> None:
        check_validation(validation, data)
        self.chain, self.config, self.engine, self.store = chain, config, engine, store
        self.validation = validation
        self.start = 0
        self.subnets = validation_subnets(chain, extremes, config, validation)
        self._losses = LossDigest()
        self._digests: dict[int, str] = {0: self._losses.value}
        """The digest of all losses before a step, for the checkpoint of that step."""

    def open(self, run: Run, callbacks: Sequence[Callback] = (), step: int | None = None) -> None:
        """Events and checkpoints go into this run, which on rank 0 must be locked; goes on from the checkpoint of a
        step, which rank 0 has found to be whole."""
        self.run, self._callbacks = run, tuple(callbacks)
        if step is not None:
            self._restore(step)

    def _restore(self, step: int) -> None:
        layers = self.engine.layers
        own = tuple(f"{name}{mark}" for name in layers.weights for mark in ".+")
        saved = self.run.checkpoints.load(step, self.store.rank > 0, only=lambda name: name.startswith(own))
        if saved.meta.get("space") != self.chain.space.id:
            raise CheckpointError(
                f"the checkpoint is of the space {saved.meta.get('space')}, "
                f"not of this supernet's {self.chain.space.id}"
            )
        numbers = saved.meta["layers"]
        if other := sorted({*numbers} ^ {*self.chain.layers}):
            raise CheckpointError(
                f"the checkpoint and the supernet have different layers: '{other[0]}' is in one of them only"
            )
        norms = saved.meta.get("norms") or {}
        layers.restore(CheckpointPart(step * self.config.microbatches, dict(saved.tensors), numbers, norms))
        self._losses = LossDigest(saved.meta["losses"])
        self._digests = {step: self._losses.value}
        self.start = step

    def run_to_end(self, checkpoint_every: int, stopping: Callable[[], bool]) -> str:
        """Trains what is left and returns the fingerprint; on any way out the run is left so that it can be resumed.

        Raises KeyboardInterrupt after a checkpoint where the user stops the run.
        """
        config, engine = self.config, self.engine
        if engine.layers.device.type == "cpu":
            keep_freed_memory()
        self.emit("started", **self._started())
        writer = CheckpointWriter(self.run.checkpoints, self.store)
        with self._reported(), deterministic(engine.layers.device), engine.layers.seeder.preserved():
            engine.begin(self.start)
            try:
                while engine.reached < config.steps:
                    engine.layers.train_mode()
                    for item in engine.train(self._next_stop(), checkpoint_every, stopping):
                        self._handle(item, writer)
                    if engine.stopped:
                        writer.close()
                        self._announce(writer)
                        raise KeyboardInterrupt
                    self._validate()
                writer.close()
                self._announce(writer)
                engine.layers.eval_mode()
                digest = self._fingerprint()
                moved = engine.end()
            finally:
                engine.close()
                engine.layers.eval_mode()
        fields = {"offload": moved} if moved else {}
        self.emit("finished", steps=config.steps, fingerprint=digest, version_lag=self._version_lag(), **fields)
        return digest

    def emit(self, event: str, **fields: Any) -> None:
        """Rank 0 writes an event and shows it to the callbacks; the others are silent."""
        if self.store.rank == 0:
            self.run.events.append(event, **fields)
            for callback in self._callbacks:
                callback({"event": event, **fields})

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """The log says how the run ends where it does not end well."""
        try:
            yield
        except KeyboardInterrupt:
            self.emit("stopped", at=self.engine.reached)
            raise
        except (PeerLost, SystemExit):
            if self.store.store.check(["error"]):  # another rank has said what is wrong
                self.emit("failed", at=self.engine.reached, reason=json.loads(self.store.store.get("error"))["text"])
            raise
        except Exception as problem:
            reason = str(problem) if isinstance(problem, WeftError) else f"{type(problem).__name__}: {problem}"
            self.emit("failed", at=self.engine.reached, reason=reason)
            raise

    def _handle(self, item: StepRecord | CheckpointPart | Event | None, writer: CheckpointWriter) -> None:
        match item:
            case StepRecord():
                self._losses.add(item.losses)
                self._digests[item.step + 1] = self._losses.value
                self.emit("step", **item.fields(self.config))
            case CheckpointPart():
                step = item.at // self.config.microbatches
                writer.put(step, item, self._meta(step, item) if self.store.rank == 0 else {})
            case event, fields:
                self.emit(event, **fields)
        if writer.problem is not None:
            raise writer.problem
        self._announce(writer)

    def _meta(self, step: int, snapshot: CheckpointPart) -> dict[str, Any]:
        """What a checkpoint holds beside tensors; its numbers of layers are added by the writer."""
        self.run.events.flush()
        self._digests = {at: digest for at, digest in self._digests.items() if at >= step}
        meta = {"space": self.chain.space.id, "seed": self.config.seed, "losses": self._digests[step]}
        return meta if self.engine.layers.clipper is None else {**meta, "norms": snapshot.norms}

    def _announce(self, writer: CheckpointWriter) -> None:
        while writer.published:
            step, seconds = writer.published.pop(0)
            self.emit("checkpoint", at=step, seconds=seconds)

    def _next_stop(self) -> int:
        """The step before which the run is validated, or ends."""
        if self.validation is None:
            return self.config.steps
        every = self.validation.every
        return min((self.engine.reached // every + 1) * every, self.config.steps)

    def _validate(self) -> None:
        if self.validation is None:
            return
        step = self.engine.reached
        self.engine.layers.eval_mode()
        for name, scores in self.engine.evaluate(step, self.subnets, self.validation):
            self.emit("validation", step=step - 1, pick=name, subnet=self.subnets[name].id, scores=scores)

    def _fingerprint(self) -> str:
        layers = self.engine.layers
        own = {name: layer_digest(weights, layers.optimizer) for name, weights in layers.weights.items()}
        digests: dict[str, str] = {}
        for part in self.store.gather("digests", own):
            digests |= part
        if self.store.rank == 0:
            self.store.set("fingerprint", fingerprint(digests, self._losses.value))
        return str(self.store.get("fingerprint"))

    def _version_lag(self) -> dict[str, dict[str, int]]:
        """By how many updates backwards were ahead of their forwards, by layer, and how often."""
        own = {
            name: {str(k): count for k, count in sorted(w.version_lags.items())}
            for name, w in self.engine.layers.weights.items()
            if w.version_lags
        }
        lags: dict[str, dict[str, int]] = {}
        for part in self.store.gather("version lags", own):
            lags |= part
        return lags

    def _started(self) -> dict[str, Any]:
        """What the log says at the start; of a mixture also what each number stands for that every step has."""
        fields = {
            "train_config": dict(self.run.manifest.get("train_config") or {}),
            "at": self.start,
            "steps": self.config.steps,
        }
        if isinstance(self.chain, MixedChain):
            space = self.chain.space
            fields["choices"] = [{"name": name, "options": choice_options(space, name)} for name in self.chain.order]
        return fields


def check_validation(validation: Validation | None, data: Data) -> None:
    """Raises TrainError where a run is to be validated and has no data for it."""
    if validation is not None and data.validation is None:
        raise TrainError(
            "validation needs validation data, and this data set has none: split some off it, or leave validation out"
        )


def validation_subnets(
    chain: Chain, extremes: Mapping[str, Subnet], config: TrainStep, validation: Validation | None
) -> dict[str, Subnet]:
    """The subnets that are scored on the way, by name; where there is nothing to choose, the one that there is."""
    if validation is None:
        return {}
    if not chain.space.choices:
        return {"largest": extremes["largest"]}
    if config.architecture_search is not None:  # the chain runs the mixture, whatever subnet it is given
        return {"mixture": extremes["largest"]}
    rng = generator(config.seed, "validate")
    return {**extremes, **{f"random{k}": chain.space.sample(rng) for k in range(validation.random)}}


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """SIGINT and SIGTERM ask for a stop at the next whole step; a second one acts at once. Main thread only."""
    asked = threading.Event()

    def ask(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    with on_signals(ask, "SIGINT", "SIGTERM"):
        yield asked.is_set
