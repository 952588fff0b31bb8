"""A chain as a mixture of its subnets: blocks with architecture parameters, whose probabilities each block passes on.

Before the first block that reads a choice stands a block of one small layer, which holds that choice's architecture
parameters and puts its probabilities at the end of the activations. So the parameters of a choice are on the stage of
the first block that reads it, and its probabilities reach all the others, on whatever stage they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.elastic import Mixture, Module
from weft.elastic.mixture import choice_options
from weft.errors import SupernetError
from weft.space import Space, Subnet
from weft.supernet.blocks import Block, Choice, Extras, Modules
from weft.supernet.chain import Chain, Factory
from weft.supernet.layer import (
    Activations,
    LazyLayer,
    build_layer_on_meta,
    extra_inputs,
    run_layer,
)
from weft.utils.rng import generator

Relax = Callable[[Tensor, bool, Tensor | None], Tensor]
"""Probabilities from the parameters of one choice: (parameters, whether it trains, progress from 0 to 1)."""

PROGRESS = "weft_progress"
"""The extra input of methods that change as a run goes on."""


class Architecture(nn.Module):
    """The parameters of some choices. Its forward puts their probabilities at the end of the activations."""

    def __init__(self, counts: Sequence[int], relax: Relax, begins: bool) -> None:
        super().__init__()
        self.counts = list(counts)
        self._relax = relax
        self._begins = begins
        self.alpha = nn.Parameter(torch.zeros(sum(counts)))

    def reset_parameters(self) -> None:
        """Gives all options the same probability."""
        nn.init.zeros_(self.alpha)

    def probabilities(self, training: bool, progress: Tensor | None = None) -> list[Tensor]:
        """Those of each choice."""
        return [self._relax(part, training, progress) for part in torch.split(self.alpha, self.counts)]

    def forward(self, *activations: Tensor, **extras: Tensor) -> Activations:
        progress = extras[PROGRESS][0] if PROGRESS in extras else None
        own = self.probabilities(self.training, progress)
        if self._begins:
            return (*activations, torch.cat(own))
        return (*activations[:-1], torch.cat([activations[-1], *own]))


class MixedChain(Chain):
    """Made by ``make_mixed_chain``. ``order`` names the choices in the order of the vector of probabilities."""

    order: tuple[str, ...]
    plain: Chain
    """The chain that it is a mixture of; both hold the same modules."""

    held: dict[str, tuple[str, ...]]

    def mixture(self) -> Mixture:
        """The mixture of the current parameters, without noise or gradients."""
        probabilities: dict[str, Tensor] = {}
        with torch.no_grad():
            for layer, names in self.held.items():
                module = self.module(layer)
                assert isinstance(module, Architecture)
                probabilities |= dict(zip(names, module.probabilities(training=False), strict=True))
        return Mixture.unchecked(self.space, {name: probabilities[name] for name in self.space.choices})


def make_mixed_chain(net: Chain | Factory, relax: Relax, extra_inputs: Sequence[str] = ()) -> MixedChain:
    """The chain that trains all subnets of a chain at once, by the expectation of every layer under a mixture.

    Its last activations is that of the chain, followed by all the probabilities in the order ``order``.
    """
    plain = net if isinstance(net, Chain) else net()
    space = plain.space
    if not space.choices:
        raise SupernetError("there is nothing to mix: the supernet has no choices")
    if plain.ties:
        raise SupernetError("a supernet with tied weights cannot be mixed: leave tie= out for a search with gradients")
    readers = [_read_by(block, plain) for block in plain.blocks]
    known: list[str] = []
    blocks: list[Block] = []
    held: dict[str, tuple[str, ...]] = {}
    for index, block in enumerate(plain.blocks):
        # A choice that no block is known to read, since the user's code may read it, is there from the start.
        unread = [name for name in space.choices if index == 0 and not any(name in names for names in readers)]
        new_names = [name for name in space.choices if name in readers[index] and name not in known] + unread
        if new_names:
            made = _ArchitectureBlock(space, f"arch-{block.name}", new_names, relax, not known, extra_inputs)
            held[made.name] = tuple(new_names)
            blocks.append(made)
        known += new_names
        blocks.append(_MixedBlock(block, plain, space, tuple(known)))
    chain = MixedChain(*blocks, inputs=plain.inputs)
    chain.order, chain.held, chain.plain = tuple(known), held, plain
    return chain


def mixed_factory(net: Chain | Factory, relax: Relax, extra_inputs: Sequence[str] = ()) -> Factory:
    """A function that makes the mixed chain again, so that every stage can build its part."""
    return partial(make_mixed_chain, net, relax, extra_inputs)


def _read_by(block: Block, chain: Chain) -> set[str]:
    """The choices that a block reads."""
    if block.space is None:
        return set()
    names_read = {block.name} & chain.space.choices.keys()
    if block.condition is not None:
        names_read |= set(block.condition.names)
    for part in parts(block, chain):
        if isinstance(part, Module):
            names_read |= set(part.reads)
    return names_read


def parts(block: Block, chain: Chain) -> Iterator[nn.Module]:
    """Every module of a block. A layer that is not built yet is built here, without values."""
    for name in block.candidates():
        module = chain.module(name)
        yield from (build_layer_on_meta(module, name) if isinstance(module, LazyLayer) else module).modules()


class _Always(Block):
    """The base of both kinds of blocks: every micro-batch uses their one layer."""

    shared = True

    def mixed(self, modules: Modules, activations: Activations, mixture: Mixture, extras: Extras) -> Activations:
        raise SupernetError("this chain is a mixture already: give it a batch and any subnet")


class _ArchitectureBlock(_Always):
    is_architecture = True

    def __init__(
        self, space: Space, name: str, names: Sequence[str], relax: Relax, begins: bool, extra_inputs: Sequence[str]
    ) -> None:
        make = partial(Architecture, [len(choice_options(space, n)) for n in names], relax, begins)
        super().__init__(name, space, {name: make}, extra_inputs=extra_inputs)


class _MixedBlock(_Always):
    def __init__(self, block: Block, chain: Chain, space: Space, known: tuple[str, ...]) -> None:
        self._block, self._space, self._known = block, space, known
        names = list(block.candidates())
        if names == [block.name]:
            module = chain.module(block.name)
        else:
            module = nn.Module()
            for name in names:
                module.add_module(name.partition(".")[2], chain.module(name))
        layers = {block.name: module.factory if isinstance(module, LazyLayer) else module}
        super().__init__(block.name, space, layers, extra_inputs=block.extra_inputs, consistency=block.consistency)
        self.forward_fn = self._run

    def _run(self, module: nn.Module, activations: Activations, extras: Mapping[str, Any]) -> Activations:
        if isinstance(self._block, Choice):
            modules = {f"{self.name}.{label}": part for label, part in module.named_children()}
        else:
            modules = {self.name: module}
        if not self._known:  # no block so far has a choice
            return self._block.mixed(modules, activations, Mixture.unchecked(self._space, {}), extras)
        mixture = Mixture.flat(self._space, self._known, activations[-1])
        return (*self._block.mixed(modules, activations[:-1], mixture, extras), activations[-1])


# The check of a chain under mixtures: a one-hot mixture must compute what its subnet does, block by block.

TOLERANCE = 0.01
"""As a share of the length of a block's output: far above rounding, and far below the effect of a mistake."""


