"""The supernet: a chain of blocks that holds every candidate and runs the subnet of each call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.elastic import Mixture
from weft.elastic.module import takes_pick
from weft.errors import SpaceError, SupernetError, nearest
from weft.space import Choice as SpaceChoice
from weft.space import Space, Subnet, Value
from weft.supernet.blocks import Block
from weft.supernet.layer import (
    Activations,
    Layer,
    LazyLayer,
    as_activations,
    as_module,
    build_layer,
    build_layer_on_meta,
    extra_inputs,
    run_layer,
    shapes_only,
)
from weft.supernet.tied_weights import copy_tied_weights, make_ties
from weft.utils.rng import torch_seeded

Inputs = Tensor | Activations | Mapping[str, Tensor]
Factory = Callable[[], "Chain"]

_ROUTES_KEPT = 1 << 14


class Chain(nn.Module):
    """Blocks in a row. ``chain(inputs, subnet)`` runs one subnet, or the expectation under a mixture of them; the chain
    itself holds no active subnet.

    ``inputs`` names the entries of a batch that enter the chain (by default the first entry). The next block takes what
    a block returns, a tensor or a tuple of tensors. ``tie`` names pairs of parameters of different blocks
    that are one, such as ``("tokens.weight", "head.out.weight")``: each is a Parameter of its own, both begin with the
    values of the first, and training gives both the sum of their gradients, so that they stay equal.
    """

    def __init__(
        self, *blocks: Block, inputs: str | Sequence[str] | None = None, tie: Iterable[Sequence[str]] = ()
    ) -> None:
        super().__init__()
        if not blocks:
            raise SupernetError("a chain needs at least one block")
        self.blocks = tuple(blocks)
        self.inputs = (inputs,) if isinstance(inputs, str) else None if inputs is None else tuple(inputs)
        self.space = _common_space(self.blocks)
        self.layers: dict[str, Layer] = {}
        self._routes: dict[Subnet, tuple[Layer, ...]] = {}
        for index, block in enumerate(self.blocks):
            if any(other.name == block.name for other in self.blocks[:index]):
                raise SupernetError(f"two blocks are named '{block.name}': names of blocks must differ")
            for name, candidate in block.candidates().items():
                self.layers[name] = Layer(
                    name,
                    index,
                    block.shared,
                    block.consistency,
                    block.extra_inputs,
                    block.elastic,
                    block.is_architecture,
                    block.forward_fn,
                )
                _set_module(self, name, as_module(candidate, name))
        self.ties = make_ties(tie, self.layers)
        _check_layers(self)

    def module(self, layer: str | Layer) -> nn.Module:
        """The module of a layer."""
        return self.get_submodule(layer if isinstance(layer, str) else layer.name)

    def count(self, subnet: Subnet | None = None) -> int:
        """The number of parameters of the layers of a subnet, or of all layers; tied ones count once."""
        used = self.layers.values() if subnet is None else self.route(subnet)
        twice = sum(self.get_parameter(str(tie.second)).numel() for tie in self.ties)
        return sum(p.numel() for layer in used for p in self.module(layer).parameters()) - twice

    def route(self, subnet: Subnet) -> tuple[Layer, ...]:
        """The layers that the subnet uses, in chain order; raises SpaceError for a subnet of another space."""
        route = self._routes.get(subnet) if isinstance(subnet, Subnet) else None
        if route is None:
            self.space.check(subnet)
            names = (block.pick(subnet) for block in self.blocks)
            route = tuple(self.layers[name] for name in names if name is not None)
            if len(self._routes) >= _ROUTES_KEPT:
                self._routes.clear()
            self._routes[subnet] = route
        return route

    def enter(self, batch: Mapping[str, Tensor]) -> Activations:
        """The entries of a batch that enter the first block."""
        names = self.inputs or tuple(batch)[:1]
        missing = [name for name in names if name not in batch]
        if missing or not names:
            raise SupernetError(
                f"the chain takes {', '.join(names) or 'an input'}, but the batch has {', '.join(batch) or 'nothing'}"
            )
        return tuple(batch[name] for name in names)

    def forward(self, inputs: Inputs, subnet: Subnet | Mixture) -> Tensor | Activations:
        batch = inputs if isinstance(inputs, Mapping) else {}
        activations = self.enter(inputs) if isinstance(inputs, Mapping) else as_activations(inputs, "the chain's input")
        if isinstance(subnet, Mixture):
            for block in self.blocks:
                activations = self.run_mixed(block, batch, activations, subnet)
            return activations[0] if len(activations) == 1 else activations
        for layer in self.route(subnet):
            activations = run_layer(layer, self.module(layer), activations, extra_inputs(layer, batch, subnet))
        return activations[0] if len(activations) == 1 else activations

    def run_mixed(
        self, block: Block, batch: Mapping[str, Tensor], activations: Activations, mixture: Mixture
    ) -> Activations:
        """The expectation of a block's output under a mixture."""
        modules = {name: self.module(name) for name in block.candidates()}
        extras = extra_inputs(self.layers[next(iter(modules))], batch, mixture)
        return block.mixed(modules, activations, mixture, extras)

    def largest(self) -> Subnet:
        """The subnet with the most parameters in every choice block; other choices at their last option.

        Blocks are settled in chain order, each as large as what was settled before and the space's rules allow.
        """
        return self._extreme(largest=True)

    def smallest(self) -> Subnet:
        """The subnet with the fewest parameters in every choice block; other choices at their first option."""
        return self._extreme(largest=False)

    def _extreme(self, largest: bool) -> Subnet:
        if not self.space.choices:
            return self.space.subnet()
        best = self.space.last() if largest else self.space.first()
        for block in self.blocks:
            names = list(block.candidates())
            if block.name not in best.values or len(names) < 2:
                continue
            count = {name: sum(p.numel() for p in self.module(name).parameters()) for name in names}
            labels = [name.partition(".")[2] for name in sorted(names, key=lambda name: count[name], reverse=largest)]
            valid = (self._change(best, block.name, label, -1 if largest else 0) for label in labels)
            best = next((subnet for subnet in valid if subnet is not None), best)
        return best

    def _change(self, subnet: Subnet, name: str, value: str, option: int) -> Subnet | None:
        """The subnet with one choice changed, what that makes active at its first or last option; None if not valid."""

        def pick(other: str, choice: SpaceChoice) -> Value:
            if other == name:
                return value
            if other in subnet.values:
                return subnet.values[other]
            if choice.options is None:
                raise SpaceError(f"'{other}' has no options to take one from")
            return choice.options[option]

        try:
            return self.space.subnet(self.space.rules.settle(pick))
        except SpaceError:
            return None


