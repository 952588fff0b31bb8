"""Attaches offloading to a chain: for training, and for scoring subnets of what was trained."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor

from weft.engine.consistency import Exact, VersionSchedule
from weft.engine.train_step import TrainedLayers
from weft.engine.weight_versions import VersionedLayer
from weft.errors import TrainError
from weft.offload.config import OffloadConfig
from weft.offload.copy_engine import CopyEngine
from weft.offload.manager import OffloadManager
from weft.space import Subnet
from weft.supernet import Chain, Layer

MAX_ROUTES = 5_000
"""Micro-batches of a run whose routes are checked one by one; in a longer run every subnet of the space must fit."""

_MANAGERS: weakref.WeakKeyDictionary[Chain, OffloadManager] = weakref.WeakKeyDictionary()


def attach(
    engine: TrainedLayers,
    offload: OffloadConfig,
    extra_subnets: Iterable[Subnet] = (),
    *,
    copy_engine: CopyEngine | None = None,
    host_buffer: Tensor | None = None,
) -> OffloadManager:
    """From here on the layers of an engine live on the host. ``extra_subnets`` are scored during the run."""
    chain, config, weights = engine.chain, engine.config, engine.weights
    if config.architecture_search is not None and config.architecture_search.order == 2:
        raise TrainError("the second order changes all weights within a step: train without offload, or at order 1")
    microbatches = config.steps * config.microbatches
    chain_reference = weakref.ref(chain)  # the cache below must not keep the chain alive

    def names(layers: Sequence[Layer]) -> list[str]:
        return [layer.name for layer in layers if layer.name in weights]

    @lru_cache(maxsize=2 * MAX_ROUTES)
    def route(n: int) -> list[str]:
        chain = chain_reference()
        assert chain is not None
        return names(chain.route(config.subnet(n)))

    routes = None
    if microbatches <= MAX_ROUTES:
        scored = (names(chain.route(subnet)) for subnet in extra_subnets)
        routes = [*(route(n) for n in range(microbatches)), *scored]
    deferred = bool(engine.sums)
    manager = OffloadManager(
        weights, engine.optimizer, engine.device, offload, route, routes, deferred, copy_engine, host_buffer
    )
    engine.offload = _MANAGERS[chain] = manager
    return manager


def attach_for_scoring(chain: Chain, device: torch.device, config: OffloadConfig) -> OffloadManager:
    """Moves the layers of a chain that is only scored to the host, where they live from here on."""
    schedule = VersionSchedule(Exact(), 1, 1)
    weights = {name: VersionedLayer(layer, chain.module(name), schedule) for name, layer in chain.layers.items()}
    _MANAGERS[chain] = OffloadManager(weights, None, device, config, lambda n: (), (), False)
    return _MANAGERS[chain]


def detach(chain: Chain) -> None:
    """The layers of a chain, none of which may be in use, go to the host and stay there."""
    manager = _MANAGERS.pop(chain, None)
    if manager is not None:
        manager.flush()


def on_device(chain: Chain, subnet: Subnet) -> AbstractContextManager[None]:
    """A block in which the layers of a subnet are on the device, wherever the others are."""
    manager = _MANAGERS.get(chain)
    if manager is None or not isinstance(subnet, Subnet):
        return nullcontext()
    return manager.pinned_on_device([layer.name for layer in chain.route(subnet)])


def move_buffers(chain: Chain, device: torch.device) -> None:
    """Moves the buffers, which are small, to the device, where they stay."""
    for part in chain.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            if buffer.device != device and not buffer.is_meta:
                setattr(part, name, buffer.to(device))
