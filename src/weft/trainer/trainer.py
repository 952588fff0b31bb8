"""A training session: the sequential law in a run directory, with its log, validation, checkpoints and resume."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.data import Batch, Data, IterableLoader, Loader, Source
from weft.distributed.signals import stop_requests
from weft.engine.bilevel import BilevelLoader, marked
from weft.engine.cuda_graphs import CudaGraphCache
from weft.engine.layer_state import LossDigest, capture, fingerprint, layer_digest, optimizer_states, restore
from weft.engine.reference import SequentialReference
from weft.engine.rng import deterministic
from weft.engine.train_step import TrainStep
from weft.errors import CheckpointError, NonFiniteError, TrainError, WeftError
from weft.offload import OffloadManager
from weft.offload.setup import attach, move_buffers
from weft.runs import Run
from weft.runs.events import Callback
from weft.space import Subnet
from weft.supernet import Chain
from weft.trainer.config import Settings
from weft.trainer.evaluate import evaluate, recalibrated
from weft.trainer.metrics_log import AsyncReadback, begun, drift, mean, phase
from weft.utils import foreach
from weft.utils.rng import generator

SHOWN = 0.5
"""Seconds between two events about what lies on the device."""


class Trainer:
    """One run, from its first or its next step to its last.

    Every mistake in the settings shows when it is made, before there is a run directory; then ``open`` gives it one.
    """

    run: Run

    def __init__(self, chain: Chain, data: Data, settings: Settings) -> None:
        self.chain = chain
        self.data = data
        self.settings = s = settings
        self.callbacks: tuple[Callback, ...] = ()
        if s.validate and data.validation is None:
            raise TrainError(
                "validate needs validation data, and this data set has none: split some off it, or leave it out"
            )
        law = make_law(s)
        # A captured layer reads its weights at one address, and residency gives them many.
        graphs = CudaGraphCache() if s.device.type == "cuda" and s.cuda_graphs and s.residency is None else None
        if s.residency is not None:
            move_buffers(chain, s.device)
        self.sequential = SequentialReference(chain, law, s.stream, s.device, graphs)
        self.losses = LossDigest()
        self.start = 0
        self.loader = make_loader(data, s)
        self._readback = AsyncReadback(s.device)
        self._shown = 0.0
        self.offload: OffloadManager | None = None
        """What brings layers to the device, where they do not all stay there."""

    def open(self, run: Run, callbacks: Sequence[Callback] = ()) -> None:
        """From here on events and checkpoints go into this run, which must be locked."""
        self.run = run
        self.callbacks = tuple(callbacks)

    def reside(self) -> None:
        """Layers live on the host, if the settings say so."""
        if self.settings.residency is not None:
            picks = self._picks().values() if self.settings.validate else ()
            self.offload = attach(self.sequential, self.settings.residency, picks)

    def run_to_end(self, checkpoint_every: int) -> str:
        """Trains what is left and returns the fingerprint; on any way out the run is left so that it can be resumed."""
        s = self.settings
        self._emit("started", **begun(self.run, self.chain, self.start, s.steps))
        step = self.start
        try:
            with deterministic(s.device), self.sequential.seeder.preserved(), stop_requests() as stop:
                self.sequential.train_mode()
                batches = self.loader.iterate(self.start, s.steps)
                try:
                    for batch in batches:
                        self.step(step, batch)
                        step += 1
                        if stop():
                            self._checkpoint(step)
                            raise KeyboardInterrupt
                        if step % checkpoint_every == 0 or step == s.steps:
                            self._checkpoint(step)
                        if s.validate and (step % s.validate.every == 0 or step == s.steps):
                            self._validate(step)
                finally:
                    batches.close()
                self.sequential.eval_mode()
                digest = self.fingerprint()
                self._show_memory()
                if self.offload is not None:
                    self.offload.flush()
        except KeyboardInterrupt:
            self._emit("stopped", at=step)
            raise
        except WeftError as problem:
            self._emit("failed", at=step, reason=str(problem))
            raise
        except Exception as problem:
            self._emit("failed", at=step, reason=f"{type(problem).__name__}: {problem}")
            raise
        finally:
            self.sequential.eval_mode()
        more = {} if self.offload is None else {"residency": self.offload.stats()}
        self._emit("finished", steps=s.steps, fingerprint=digest, drift=drift(self.sequential.weights), **more)
        return digest

    def fingerprint(self) -> str:
        """SHA-256 over all weights, optimizer states and losses so far."""
        self._log(self._readback.drain())
        weights = self.sequential.weights
        return fingerprint({n: layer_digest(w, self.sequential.updater) for n, w in weights.items()}, self.losses)

    def restore(self) -> bool:
        """Goes back to the newest good checkpoint; False where there is none and the run begins anew."""
        if not self.run.checkpoints.steps():
            self.run.events.drop_from(0)
            return False
        saved = self.run.checkpoints.load()
        if saved.meta.get("space") != self.chain.space.id:
            raise CheckpointError(
                f"the checkpoint is of the space {saved.meta.get('space')}, "
                f"not of this supernet's {self.chain.space.id}"
            )
        layers = saved.meta["layers"]
        if set(layers) != set(self.sequential.weights):
            other = sorted(set(layers) ^ set(self.sequential.weights))[0]
            raise CheckpointError(
                f"the checkpoint and the supernet have different layers: '{other}' is in one of them only"
            )
        for name, weights in self.sequential.weights.items():
            restore(weights, saved.tensors, layers[name])
        self.sequential.resume(optimizer_states(saved.tensors))
        if self.sequential.norms is not None:
            at = saved.step * self.settings.microbatches
            self.sequential.norms.restore(saved.meta.get("norms") or {}, at, self.settings.device)
        if self.sequential.ties is not None:
            self.sequential.ties.restore(saved.tensors, saved.step * self.settings.microbatches, self.settings.device)
        self.losses = LossDigest(saved.meta["losses"])
        self.start = saved.step
        self.run.events.drop_from(saved.step)
        self.run.checkpoints.drop_after(saved.step)
        return True

    def step(self, i: int, batch: Batch) -> None:
        """Trains step i on its batch, and logs whatever losses have arrived by now."""
        result = self.sequential.step(i, batch)
        self._log(self._readback.add(result))
        if self.offload is not None and time.perf_counter() - self._shown > SHOWN:
            self._show_memory(i)

    def _show_memory(self, step: int | None = None) -> None:
        if self.offload is not None:
            self._shown = time.perf_counter()
            at = {} if step is None else {"step": step}
            self._emit("residency", stages=[self.offload.stats()], **at)

    def _log(self, arrived: Iterator[tuple[Any, list[float], dict[str, Any]]]) -> None:
        for result, losses, metrics in arrived:
            loss = mean(losses)
            if self.settings.nonfinite == "stop" and not all(map(math.isfinite, losses)):
                raise self._late_non_finite(result.step, result.subnets, losses)
            self.losses.add(losses)
            fields: dict[str, Any] = {"step": result.step, "loss": loss, **metrics}
            fields["rate"] = self.settings.schedule(result.step, self.settings.steps)
            fields |= phase(self.settings, result.step)
            fields["subnets"] = [subnet.id for subnet in result.subnets]
            if result.skipped:
                fields["skipped"] = result.skipped
            self._emit("step", **fields)

    def _late_non_finite(self, step: int, subnets: tuple[Subnet, ...], losses: list[float]) -> NonFiniteError:
        # On a GPU the loss is seen some steps later; the batch is a function of its number, so the forward can be run
        # again.
        j = next(index for index, loss in enumerate(losses) if not math.isfinite(loss))
        part = self.sequential.law.parts(self.loader.batch(step))[j]
        return self.sequential.non_finite(step, j, subnets[j % len(subnets)], part)

    def _checkpoint(self, step: int) -> None:
        self._log(self._readback.drain())
        for name, weights in self.sequential.weights.items():
            weights.readable()
            if weights.parameters and not bool(torch.isfinite(foreach.norm(list(weights.parameters)))):
                raise NonFiniteError(
                    f"the weights of layer '{name}' are not finite after step {step - 1}, so no checkpoint is written. "
                    "Try a lower learning rate or clipping"
                )
        tensors: dict[str, Tensor] = {}
        layers: dict[str, Any] = {}
        for name, weights in self.sequential.weights.items():
            found, layers[name] = capture(weights, self.sequential.updater, step * self.settings.microbatches)
            tensors.update(found)
        meta = {"space": self.chain.space.id, "seed": self.settings.seed, "losses": self.losses.value, "layers": layers}
        if self.sequential.norms is not None:
            meta["norms"] = self.sequential.norms.saved(step * self.settings.microbatches)
        if self.sequential.ties is not None:
            tensors |= self.sequential.ties.saved(step * self.settings.microbatches)
        self.run.events.flush()
        began = time.perf_counter()
        self.run.checkpoints.save(step, tensors, meta)
        self._emit("checkpoint", at=step, seconds=time.perf_counter() - began)

    def _validate(self, step: int) -> None:
        options = self.settings.validate
        if options is None or self.data.validation is None:
            return
        self._log(self._readback.drain())
        picks = self._picks()
        loader = Loader(self.data.validation, options.batch_size, 0, shuffle=False, device=self.settings.device)
        self.sequential.eval_mode()
        for name, subnet in picks.items():
            with recalibrated(self.chain, subnet, (self.loader.batch(k) for k in range(options.recalibrate))):
                batches = validation_batches(loader, self.settings, step)
                scores = evaluate(
                    self.chain, subnet, batches, self.settings.loss, self.settings.metrics, self.settings.precision
                )
            self._emit("validation", step=step - 1, pick=name, subnet=subnet.id, scores=scores)
        self.sequential.train_mode()

    def _picks(self) -> dict[str, Subnet]:
        extremes = {"largest": self.chain.largest(), "smallest": self.chain.smallest()}
        return validation_subnets(self.chain, extremes, self.settings)

    def _emit(self, event: str, **fields: Any) -> None:
        self.run.events.append(event, **fields)
        for callback in self.callbacks:
            callback({"event": event, **fields})


def make_law(s: Settings) -> TrainStep:
    """What the settings mean for training, apart from where it runs."""
    return TrainStep(
        s.steps,
        s.microbatches,
        s.loss,
        s.optimizer,
        s.schedule,
        s.seed,
        s.consistency,
        s.clip,
        s.precision,
        s.nonfinite,
        s.metrics,
        s.bilevel,
        s.distil,
        s.rescale,
    )


def validation_subnets(chain: Chain, extremes: Mapping[str, Subnet], s: Settings) -> dict[str, Subnet]:
    """The subnets that are scored on the way, by name; where there is nothing to choose, the one that there is."""
    if not chain.space.choices:
        return {"largest": extremes["largest"]}
    if s.bilevel is not None:  # the chain runs the mixture, whatever subnet it is given
        return {"mixture": extremes["largest"]}
    rng = generator(s.seed, "validate")
    count = 0 if s.validate is None else s.validate.random
    return {**extremes, **{f"random{k}": chain.space.sample(rng) for k in range(count)}}


def validation_batches(loader: Loader, s: Settings, step: int) -> Iterator[Batch]:
    """The batches of validation data, with how far the run has come where a chain with an architecture may ask."""
    batches = loader.all()
    return batches if s.bilevel is None else (marked(batch, step / s.steps) for batch in batches)


def make_loader(data: Data, settings: Settings) -> Loader | IterableLoader | BilevelLoader:
    """The batches of a run by step; a foreign loader of training data is taken as it is."""

    def loader(source: Source) -> Loader:
        s = settings
        return Loader(source, s.batch_size, s.seed, augment=s.augment, workers=s.workers, device=s.device)

    train = data.train if isinstance(data.train, IterableLoader) else loader(data.train)
    if settings.bilevel is None:
        return train
    if data.validation is None:
        raise TrainError(
            "architecture parameters learn on validation data, and this data set has none: split some off it"
        )
    return BilevelLoader(settings.bilevel, train, loader(data.validation), settings.steps)
