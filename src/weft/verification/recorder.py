"""A supernet that writes down digests of what every layer is given, holds and gives in each training forward."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.pipeline.fingerprint import tensors_digest
from weft.pipeline.seeding import Seeder
from weft.supernet import Chain, Factory, Unbuilt


@dataclass(frozen=True, slots=True)
class Seen:
    """One forward of one layer, as digests."""

    inputs: str
    side: str
    weights: str
    outputs: str


Records = Mapping[tuple[int, str], Seen]
"""By micro-batch, counted over the run, and layer."""


def fresh(net: Chain | Factory) -> Chain:
    """A supernet of one's own: training changes it."""
    return copy.deepcopy(net) if isinstance(net, Chain) else net()


@dataclass(frozen=True)
class Recorded:
    """A factory of the same supernet whose layers leave their digests in a folder, whatever process they run in."""

    net: Chain | Factory
    folder: Path

    def __call__(self) -> Chain:
        chain = fresh(self.net)
        for name in getattr(chain, "layers", ()):  # what is no chain is refused by whoever called
            module = chain.module(name)
            if isinstance(module, Unbuilt):
                module.factory = _Listened(module.factory, self.folder)
            else:
                _listen(module, self.folder)
        return chain


def read_records(folder: Path, seed: int, m: int, plan: Sequence[Sequence[str]]) -> Records:
    """What the layers left in the folder, for a run whose micro-batches use the layers of the plan."""
    # A layer does not know in which step it runs, but the number that torch's generator was seeded with tells.
    seeder, numbers = Seeder(seed, torch.device("cpu")), {}
    with seeder.preserved():
        for n, names in enumerate(plan):
            for name in names:
                seeder.set(*divmod(n, m), name)
                numbers[torch.default_generator.initial_seed()] = n, name
    found: dict[tuple[int, str], Seen] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            place = numbers.get(record.pop("seed"))
            if place is not None:
                found.setdefault(place, Seen(**record))
    return found


@dataclass(frozen=True)
class _Listened:
    factory: Callable[[], nn.Module]
    folder: Path

    def __call__(self) -> nn.Module:
        module = self.factory()
        if isinstance(module, nn.Module):
            _listen(module, self.folder)
        return module


def _listen(module: nn.Module, folder: Path) -> None:
    ear = _Ear(folder)
    module.register_forward_pre_hook(ear.before, prepend=True, with_kwargs=True)
    module.register_forward_hook(ear.after, with_kwargs=True)


class _Ear:
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
        with open(
            self.folder / f"{os.getpid()}.jsonl", "a", encoding="utf-8"
        ) as file:  # a stage may end without a word
            file.write(json.dumps(record) + "\n")


def _digest(named: Any) -> str:
    return tensors_digest({str(name): value for name, value in named if isinstance(value, Tensor)})
