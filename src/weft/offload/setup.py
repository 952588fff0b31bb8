"""How a run gets its layers a home on the host: for training, and for scoring subnets of what was trained."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from weft.engine.consistency import Exact, VersionSchedule
from weft.engine.grad_clip import GlobalNormClipper
from weft.engine.optimizer import LayerOptimizer
from weft.engine.tied_weights import Ties
from weft.engine.train_step import TrainStep
from weft.engine.weight_versions import Offload, VersionedLayer
from weft.errors import TrainError
from weft.offload.config import OffloadConfig
from weft.offload.copy_engine import CopyEngine
from weft.offload.manager import OffloadManager
from weft.space import Stream, Subnet
from weft.supernet import Chain, Layer

LONG = 5_000
"""Micro-batches of a run; in a longer one every subnet must fit, whether it is used or not."""

_OF: weakref.WeakKeyDictionary[Chain, OffloadManager] = weakref.WeakKeyDictionary()


class Engine(Protocol):
    """What trains the layers of a chain: the reference on one device, or a stage."""

    chain: Chain
    updater: LayerOptimizer
    law: TrainStep
    stream: Stream
    device: torch.device
    norms: GlobalNormClipper | None
    ties: Ties | None
    memory: Offload | None

    @property
    def weights(self) -> Mapping[str, VersionedLayer]: ...


def offload(
    engine: Engine,
    said: OffloadConfig,
    also: Iterable[Subnet] = (),
    *,
    mover: CopyEngine | None = None,
    given: Tensor | None = None,
) -> OffloadManager:
    """From here on the layers of an engine live on the host; ``also`` are subnets that are scored on the way."""
    chain, law, stream, weights = engine.chain, engine.law, engine.stream, engine.weights
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
    late = engine.norms is not None or engine.ties is not None
    manager = OffloadManager(weights, engine.updater, engine.device, said, route, wanted, late, mover, given)
    engine.memory = _OF[chain] = manager
    return manager


def make_readable(
    chain: Chain, device: torch.device, said: OffloadConfig, mover: CopyEngine | None = None
) -> OffloadManager:
    """A home for the layers of a chain that is only scored."""
    clock = VersionSchedule(Exact(), 1, 1)
    weights = {name: VersionedLayer(layer, chain.module(name), clock) for name, layer in chain.layers.items()}
    _OF[chain] = OffloadManager(weights, None, device, said, lambda n: (), (), False, mover)
    return _OF[chain]


def release(chain: Chain) -> None:
    """The layers of a chain, all of which must be free, go to the host and stay there."""
    resident = _OF.pop(chain, None)
    if resident is not None:
        resident.settle()


@contextmanager
def on_device(chain: Chain, subnet: Subnet) -> Iterator[None]:
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
