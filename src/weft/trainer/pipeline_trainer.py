"""A training session on one of several ranks: as ``session``, but of one stage, in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from weft.data import Batch, Data, Loader
from weft.distributed.rank_loop import Runtime
from weft.distributed.store import ControlStore
from weft.engine.cuda_graphs import CudaGraphCache
from weft.engine.layer_state import LossDigest, fingerprint, layer_digest, optimizer_states, restore
from weft.engine.rng import deterministic
from weft.errors import CheckpointError, TrainError
from weft.offload import OffloadManager
from weft.offload.setup import attach, move_buffers
from weft.pipeline.layer_updates import Snapshot
from weft.pipeline.scheduler import SchedulePolicy
from weft.pipeline.stage import Stage
from weft.pipeline.worker import OpResult, Worker
from weft.runs import Run
from weft.runs.events import Callback
from weft.space import Subnet
from weft.supernet import Chain
from weft.supernet.partition import Cut
from weft.trainer.batches import MicroBatches
from weft.trainer.checkpointing import CheckpointWriter
from weft.trainer.config import Settings
from weft.trainer.evaluate import Calibration, ForwardPipeline, Scores
from weft.trainer.metrics_log import StepLog, begun, drift
from weft.trainer.trainer import make_law, make_loader, validation_batches, validation_subnets


class PipelineTrainer:
    """One run on one rank, from its first or its next step to its last. Rank 0 keeps the log of the run.

    Of the chain only the layers of its stage need to be built; ``extremes`` are its largest and smallest subnet.
    """

    run: Run

    def __init__(
        self,
        chain: Chain,
        data: Data,
        settings: Settings,
        accord: ControlStore,
        cut: Cut,
        rules: Sequence[SchedulePolicy],
        extremes: Mapping[str, Subnet],
        split: bool = False,
    ) -> None:
        self.chain, self.data, self.settings, self.accord = chain, data, settings, accord
        # Only one user of an exact layer is in flight when a step is one micro-batch: what a graph needs.
        whole = settings.microbatches == 1 and settings.cuda_graphs and settings.device.type == "cuda"
        whole = whole and settings.residency is None  # it gives weights many addresses
        if settings.residency is not None:
            move_buffers(chain, settings.device)
        graphs = CudaGraphCache(alone=False) if whole else None
        law = make_law(settings)
        self.stage = Stage(chain, law, settings.stream, settings.device, cut, accord.rank, graphs, split)
        self.start = 0
        self.reached = 0
        """Steps that are through on this rank."""
        self.losses = LossDigest()
        self.drift: dict[str, Any] = {}
        """At the end, on every rank: how often backwards were how far ahead of their forwards, by layer."""
        self.residency: list[dict[str, Any]] = []
        """At the end, on every rank: what was moved between host and device, by rank."""
        self.offload: OffloadManager | None = None
        """What brings layers to the device, where they do not all stay there."""
        self._rules = rules
        self._extremes = dict(extremes)
        self._callbacks: tuple[Callback, ...] = ()

    def reside(self) -> None:
        """Layers live on the host, if the settings say so."""
        s = self.settings
        if s.residency is not None:
            picks = validation_subnets(self.chain, self._extremes, s).values() if s.validate else ()
            self.offload = attach(self.stage, s.residency, picks)

    def open(self, run: Run, callbacks: Sequence[Callback] = ()) -> None:
        """Events and checkpoints go into this run; on rank 0 it must be locked."""
        self.run = run
        self._callbacks = tuple(callbacks)

    def restore(self, step: int) -> None:
        """Goes back to the checkpoint of a step: the layers of this stage."""
        stage = self.stage
        own = tuple(f"{name}{mark}" for name in stage.weights for mark in ".+")
        saved = self.run.checkpoints.load(step, only=lambda name: name.startswith(own))
        layers = saved.meta["layers"]
        if saved.meta.get("space") != self.chain.space.id or set(layers) != set(self.chain.layers):
            raise CheckpointError(f"the checkpoint of step {step} is of another supernet")
        states = optimizer_states(saved.tensors)
        for name, weights in stage.weights.items():
            restore(weights, saved.tensors, layers[name])
        stage.resume({name: state for name, state in states.items() if name in stage.updater.parameters})
        at = saved.step * self.settings.microbatches
        if stage.norms is not None:
            stage.norms.restore(saved.meta.get("norms") or {}, at, self.settings.device)
        if stage.ties is not None:
            stage.ties.restore(saved.tensors, at, self.settings.device)
        self.losses = LossDigest(saved.meta["losses"])
        self.start = self.reached = saved.step

    def run_to_end(self, runtime: Runtime, checkpoint_every: int) -> str | None:
        """Trains what is left; the fingerprint, or None where the user stopped the run after a checkpoint."""
        s, m, stage = self.settings, self.settings.microbatches, self.stage
        self.emit("started", **begun(self.run, self.chain, self.start, s.steps))
        ledger = StepLog(s, self.losses, self.start, self.emit)
        saver = CheckpointWriter(self.run.checkpoints, self.accord)
        batches = self._batches() if stage.reads_batch() else None
        step = self.start
        try:
            with deterministic(s.device), stage.seeder.preserved():
                while step < s.steps:
                    end = self._next_stop(step)
                    stage.train_mode()
                    rule, parts = self._rules[stage.index], batches or _nothing
                    worker = Worker(stage, rule, step * m, end * m, parts, runtime.send, checkpoint_every)
                    self._drive(runtime, worker, ledger, saver)
                    total = worker.scheduler.total
                    step, stopped = total // m, total < end * m
                    self.reached = step
                    # A run that is stopped where it began has a checkpoint of that step already.
                    for snapshot in worker.finish(save=step == s.steps or (stopped and step > self.start)):
                        self._save(snapshot, ledger, saver)
                    self._log(ledger, worker, saver)
                    if stopped:
                        saver.close()
                        self._log(ledger, worker, saver)
                        return None
                    if s.validate:
                        self._validate(runtime, step)
                saver.close()
                self._announce(saver)
                stage.eval_mode()
                return self._fingerprint(ledger)
        finally:
            if batches is not None:
                batches.close()
            stage.eval_mode()

    def emit(self, event: str, **fields: Any) -> None:
        """Rank 0 writes an event and shows it to the callbacks; the others are silent."""
        if self.stage.is_first:
            self.run.events.append(event, **fields)
            for callback in self._callbacks:
                callback({"event": event, **fields})

    def _next_stop(self, step: int) -> int:
        validate = self.settings.validate
        if validate is None:
            return self.settings.steps
        return min((step // validate.every + 1) * validate.every, self.settings.steps)

    def _batches(self) -> MicroBatches:
        s = self.settings
        return MicroBatches(make_loader(self.data, s), self.start, s.steps, s.microbatches, self.stage.law.parts)

    def _drive(self, runtime: Runtime, worker: Worker, ledger: StepLog, saver: CheckpointWriter) -> None:
        shown = 0.0

        def on_done(done: OpResult | None) -> None:
            nonlocal shown
            if done is not None and done.snapshots:
                self._log(ledger, worker, saver)
                for snapshot in done.snapshots:
                    self._save(snapshot, ledger, saver)
            if worker.reports or saver.published:
                self._log(ledger, worker, saver)
            saver.check()
            if self.stage.is_first and runtime.told != shown:
                shown = runtime.told
                every = {0: runtime.figures, **runtime.watch.others()}
                told = [every.get(rank, {}) for rank in range(self.accord.world)]
                self.emit(
                    "pipeline",
                    utilisation=[own.get("busy") for own in told],  # None: it has not told yet
                    in_flight=[int(own.get("in_flight", 0)) for own in told],
                )
                if self.offload is not None:
                    self.emit("residency", stages=[own["residency"] for own in told if "residency" in own])

        runtime.drive(worker, on_done)

    def _log(self, ledger: StepLog, worker: Worker, saver: CheckpointWriter) -> None:
        for n, report in worker.reports if self.stage.is_first else ():
            if self.settings.nonfinite == "skip" or bool(torch.isfinite(report[0])):
                ledger.add(n, report)  # else the backward of this micro-batch will say what is wrong
        worker.reports.clear()
        self._announce(saver)

    def _announce(self, saver: CheckpointWriter) -> None:
        while saver.published:
            step, seconds = saver.published.pop(0)
            self.emit("checkpoint", at=step, seconds=seconds)

    def _save(self, snapshot: Snapshot, ledger: StepLog, saver: CheckpointWriter) -> None:
        step = snapshot.at // self.settings.microbatches
        meta: dict[str, Any] = {}
        if self.stage.is_first:
            self.run.events.flush()
            ledger.forget_before(step)
            meta = {"space": self.chain.space.id, "seed": self.settings.seed, "losses": ledger.digests[step]}
            if self.stage.norms is not None:
                meta["norms"] = snapshot.norms
        saver.put(step, snapshot, meta)

    def _fingerprint(self, ledger: StepLog) -> str:
        own = {name: layer_digest(w, self.stage.updater) for name, w in self.stage.weights.items()}
        layers: dict[str, str] = {}
        for part in self.accord.gather("digests", own):
            layers |= part
        for part in self.accord.gather("drifts", drift(self.stage.weights)):
            self.drift |= part
        if self.offload is not None:
            self.residency = self.accord.gather("residency", self.offload.stats())
        if self.stage.is_first:
            self.accord.tell("fingerprint", fingerprint(layers, ledger.losses))
        return str(self.accord.hear("fingerprint"))

    def _validate(self, runtime: Runtime, step: int) -> None:
        """The picks go through the stages in order, forwards only: first the batches that set the norms, then all
        validation data."""
        options, s, stage = self.settings.validate, self.settings, self.stage
        assert options is not None and self.data.validation is not None  # noqa: PT018
        picks = validation_subnets(self.chain, self._extremes, s)
        # A rank that still puts its last weights in order would take a message of the relay for one of training.
        self.accord.gather(f"trained/{step}", None)
        stage.eval_mode()
        held = Loader(self.data.validation, options.batch_size, 0, shuffle=False, device=s.device)
        train = make_loader(self.data, s)
        relay = ForwardPipeline(runtime.transport, stage, max(rule.window for rule in self._rules))
        for name, subnet in picks.items():
            scores = Scores(s.loss, s.metrics)
            own = stage.modules(subnet) if options.recalibrate else ()
            names = [layer.name for layer in stage.route(subnet)]
            lent = nullcontext() if self.offload is None else self.offload.pinned_on_device(names)
            with lent, Calibration(own) as norms:
                first = (train.batch(number) if stage.reads_batch() else {} for number in range(options.recalibrate))
                for _ in relay.forward(subnet, first):
                    pass
                norms.freeze()
                for outputs, batch in relay.forward(subnet, validation_batches(held, s, step)):
                    with torch.inference_mode(), stage.precision():
                        scores.add(outputs, batch)
            if stage.is_last:
                self.accord.tell(f"scores/{step}/{name}", scores.means())
            if stage.is_first:
                found = self.accord.hear(f"scores/{step}/{name}")
                self.emit("validation", step=step - 1, pick=name, subnet=subnet.id, scores=found)
        relay.close()
        # A rank that still waits here for word of the next one would take a message of training for one of the relay.
        self.accord.gather(f"validated/{step}", None)


def _nothing(n: int) -> Batch:
    raise TrainError(f"a stage without inputs, loss or side inputs asked for micro-batch {n}")