def find_mixture_mismatch(
    chain: Chain, batch: Mapping[str, Tensor], subnets: int = 4
) -> tuple[str, Subnet, float] | None:
    """The first block whose output for a one-hot mixture is not the subnet's, with that subnet and the distance.

    None where all blocks agree for a few subnets.

    Elastic layers keep the law by themselves. A forward that joins or cuts features, or sums over them, may not: what
    lies at the end for the largest size lies elsewhere for a smaller one.
    """
    rng = generator("faithful", chain.space.id)
    some = [chain.space.first(), *(chain.space.sample(rng) for _ in range(subnets - 1))]
    was = chain.training
    chain.eval()
    try:
        with torch.no_grad():
            return next((mismatch for subnet in some if (mismatch := _off(chain, batch, subnet)) is not None), None)
    finally:
        chain.train(was)


def _off(chain: Chain, batch: Mapping[str, Tensor], subnet: Subnet) -> tuple[str, Subnet, float] | None:
    certain = Mixture.one_hot(subnet, chain.space, next(iter(batch.values())).device)
    alone = together = chain.enter(batch)
    route = {layer.block: layer for layer in chain.route(subnet)}
    for index, block in enumerate(chain.blocks):
        together = chain.run_mixed(block, batch, together, certain)
        if index in route:
            layer = route[index]
            alone = run_layer(layer, chain.module(layer), alone, extra_inputs(layer, batch, subnet))
        off = _distance(alone, together)
        if off > TOLERANCE:
            return block.name, subnet, off
    return None


def _distance(alone: Activations, together: Activations) -> float:
    """How far the mixture's tensors, cut to the sizes of the subnet's, are from these."""
    worst = 0.0
    for one, other in zip(alone, together, strict=True):
        if one.is_floating_point() and one.dim() == other.dim():
            cut = other[tuple(slice(size) for size in one.shape)]
            worst = max(worst, float((cut - one).norm() / one.norm().clamp_min(1e-12)))
    return worst
