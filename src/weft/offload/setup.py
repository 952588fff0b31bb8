"""How a run gets its layers a home on the host: for training, and for scoring subnets of what was trained."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.errors import TrainError
from weft.pipeline.consistency import Clock, Exact
from weft.pipeline.law import Law
from weft.pipeline.optimizer import Updater
from weft.pipeline.residency.mover import Mover
from weft.pipeline.residency.resident import Resident
from weft.pipeline.residency.value import Residency
from weft.pipeline.weights import Weights
from weft.space import Stream, Subnet
from weft.supernet import Chain, Layer

LONG = 5_000
"""Micro-batches of a run; in a longer one every subnet must fit, whether it is used or not."""

_OF: weakref.WeakKeyDictionary[Chain, Resident] = weakref.WeakKeyDictionary()


def make_resident(
    chain: Chain,
    weights: Mapping[str, Weights],
    updater: Updater,
    law: Law,
    stream: Stream,
    device: torch.device,
    said: Residency,
    *,
    late: bool,
    also: Iterable[Subnet] = (),
    mover: Mover | None = None,
    folder: Path | None = None,
    given: Tensor | None = None,
) -> Resident:
    """A home for the layers of a stage in a run; ``also`` are subnets that are scored on the way."""
    if law.bilevel is not None and law.bilevel.order == 2:
        raise TrainError("the second order changes all weights within a step: train without residency, or at order 1")
    m, seen = law.microbatches, weakref.ref(chain)  # or what is known of a chain would keep it alive

    def names(layers: Sequence[Layer]) -> list[str]:
        return [layer.name for layer in layers if layer.name in weights]

    @lru_cache(maxsize=2 * LONG)
    def route(n: int) -> list[str]:
        picks = stream[n // m]
        whole = seen()
        assert whole is not None
        return names(whole.route(picks[n % m % len(picks)]))

    wanted = None
    if law.steps * m <= LONG:
        wanted = [*(route(n) for n in range(law.steps * m)), *(names(chain.route(subnet)) for subnet in also)]
    resident = Resident(weights, updater, device, said, route, wanted, late, mover, folder, given)
    _OF[chain] = resident
    return resident


def make_readable(chain: Chain, device: torch.device, said: Residency, mover: Mover | None = None) -> Resident:
    """A home for the layers of a chain that is only scored."""
    clock = Clock(Exact(), 1, 1)
    weights = {name: Weights(layer, chain.module(name), clock) for name, layer in chain.layers.items()}
    _OF[chain] = Resident(weights, None, device, said, lambda n: (), (), False, mover)
    return _OF[chain]


def release(chain: Chain) -> None:
    """The layers of a chain, all of which must be free, go to the host and stay there."""
    resident = _OF.pop(chain, None)
    if resident is not None:
        resident.settle()


@contextmanager
def at_hand(chain: Chain, subnet: Subnet) -> Iterator[None]:
    """A block in which the layers of a subnet are on the device, wherever the others are."""
    resident = _OF.get(chain)
    if resident is None or not isinstance(subnet, Subnet):
        yield
        return
    lending = resident.lending(layer.name for layer in chain.route(subnet))
    with torch.inference_mode(False):  # what is bound to parameters must be fit for training too
        lending.__enter__()
    try:
        yield
    finally:
        with torch.inference_mode(False):
            lending.__exit__(None, None, None)


def prepare(chain: Chain, device: torch.device) -> None:
    """Buffers, which are small, stay on the device: a layer has them there from the beginning."""
    for part in chain.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            if buffer.device != device and not buffer.is_meta:
                setattr(part, name, buffer.to(device))


def figures(residents: Iterable[Resident]) -> dict[str, Any]:
    """For the log: the figures of all stages of a rank together."""
    told = [resident.figures() for resident in residents]
    total: dict[str, Any] = {key: sum(own[key] for own in told) for key in told[0]}
    total["hit_rate"] = 1.0 - total["misses"] / total["uses"] if total["uses"] else 1.0
    return total
