"""A training session on one of several stages: as ``session``, but of a part of the chain, in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weft.data import Batch, Data, Loader
from weft.errors import CheckpointError, TrainError
from weft.keys import generator
from weft.pipeline.accord import Accord
from weft.pipeline.batches import Batches
from weft.pipeline.callbacks import Callback
from weft.pipeline.determinism import deterministic
from weft.pipeline.evaluate import Calibration, Scores
from weft.pipeline.fingerprint import LossDigest, fingerprint
from weft.pipeline.graphs import Graphs
from weft.pipeline.ledger import Ledger
from weft.pipeline.relay import Relay
from weft.pipeline.runtime import Runtime
from weft.pipeline.saver import Saver
from weft.pipeline.scheduler import Rule
from weft.pipeline.session import Teacher, make_law, make_loader, taught
from weft.pipeline.settings import Settings
from weft.pipeline.stage import Snapshot, Stage
from weft.pipeline.state import layer_digest, optimizer_states, restore
from weft.pipeline.worker import Done, Worker
from weft.plan.cut import Cut
from weft.runs import Run
from weft.space import Subnet
from weft.supernet import Chain


class Staged:
    """One run on one stage, from its first or its next step to its last. Stage 0 keeps the log of the run.

    Of the chain only the layers of this stage need to be built; ``extremes`` are its largest and smallest subnet.
    """

    run: Run

    def __init__(
        self,
        chain: Chain,
        data: Data,
        settings: Settings,
        accord: Accord,
        cut: Cut,
        window: int,
        extremes: Mapping[str, Subnet],
        teacher: Teacher | None = None,
        split: bool = False,
    ) -> None:
        self.chain, self.data, self.settings, self.accord = chain, data, settings, accord
        # Only one user of an exact layer is in flight when a step is one micro-batch: what a graph needs.
        whole = settings.microbatches == 1 and settings.cuda_graphs and settings.device.type == "cuda"
        law = make_law(settings)
        graphs = Graphs() if whole else None
        self.stage = Stage(chain, law, settings.stream, settings.device, cut, accord.rank, graphs, split)
        self.start = 0
        self.reached = 0
        """Steps that are through on this stage."""
        self.losses = LossDigest()
        self._rule = Rule(window)
        self._extremes = dict(extremes)
        self._teacher = teacher if self.stage.is_last else None
        self._callbacks: tuple[Callback, ...] = ()

    def open(self, run: Run, callbacks: Sequence[Callback] = ()) -> None:
        """Events and checkpoints go into this run; on stage 0 it must be locked."""
        self.run = run
        self._callbacks = tuple(callbacks)

    def restore(self, step: int) -> None:
        """Goes back to the checkpoint of a step: the layers of this stage."""
        own = tuple(f"{name}{mark}" for name in self.stage.weights for mark in ".+")
        saved = self.run.checkpoints.load(step, only=lambda name: name.startswith(own))
        layers = saved.meta["layers"]
        if saved.meta.get("space") != self.chain.space.id or set(layers) != set(self.chain.layers):
            raise CheckpointError(f"the checkpoint of step {step} is of another supernet")
        for name, weights in self.stage.weights.items():
            restore(weights, saved.tensors, layers[name])
        states = optimizer_states(saved.tensors)
        self.stage.resume({name: state for name, state in states.items() if name in self.stage.updater.parameters})
        self.losses = LossDigest(saved.meta["losses"])
        self.start = self.reached = saved.step

    def run_to_end(self, runtime: Runtime, checkpoint_every: int) -> str | None:
        """Trains what is left; the fingerprint, or None where the user stopped the run after a checkpoint."""
        s, m = self.settings, self.settings.microbatches
        self.emit("started", law=dict(self.run.manifest.get("law") or {}), at=self.start, steps=s.steps)
        ledger = Ledger(s, self.losses, self.start, self.emit)
        saver = Saver(self.run.checkpoints, self.accord)
        loader = make_loader(self.data, s) if self.stage.reads_batch() else None
        change = None if self._teacher is None else self._teach
        batches = None if loader is None else Batches(loader, self.start, s.steps, m, change, self.stage.law.parts)
        step = self.start
        try:
            with deterministic(s.device), self.stage.seeder.preserved():
                while step < s.steps:
                    end = self._next_stop(step)
                    self.stage.train_mode()
                    parts = batches or _nothing
                    worker = Worker(self.stage, self._rule, step * m, end * m, parts, runtime.send, checkpoint_every)
                    self._drive(runtime, worker, ledger, saver)
                    step, stopped = worker.scheduler.total // m, worker.scheduler.total < end * m
                    self.reached = step
                    for snapshot in worker.finish(save=stopped or step == s.steps):
                        self._save(snapshot, ledger, saver)
                    self._log(ledger, worker, saver)
                    if stopped:
                        saver.close()
                        self._log(ledger, worker, saver)
                        return None
                    if s.validate and (step % s.validate.every == 0 or step == s.steps):
                        self._validate(runtime, step)
                saver.close()
                self._announce(saver)
                self.stage.eval_mode()
                return self._fingerprint(ledger)
        finally:
            if batches is not None:
                batches.close()
            self.stage.eval_mode()

    def emit(self, event: str, **fields: Any) -> None:
        """Stage 0 writes an event and shows it to the callbacks; the others are silent."""
        if self.stage.is_first:
            self.run.events.append(event, **fields)
            for callback in self._callbacks:
                callback({"event": event, **fields})

    def _next_stop(self, step: int) -> int:
        validate = self.settings.validate
        return (
            self.settings.steps
            if validate is None
            else min((step // validate.every + 1) * validate.every, self.settings.steps)
        )

    def _drive(self, runtime: Runtime, worker: Worker, ledger: Ledger, saver: Saver) -> None:
        shown = 0.0

        def on_done(done: Done | None) -> None:
            nonlocal shown
            for snapshot in done.snapshots if done is not None else ():
                self._log(ledger, worker, saver)
                self._save(snapshot, ledger, saver)
            if worker.reports or saver.published:
                self._log(ledger, worker, saver)
            saver.check()
            if self.stage.is_first and runtime.told != shown:
                shown = runtime.told
                every = {0: runtime.figures, **runtime.watch.others()}
                told = [every.get(rank, {}) for rank in range(self.stage.stages)]
                self.emit(
                    "pipeline",
                    utilisation=[figures.get("busy", 0.0) for figures in told],
                    in_flight=[int(figures.get("in_flight", 0)) for figures in told],
                )

        runtime.drive(worker, on_done)

    def _log(self, ledger: Ledger, worker: Worker, saver: Saver) -> None:
        for n, report in worker.reports if self.stage.is_first else ():
            if self.settings.nonfinite == "skip" or bool(torch.isfinite(report[0])):
                ledger.add(n, report)  # else the backward of this micro-batch will say what is wrong
        worker.reports.clear()
        self._announce(saver)

    def _announce(self, saver: Saver) -> None:
        while saver.published:
            step, seconds = saver.published.pop(0)
            self.emit("checkpoint", at=step, seconds=seconds)

    def _save(self, snapshot: Snapshot, ledger: Ledger, saver: Saver) -> None:
        step = snapshot.at // self.settings.microbatches
        meta: dict[str, Any] = {}
        if self.stage.is_first:
            self.run.events.flush()
            ledger.forget_before(step)
            meta = {"space": self.chain.space.id, "seed": self.settings.seed, "losses": ledger.digests[step]}
        saver.put(step, snapshot, meta)

    def _fingerprint(self, ledger: Ledger) -> str:
        own = {name: layer_digest(w, self.stage.updater) for name, w in self.stage.weights.items()}
        layers: dict[str, str] = {}
        for part in self.accord.gather("digests", own):
            layers |= part
        if self.stage.is_first:  # which alone has seen every loss
            self.accord.tell("fingerprint", fingerprint(layers, ledger.losses))
        return str(self.accord.hear("fingerprint"))

    def _teach(self, batch: Batch) -> Batch:
        return taught(self.chain, self._teacher, batch)

    def _validate(self, runtime: Runtime, step: int) -> None:
        """The picks go through the stages in order, forwards only: first the batches that set the norms, then all
        validation data."""
        options, s = self.settings.validate, self.settings
        assert options is not None and self.data.validation is not None  # noqa: PT018
        rng = generator(s.seed, "validate")
        picks = dict(self._extremes)
        if self.chain.space.choices:
            picks |= {f"random{k}": self.chain.space.sample(rng) for k in range(options.random)}
        self.stage.eval_mode()
        held = Loader(self.data.validation, options.batch_size, 0, shuffle=False, device=s.device)
        train = make_loader(self.data, s)
        relay = Relay(runtime.transport, self.stage, self._rule.window)
        for name, subnet in picks.items():
            scores = Scores(s.loss, s.metrics)
            with Calibration(self.stage.modules(subnet) if options.recalibrate else ()) as norms:
                for number in range(options.recalibrate):
                    relay.forward(subnet, train.batch(number) if self.stage.reads_batch() else {})
                norms.freeze()
                for batch in held.all():
                    outputs = relay.forward(subnet, batch)
                    if outputs is not None:
                        with torch.inference_mode(), self.stage.precision():
                            scores.add(outputs, batch)
            if self.stage.is_last:
                self.accord.tell(f"scores/{step}/{name}", scores.means())
            if self.stage.is_first:
                found = self.accord.hear(f"scores/{step}/{name}")
                self.emit("validation", step=step - 1, pick=name, subnet=subnet.id, scores=found)
        relay.close()
        # A stage that still waits here for word of the next one would take a message of training for one of the relay.
        self.accord.gather(f"validated/{step}", None)


def _nothing(n: int) -> Batch:
    raise TrainError(f"a stage without inputs, loss or side inputs asked for micro-batch {n}")
