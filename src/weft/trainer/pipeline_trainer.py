"""A training session on one of several ranks: as ``session``, but of a part of the chain, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from weft.data import Batch, Data, Loader
from weft.errors import CheckpointError, TrainError
from weft.pipeline.accord import Accord
from weft.pipeline.batches import Batches
from weft.pipeline.callbacks import Callback
from weft.pipeline.determinism import deterministic
from weft.pipeline.evaluate import Calibration, Scores
from weft.pipeline.fingerprint import LossDigest, fingerprint
from weft.pipeline.flow import Evaluation, Flow
from weft.pipeline.graphs import Graphs
from weft.pipeline.heap import keep_freed
from weft.pipeline.layers import Snapshot
from weft.pipeline.ledger import Ledger
from weft.pipeline.logged import begun, drift
from weft.pipeline.placement import Placement
from weft.pipeline.relay import Relay
from weft.pipeline.residency import Resident
from weft.pipeline.residency.entry import figures, prepare
from weft.pipeline.runtime import Runtime
from weft.pipeline.saver import Saver
from weft.pipeline.scheduler import Rule
from weft.pipeline.session import Teacher, held_out, make_law, make_loader, taught, validated
from weft.pipeline.settings import Settings
from weft.pipeline.stage import Stage
from weft.pipeline.state import layer_digest, optimizer_states, restore
from weft.pipeline.worker import Done, Worker
from weft.plan.cut import Cut
from weft.runs import Run
from weft.space import Subnet
from weft.supernet import Chain


class Staged:
    """One run on one rank, from its first or its next step to its last. Rank 0 keeps the log of the run.

    A rank has one stage, or several by the ``placement``. Of the chain only their layers need to be built; ``extremes``
    are its largest and smallest subnet.
    """

    run: Run

    def __init__(
        self,
        chain: Chain,
        data: Data,
        settings: Settings,
        accord: Accord,
        cut: Cut,
        placement: Placement,
        rules: Sequence[Rule],
        extremes: Mapping[str, Subnet],
        teacher: Teacher | None = None,
        split: bool = False,
    ) -> None:
        self.chain, self.data, self.settings, self.accord = chain, data, settings, accord
        # Only one user of an exact layer is in flight when a step is one micro-batch: what a graph needs.
        whole = settings.microbatches == 1 and settings.cuda_graphs and settings.device.type == "cuda"
        whole = whole and settings.residency is None  # it gives weights many addresses
        if settings.residency is not None:
            prepare(chain, settings.device)
        law = make_law(settings)
        self.stages = []
        for index in placement.stages_of(accord.rank):
            graphs = Graphs(alone=False) if whole else None
            made = Stage(chain, law, settings.stream, settings.device, cut, index, graphs, split, placement)
            self.stages.append(made)
        self.is_first = self.stages[0].is_first
        """Whether the first stage is here, which alone sees every loss."""
        self.is_last = self.stages[-1].is_last
        self.start = 0
        self.reached = 0
        """Steps that are through on this rank."""
        self.losses = LossDigest()
        self.drift: dict[str, Any] = {}
        """At the end, on every rank: how often backwards were how far ahead of their forwards, by layer."""
        self.residency: list[dict[str, Any]] = []
        """At the end, on every rank: what was moved between host and device, by rank."""
        self._placement = placement
        self._rules = rules
        self._extremes = dict(extremes)
        self._teacher = teacher if self.is_last else None
        self._callbacks: tuple[Callback, ...] = ()

    def reside(self, folder: Path) -> None:
        """Layers live on the host, if the settings say so, and in a file in the folder, unless they name another."""
        s = self.settings
        if s.residency is not None:
            picks = validated(self.chain, self._extremes, s).values() if s.validate else ()
            for stage in self.stages:
                stage.reside(s.residency, picks, folder=folder)

    @property
    def residents(self) -> list[Resident]:
        """What brings layers to the device, of every stage of the rank; none where they all stay there."""
        return [stage.memory for stage in self.stages if stage.memory is not None]

    def open(self, run: Run, callbacks: Sequence[Callback] = ()) -> None:
        """Events and checkpoints go into this run; on rank 0 it must be locked."""
        self.run = run
        self._callbacks = tuple(callbacks)

    def restore(self, step: int) -> None:
        """Goes back to the checkpoint of a step: the layers of this rank."""
        own = tuple(f"{name}{mark}" for stage in self.stages for name in stage.weights for mark in ".+")
        saved = self.run.checkpoints.load(step, only=lambda name: name.startswith(own))
        layers = saved.meta["layers"]
        if saved.meta.get("space") != self.chain.space.id or set(layers) != set(self.chain.layers):
            raise CheckpointError(f"the checkpoint of step {step} is of another supernet")
        states = optimizer_states(saved.tensors)
        for stage in self.stages:
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
        s, m = self.settings, self.settings.microbatches
        self.emit("started", **begun(self.run, self.chain, self.start, s.steps))
        ledger = Ledger(s, self.losses, self.start, self.emit)
        saver = Saver(self.run.checkpoints, self.accord, self._placement)
        batches = {stage.index: self._batches(stage) for stage in self.stages if stage.reads_batch()}
        step = self.start
        try:
            keep_freed(s.device)
            with deterministic(s.device), self.stages[0].seeder.preserved():
                while step < s.steps:
                    end = self._next_stop(step)
                    self._train_mode()
                    workers = []
                    for stage in self.stages:
                        parts = batches.get(stage.index, _nothing)
                        rule, flows = self._rules[stage.index], self._flows(stage)
                        workers.append(
                            Worker(stage, rule, step * m, end * m, parts, runtime.send, checkpoint_every, flows)
                        )
                    self._drive(runtime, workers, ledger, saver)
                    total = workers[0].scheduler.total
                    step, stopped = total // m, total < end * m
                    self.reached = step
                    for worker in workers:
                        for snapshot in worker.finish(save=stopped or step == s.steps):
                            self._save(worker.stage, snapshot, ledger, saver)
                    self._log(ledger, workers, saver)
                    if stopped:
                        saver.close()
                        self._log(ledger, workers, saver)
                        return None
                    if s.validate and (step == s.steps or (step % s.validate.every == 0 and not s.validate.flow)):
                        self._validate(runtime, step)
                saver.close()
                self._announce(saver)
                self._eval_mode()
                return self._fingerprint(ledger)
        finally:
            for own in batches.values():
                own.close()
            self._eval_mode()

    def emit(self, event: str, **fields: Any) -> None:
        """Rank 0 writes an event and shows it to the callbacks; the others are silent."""
        if self.is_first:
            self.run.events.append(event, **fields)
            for callback in self._callbacks:
                callback({"event": event, **fields})

    def _next_stop(self, step: int) -> int:
        validate = self.settings.validate
        if validate is None or validate.flow:
            return self.settings.steps
        return min((step // validate.every + 1) * validate.every, self.settings.steps)

    def _batches(self, stage: Stage) -> Batches:
        s = self.settings
        change = self._teach if self._teacher is not None and stage.is_last else None
        return Batches(make_loader(self.data, s), self.start, s.steps, s.microbatches, change, stage.law.parts)

    def _flows(self, stage: Stage) -> Evaluation | None:
        """What is scored on the way through a stage, if anything is."""
        s, options = self.settings, self.settings.validate
        if options is None or not options.flow or self.data.validation is None:
            return None
        held = Loader(self.data.validation, options.batch_size, 0, shuffle=False, device=s.device)
        picks = validated(self.chain, self._extremes, s)
        flow = Flow(options.every * s.microbatches, len(picks), held.pieces, s.steps * s.microbatches)
        return Evaluation(flow, picks, held.piece, s.loss, s.metrics, ahead=2 * stage.stages)

    def _train_mode(self) -> None:
        for stage in self.stages:
            stage.train_mode()

    def _eval_mode(self) -> None:
        for stage in self.stages:
            stage.eval_mode()

    def _drive(self, runtime: Runtime, workers: Sequence[Worker], ledger: Ledger, saver: Saver) -> None:
        shown = 0.0
        by_stage = {worker.stage.index: worker for worker in workers}
        first = workers[0]

        def on_done(done: Done | None) -> None:
            nonlocal shown
            if done is not None and done.snapshots:
                self._log(ledger, workers, saver)
                for snapshot in done.snapshots:
                    self._save(by_stage[done.op.stage].stage, snapshot, ledger, saver)
            if first.reports or saver.published or (first.evaluation is not None and first.evaluation.found):
                self._log(ledger, workers, saver)
            saver.check()
            if self.is_first and runtime.told != shown:
                shown = runtime.told
                every = {0: runtime.figures, **runtime.watch.others()}
                told = [every.get(rank, {}) for rank in range(self.accord.world)]
                self.emit(
                    "pipeline",
                    utilisation=[own.get("busy") for own in told],  # None: it has not told yet
                    in_flight=[int(own.get("in_flight", 0)) for own in told],
                )
                if self.residents:
                    self.emit("residency", stages=[own["residency"] for own in told if "residency" in own])

        runtime.drive(workers, on_done)

    def _log(self, ledger: Ledger, workers: Sequence[Worker], saver: Saver) -> None:
        for n, report in workers[0].reports if self.is_first else ():
            if self.settings.nonfinite == "skip" or bool(torch.isfinite(report[0])):
                ledger.add(n, report)  # else the backward of this micro-batch will say what is wrong
        for worker in workers:
            worker.reports.clear()
        flows = workers[0].evaluation
        for n, name, subnet, scores in flows.found if flows is not None else ():
            step = n // self.settings.microbatches
            self.emit("validation", step=step - 1, pick=name, subnet=subnet.id, scores=scores)
        if flows is not None:
            flows.found.clear()
        self._announce(saver)

    def _announce(self, saver: Saver) -> None:
        while saver.published:
            step, seconds = saver.published.pop(0)
            self.emit("checkpoint", at=step, seconds=seconds)

    def _save(self, stage: Stage, snapshot: Snapshot, ledger: Ledger, saver: Saver) -> None:
        step = snapshot.at // self.settings.microbatches
        meta: dict[str, Any] = {}
        if stage.is_first:
            self.run.events.flush()
            ledger.forget_before(step)
            meta = {"space": self.chain.space.id, "seed": self.settings.seed, "losses": ledger.digests[step]}
            if stage.norms is not None:
                meta["norms"] = snapshot.norms
        saver.put(stage.index, step, snapshot, meta)

    def _fingerprint(self, ledger: Ledger) -> str:
        own = {name: layer_digest(w, stage.updater) for stage in self.stages for name, w in stage.weights.items()}
        layers: dict[str, str] = {}
        for part in self.accord.gather("digests", own):
            layers |= part
        mine = drift({name: w for stage in self.stages for name, w in stage.weights.items()})
        for part in self.accord.gather("drifts", mine):
            self.drift |= part
        if self.residents:
            self.residency = self.accord.gather("residency", figures(self.residents))
        if self.is_first:
            self.accord.tell("fingerprint", fingerprint(layers, ledger.losses))
        return str(self.accord.hear("fingerprint"))

    @contextmanager
    def _at_hand(self, subnet: Subnet) -> Iterator[None]:
        with ExitStack() as stack:
            for stage in self.stages:
                if stage.memory is not None:
                    stack.enter_context(stage.memory.lending(layer.name for layer in stage.route(subnet)))
            yield

    def _teach(self, batch: Batch) -> Batch:
        return taught(self.chain, self._teacher, batch)

    def _validate(self, runtime: Runtime, step: int) -> None:
        """The picks go through the stages in order, forwards only: first the batches that set the norms, then all
        validation data."""
        options, s = self.settings.validate, self.settings
        assert options is not None and self.data.validation is not None  # noqa: PT018
        picks = validated(self.chain, self._extremes, s)
        # A rank that still puts its last weights in order would take a message of the relay for one of training.
        self.accord.gather(f"trained/{step}", None)
        self._eval_mode()
        held = Loader(self.data.validation, options.batch_size, 0, shuffle=False, device=s.device)
        train = make_loader(self.data, s)
        reads = any(stage.reads_batch() for stage in self.stages)
        relay = Relay(runtime.transport, self.stages, max(rule.window for rule in self._rules), self._placement)
        for name, subnet in picks.items():
            scores = Scores(s.loss, s.metrics)
            own = [module for stage in self.stages for module in stage.modules(subnet)]
            with self._at_hand(subnet), Calibration(own if options.recalibrate else ()) as norms:
                first = (train.batch(number) if reads else {} for number in range(options.recalibrate))
                for _ in relay.forward(subnet, first):
                    pass
                norms.freeze()
                for outputs, batch in relay.forward(subnet, held_out(held, s, step)):
                    with torch.inference_mode(), self.stages[-1].precision():
                        scores.add(outputs, batch)
            if self.is_last:
                self.accord.tell(f"scores/{step}/{name}", scores.means())
            if self.is_first:
                found = self.accord.hear(f"scores/{step}/{name}")
                self.emit("validation", step=step - 1, pick=name, subnet=subnet.id, scores=found)
        relay.close()
        # A rank that still waits here for word of the next one would take a message of training for one of the relay.
        self.accord.gather(f"validated/{step}", None)


def _nothing(n: int) -> Batch:
    raise TrainError(f"a stage without inputs, loss or side inputs asked for micro-batch {n}")
