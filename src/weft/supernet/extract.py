"""Extraction: a subnet as a plain nn.Module of ordinary torch layers, with no trace of weft."""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from weft.elastic.extract import plain_module
from weft.errors import SupernetError
from weft.space import Subnet
from weft.supernet.chain import Chain
from weft.supernet.layer import Layer, LazyLayer, as_activations, failure
from weft.supernet.tied_weights import share_tied_weights


def extract(chain: Chain, subnet: Subnet, example: Mapping[str, Tensor] | None = None) -> nn.Module:
    """A copy of the subnet's layers in evaluation mode: the same outputs to the last bit on the CPU.

    Where every layer takes and returns one tensor this is an ``nn.Sequential``. A chain that carries tuples or takes
    extra inputs becomes an ``fx.GraphModule`` (its code can be read with ``.code``), and for that an example batch is
    needed. Parameters that are tied in the chain are one Parameter here.
    """
    route = chain.route(subnet)
    for layer in route:
        if isinstance(chain.module(layer), LazyLayer):
            raise SupernetError(f"layer '{layer.name}' has not been built yet: call initialise(chain, seed) first")
    if len({_label(layer) for layer in route}) != len(route):
        raise SupernetError("two layers of this subnet have the same name once '.' is replaced by '_': rename one")
    if example is None:
        if (chain.inputs is not None and len(chain.inputs) > 1) or any(layer.extra_inputs for layer in route):
            raise SupernetError(
                "this chain takes several inputs: give extract() an example batch, as in extract(subnet, example=batch)"
            )
        plain: nn.Module = nn.Sequential(OrderedDict((_label(layer), _part(chain, layer, subnet)) for layer in route))
    else:
        plain = _graph(chain, route, subnet, example)
    share_tied_weights(plain, chain.ties, {layer.name: _label(layer) for layer in route})
    for parameter in plain.parameters():
        parameter.grad = None
    return plain.eval()


def _graph(chain: Chain, route: tuple[Layer, ...], subnet: Subnet, example: Mapping[str, Tensor]) -> nn.Module:
    activations = chain.enter(example)
    names = chain.inputs or tuple(example)[:1]
    extra = dict.fromkeys(name for layer in route for name in layer.extra_inputs)
    graph = fx.Graph()
    entered = {name: graph.placeholder(name) for name in dict.fromkeys((*names, *extra))}
    nodes: list[fx.Node] = [entered[name] for name in names]
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    single = len(names) == 1 and not extra
    with torch.no_grad():
        for layer in route:
            target = _label(layer)
            module = parts[target] = _part(chain, layer, subnet, len(activations))
            try:
                out: Any = module.eval()(*activations, **{name: example[name] for name in layer.extra_inputs})
            except (RuntimeError, IndexError) as problem:
                raise failure(layer, activations, problem) from problem
            node = graph.call_module(target, tuple(nodes), {name: entered[name] for name in layer.extra_inputs})
            activations = as_activations(out, layer.name)
            if isinstance(out, Tensor):
                nodes = [node]
            else:
                single = False
                nodes = [graph.call_function(operator.getitem, (node, i)) for i in range(len(activations))]
    graph.output(nodes[0] if len(nodes) == 1 else tuple(nodes))
    return nn.Sequential(parts) if single else fx.GraphModule(dict(parts), graph, class_name="Subnet")


def _label(layer: Layer) -> str:
    return layer.name.replace(".", "_")


def _part(chain: Chain, layer: Layer, subnet: Subnet, inputs: int = 1) -> nn.Module:
    module = chain.module(layer)
    return plain_module(module, subnet, inputs, layer.extra_inputs) if layer.elastic else copy.deepcopy(module)
