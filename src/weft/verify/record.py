"""The first difference of two runs that should be equal: the step, the layer, and what differs there."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft.engine.consistency import VersionSchedule
from weft.engine.layer_state import tensors_digest
from weft.engine.rng import Seeder
from weft.supernet import Chain, Factory, LazyLayer

Place = Literal["initial weights", "batch", "forward", "loss", "backward", "between stages", "kernel"]

PLACES: Mapping[Place, str] = {
    "initial weights": "its weights differ before the first step",
    "batch": "what enters it from the batch differs",
    "forward": "its outputs differ, from equal inputs and weights",
    "loss": "the loss differs, from equal outputs of the last layer",
    "backward": "its update differs, after equal forwards and losses",
    "kernel": "torch refuses to run one of its operators",
    "between stages": "its inputs differ, though the layer before gave equal outputs",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two runs part; the layer is None where only the step is known, or where it is in the loss."""

    step: int
    layer: str | None
    place: Place | None


@dataclass(frozen=True, slots=True)
class RunRecord:
    losses: Mapping[int, float]
    layers: Mapping[str, str]
    """The digest of each layer's part of the last checkpoint."""
    records: Records = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LayerUse:
    """Which layers every micro-batch of a run uses, in chain order, and which versions each layer gives them."""

    microbatches: int
    routes: Sequence[Sequence[str]]
    clocks: Mapping[str, VersionSchedule]

    def updated_by(self, layer: str, n: int | None) -> int:
        """The last micro-batch whose gradient is in the weights that the forward of micro-batch n sees (None: in those
        at the end of the run); -1 where they are the initial ones."""
        clock = self.clocks[layer]
        slots = len(self.routes) if n is None else clock.forward_reads(n)
        used = (k for k, route in enumerate(self.routes) if layer in route and clock.slot(k) < slots)
        return max(used, default=-1)


def first_difference(use: LayerUse, one: RunRecord, other: RunRecord) -> Difference | None:
    """The first difference of two recorded runs, in the order of training on one device; None where there is none."""
    first = next(_forwards(use, one, other), None)
    until = len(use.routes) if first is None else first[0]
    # Weights that differ before anything else does were updated differently by a step whose forward was still right.
    layers = list(use.clocks)
    wrong = [(n, name) for n, name in _weights(use, one, other) if use.updated_by(name, n) < until]
    if wrong:
        origin = min(use.updated_by(name, n) for n, name in wrong)
        names = [name for n, name in wrong if use.updated_by(name, n) == origin]
        if origin < 0:
            return Difference(0, min(names, key=layers.index), "initial weights")
        # A backward comes to the last layer of the chain first.
        return Difference(origin // use.microbatches, max(names, key=layers.index), "backward")
    return None if first is None else first[1]


def first_loss(one: RunRecord, other: RunRecord) -> int | None:
    """The first step whose loss differs."""
    return next((step for step, loss in sorted(one.losses.items()) if other.losses.get(step) != loss), None)


def _forwards(use: LayerUse, one: RunRecord, other: RunRecord) -> Iterator[tuple[int, Difference]]:
    """Differences of forwards and losses in the order of training; those that follow from the first are among them."""
    for n, route in enumerate(use.routes):
        step = n // use.microbatches
        for place, name in enumerate(route):
            a, b = one.records.get((n, name)), other.records.get((n, name))
            if a is None or b is None:  # one of the runs has not come so far
                continue
            if a.side != b.side or (a.inputs != b.inputs and place == 0):
                yield n, Difference(step, name, "batch")
            elif a.inputs != b.inputs:
                yield n, Difference(step, name, "between stages")
            elif a.outputs != b.outputs:
                yield n, Difference(step, name, "forward")
        if n % use.microbatches == use.microbatches - 1 and one.losses.get(step) != other.losses.get(step):
            # Which of its micro-batches it was is not known: none of the step's updates says more.
            yield step * use.microbatches, Difference(step, None, "loss")


def _weights(use: LayerUse, one: RunRecord, other: RunRecord) -> Iterator[tuple[int | None, str]]:
    """The layers whose weights differ, each with the micro-batch that first sees it (None: the end of the run)."""
    seen: set[str] = set()
    for n, route in enumerate(use.routes):
        for name in route:
            a, b = one.records.get((n, name)), other.records.get((n, name))
            if name not in seen and a is not None and b is not None and a.weights != b.weights:
                seen.add(name)
                yield n, name
    for name in use.clocks:
        if name not in seen and one.layers.get(name) != other.layers.get(name):
            yield None, name


# A supernet whose layers write down digests of their inputs, weights and outputs in each training forward.


@dataclass(frozen=True, slots=True)
class ForwardDigests:
    """One forward of one layer, as digests."""

    inputs: str
    side: str
    weights: str
    outputs: str


Records = Mapping[tuple[int, str], ForwardDigests]
"""By micro-batch, counted over the run, and layer."""


def fresh(net: Chain | Factory) -> Chain:
    """A copy of the supernet, since training changes it."""
    return copy.deepcopy(net) if isinstance(net, Chain) else net()


@dataclass(frozen=True)
class RecordingFactory:
    """A factory of the same supernet whose layers write their digests into a folder, in any process."""

    net: Chain | Factory
    folder: Path

    def __call__(self) -> Chain:
        chain = fresh(self.net)
        for name in getattr(chain, "layers", ()):  # the caller refuses what is no chain
            module = chain.module(name)
            if isinstance(module, LazyLayer):
                module.factory = partial(_recorded, module.factory, self.folder)
            else:
                _record_layer(module, self.folder)
        return chain


def read_records(folder: Path, seed: int, use: LayerUse) -> Records:
    """What the layers wrote into the folder."""
    # A layer does not know in which step it runs, but the number that torch's generator was seeded with tells.
    seeder, numbers = Seeder(seed, torch.device("cpu")), {}
    with seeder.preserved():
        for n, names in enumerate(use.routes):
            for name in names:
                seeder.set(*divmod(n, use.microbatches), name)
                numbers[torch.default_generator.initial_seed()] = n, name
    found: dict[tuple[int, str], ForwardDigests] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            place = numbers.get(record.pop("seed"))
            if place is not None:
                found.setdefault(place, ForwardDigests(**record))
    return found


def _recorded(factory: Callable[[], nn.Module], folder: Path) -> nn.Module:
    module = factory()
    if isinstance(module, nn.Module):
        _record_layer(module, folder)
    return module


def _record_layer(module: nn.Module, folder: Path) -> None:
    hook = _DigestHook(folder)
    module.register_forward_pre_hook(hook.before, prepend=True, with_kwargs=True)
    module.register_forward_hook(hook.after, with_kwargs=True)


class _DigestHook:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.begun: dict[str, Any] = {}

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Before the layer works: it may change its inputs in place, or seed the generator itself.
        self.begun = {
            "seed": torch.default_generator.initial_seed(),
            "inputs": _digest(enumerate(args)),
            "side": _digest(kwargs.items()),
            "weights": _digest(module.named_parameters()),
        }

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if not module.training:
            return
        record = {**self.begun, "outputs": _digest(enumerate(out if isinstance(out, tuple | list) else [out]))}
        # Opened anew for each record, since a stage may end without closing it.
        with open(self.folder / f"{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _digest(named: Any) -> str:
    return tensors_digest({str(name): value for name, value in named if isinstance(value, Tensor)})
