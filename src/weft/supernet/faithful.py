"""Whether a chain keeps the law of mixtures: one that is certain computes what its subnet does, block by block."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from weft.keys import generator
from weft.space import Subnet
from weft.supernet.chain import Chain
from weft.supernet.elastic import Mixture
from weft.supernet.layer import Carry, run_layer, side_inputs

TOLERANCE = 0.01
"""Of what a block gives, as a share of its length: far beyond rounding, and far below what a mistake makes of it."""


def unfaithful(chain: Chain, batch: Mapping[str, Tensor], subnets: int = 4) -> tuple[str, Subnet, float] | None:
    """The first block whose output for a certain mixture is not the subnet's, with that subnet and how far it is off;
    None where all of some subnets agree.

    Elastic layers keep the law by themselves. A forward that joins or cuts features, or sums over them, may not: what
    lies at the end for the largest size lies elsewhere for a smaller one.
    """
    rng = generator("faithful", chain.space.id)
    some = [chain.space.first(), *itertools.islice(iter(lambda: chain.space.sample(rng), None), subnets - 1)]
    was = chain.training
    chain.eval()
    try:
        with torch.no_grad():
            return next((found for subnet in some if (found := _off(chain, batch, subnet)) is not None), None)
    finally:
        chain.train(was)


def _off(chain: Chain, batch: Mapping[str, Tensor], subnet: Subnet) -> tuple[str, Subnet, float] | None:
    certain = Mixture.one_hot(subnet, chain.space, next(iter(batch.values())).device)
    alone = together = chain.enter(batch)
    route = {layer.block: layer for layer in chain.route(subnet)}
    for index, block in enumerate(chain.blocks):
        modules = {name: chain.module(name) for name in block.candidates()}
        side = side_inputs(chain.layers[next(iter(modules))], batch, certain)
        together = block.mixed(modules, together, certain, side)
        if index in route:
            layer = route[index]
            alone = run_layer(layer, chain.module(layer), alone, side_inputs(layer, batch, subnet))
        off = _distance(alone, together)
        if off > TOLERANCE:
            return block.name, subnet, off
    return None


def _distance(alone: Carry, together: Carry) -> float:
    """How far the mixture's tensors, cut to the sizes of the subnet's, are from these."""
    worst = 0.0
    for one, other in zip(alone, together, strict=True):
        if one.is_floating_point() and one.dim() == other.dim():
            cut = other[tuple(slice(size) for size in one.shape)]
            worst = max(worst, float((cut - one).norm() / one.norm().clamp_min(1e-12)))
    return worst