def initialise(
    net: Chain | Factory, seed: int = 0, device: torch.device | str = "cpu", only: Sequence[str] | None = None
) -> Chain:
    """A chain whose layers (or only those named) are built and on the device.

    A factory is called under a generator seeded by ``seed``, so that the same seed gives the same supernet. Layers
    outside ``only`` stay as they are, on the meta device or unbuilt, which is how a stage builds no more than its own
    part.
    """
    if not isinstance(net, Chain):
        net = _call_seeded(net, seed)
    built = list(net.layers if only is None else only)
    for name in built:
        if name not in net.layers:
            raise SupernetError(f"no layer is named '{name}'{nearest(name, net.layers)}")
        _set_module(net, name, build_layer(net.module(name), name, seed, torch.device(device)))
    copy_tied_weights(net, seed, built)
    _check_layers(net)
    return net


def build_on_meta(net: Chain | Factory) -> Chain:
    """The chain with every layer built but without values: all shapes are right, and no weight is drawn or allocated.

    A chain is copied, less its values. A factory that reads values runs as usual, and its tensors are dropped.
    """
    if isinstance(net, Chain):
        memo: dict[int, Any] = {id(net.space): net.space}
        for tensor in (*net.parameters(), *net.buffers()):
            shape = tensor.detach().to("meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(shape, requires_grad=tensor.requires_grad) if is_parameter else shape
        chain = copy.deepcopy(net, memo)
    else:
        chain = shapes_only(lambda: _call_factory(net), lambda: _call_seeded(net, 0))
    for name in chain.layers:
        _set_module(chain, name, build_layer_on_meta(chain.module(name), name))
    return chain


def _call_factory(factory: Factory) -> Chain:
    chain = factory()
    if not isinstance(chain, Chain):
        raise SupernetError(f"the supernet's factory returned {type(chain).__name__}, not a weft.Chain")
    return chain


def _call_seeded(factory: Factory, seed: int) -> Chain:
    with torch_seeded(seed, "build"):
        return _call_factory(factory)


def _set_module(chain: Chain, name: str, module: nn.Module) -> None:
    block, _, label = name.rpartition(".")
    parent: nn.Module = chain
    try:
        if block:
            if block not in chain._modules:
                chain.add_module(block, nn.Module())
            parent = chain.get_submodule(block)
        parent.add_module(label, module)
    except KeyError as error:
        raise SupernetError(f"layer '{name}': {error.args[0]} in nn.Module, so choose another name") from None


def _common_space(blocks: Sequence[Block]) -> Space:
    spaces = [block.space for block in blocks if block.space is not None]
    if not spaces:
        return Space()
    if any(space is not spaces[0] for space in spaces):
        raise SupernetError("the blocks of a chain belong to different spaces: give every block the same Space object")
    return spaces[0]


def _check_layers(chain: Chain) -> None:
    """Raises SupernetError for weights that are in two layers, and for elastic modules in blocks that pass no pick."""
    owner: dict[int, str] = {}
    for name, layer in chain.layers.items():
        module = chain.module(name)
        if isinstance(module, LazyLayer):
            continue
        if takes_pick(module) and not layer.elastic and layer.forward_fn is None:
            raise SupernetError(
                f"layer '{name}' is elastic ({type(module).__name__}) and needs the pick, which candidates of a choice "
                "and shared layers do not get: put it into a weft.Elastic block, within an elastic.Switch if it is one "
                "of several"
            )
        # Buffers count too: batch statistics belong to one layer.
        for path, tensor in (*module.named_parameters(), *module.named_buffers()):
            other = owner.setdefault(tensor.data_ptr() or id(tensor), name)
            if other != name:
                raise SupernetError(
                    f"layers '{other}' and '{name}' share the weight '{path}': a weight belongs to one layer. "
                    "Give each its own and name both in Chain(tie=...), or put both uses into one block"
                )
