"""What a run would be, found without training: sizes and memory from tensors without data."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.data import Data
from weft.errors import WeftError
from weft.pipeline.consistency import Delayed, Lagged, Virtual, clock
from weft.pipeline.optimizer import Optimizer, Updater
from weft.pipeline.session import make_law, make_loader
from weft.pipeline.settings import Settings, make_settings
from weft.search.method import count
from weft.space import Subnet
from weft.supernet import Chain, Factory, Unbuilt, extract, initialise

META = torch.device("meta")


def describe(net: Chain | Factory, data: Data, arguments: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Steps, subnets, parameters, memory in bytes and place of the run that ``weft.train`` would make of this."""
    chain = on_meta(net)
    settings = make_settings(chain, **arguments)
    loader = make_loader(data, settings)
    per_epoch = getattr(loader, "per_epoch", None)
    batch = {name: tensor.to(META) for name, tensor in loader.batch(0).items()}
    largest, smallest = chain.largest(), chain.smallest()
    subnets = count(chain.space)
    weights = sum(p.numel() * p.element_size() for p in chain.parameters())
    return {
        "run": str(path),
        "device": str(settings.device),
        "steps": settings.steps,
        "batch_size": settings.batch_size,
        "microbatches": settings.microbatches,
        "epochs": round(settings.steps / per_epoch, 2) if per_epoch else None,
        "stream": settings.stream.describe(),
        "subnets": "too many to count" if math.isinf(subnets) else int(subnets),
        "blocks": len(chain.blocks),
        "layers": len(chain.layers),
        "parameters": chain.count(),
        "parameters_largest": parameters(chain, largest, batch),
        "parameters_smallest": parameters(chain, smallest, batch),
        "memory_weights": weights,
        "memory_optimizer": int(weights * state_ratio(settings.optimizer)),
        "memory_versions": kept_bytes(chain, settings),
        "memory_gradients": parameters(chain, largest, batch) * 4,
        "memory_activations": activations(chain, largest, batch, settings),
    }


def on_meta(net: Chain | Factory) -> Chain:
    """The supernet without data: every shape is right, and nothing is allocated unless it needs values to be made."""
    if isinstance(net, Chain):
        return _built(copy.deepcopy(net)).to(META)
    try:
        with META:
            return _built(net()).to(META)
    except WeftError:
        raise
    except Exception:  # what reads values while it is made, or cannot be made at all: then this says why
        return initialise(net).to(META)


def _built(chain: Chain) -> Chain:
    for name in chain.layers:
        module = chain.module(name)
        if isinstance(module, Unbuilt):
            block, _, label = name.rpartition(".")
            with META:
                chain.get_submodule(block).add_module(label, module.factory())
    return chain


def parameters(chain: Chain, subnet: Subnet, batch: Mapping[str, Tensor]) -> int:
    """What the subnet has by itself: of an elastic layer its slice alone."""
    if not any(layer.elastic for layer in chain.route(subnet)):
        return chain.count(subnet)
    return sum(p.numel() for p in extract(chain, subnet, batch).parameters())


def state_ratio(optimizer: Optimizer) -> float:
    """Elements of optimizer state for each weight, seen by making one step with a small matrix."""
    sample = nn.Parameter(torch.zeros(8, 8))
    updater = Updater(optimizer, {"sample": sample})
    updater.apply([sample], [torch.zeros(8, 8)], 1.0)
    return sum(value.numel() for value in updater.state(sample).values() if value.dim() > 0) / sample.numel()


def kept_bytes(chain: Chain, settings: Settings) -> int:
    """The most that older versions of weights take, by the table of consistencies."""
    total = 0
    for name, layer in chain.layers.items():
        promised = settings.consistency[name]
        times = 0
        if isinstance(promised, Delayed):
            times = promised.steps
        elif isinstance(promised, Lagged):
            times = 1
        elif isinstance(promised, Virtual):
            window = clock(promised, layer.block, len(chain.blocks), settings.microbatches, settings.steps).window
            times = -(-(window - 1) // promised.every)
        total += times * sum(p.numel() * p.element_size() for p in chain.module(name).parameters())
    return total


def activations(chain: Chain, subnet: Subnet, batch: Mapping[str, Tensor], settings: Settings) -> int | str:
    """What one micro-batch of the largest subnet keeps for its backward, in bytes; why not, where that is not known."""
    micro = {name: part.clone() for name, part in make_law(settings).parts(dict(batch))[0].items()}
    own = {p.untyped_storage()._cdata for p in (*chain.parameters(), *chain.buffers())}
    held: dict[int, torch.UntypedStorage] = {}  # kept, so that no other storage gets the same address

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()  # a view, such as a transposed weight, takes no memory of its own
        if storage._cdata not in own:
            held[storage._cdata] = storage
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            settings.loss(chain.train()(micro, subnet), micro)
    except WeftError:
        raise
    except Exception as problem:  # a layer that needs real values cannot be followed
        return f"unknown: {type(problem).__name__} without data: {' '.join(str(problem).split())[:200]}"
    return sum(storage.nbytes() for storage in held.values())
