"""A trace of a model on fake tensors, for models that export refuses."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from weft.plan.capture.batch import Named
from weft.plan.capture.tidy import tidy


def real(constants: dict[str, Tensor]) -> dict[str, Tensor]:
    """The constants of a program; refused where one is the fake result of a computation that tracing lost."""
    for name, value in constants.items():
        if isinstance(value, FakeTensor):
            raise RuntimeError(f"a tensor of the forward {tuple(value.shape)} became the constant '{name}'")
    return constants


def trace(model: nn.Module, named: Named) -> dict[str, Any]:
    """The fields of a :class:`~weft.plan.capture.program.Program`. Buffers that the model changes come out as further
    results."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    results: list[int] = []

    def run(values: list[Tensor]) -> list[Tensor]:
        given = iter(values)
        own = {name: next(given) for name in parameters}
        state = {name: next(given) for name in buffers}
        tensors = {name: next(given) for name in named.tensors}
        held = dict(state)
        output = torch.func.functional_call(model, {**own, **state}, (), tensors)
        found = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        results[:] = [len(found)]
        return [*found, *(held[name] for name in buffers)]

    values = [*(value.detach() for value in parameters.values()), *buffers.values(), *named.tensors.values()]
    module = make_fx(torch.func.functionalize(run, remove="mutations"), tracing_mode="fake")(values)
    graph = module.graph
    for node in list(graph.nodes):  # what functionalize writes back into its arguments is returned as well
        if node.op == "call_function" and str(node.target) == "aten.copy_.default":
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)
    _functional(graph, len(parameters), list(buffers), results[0])
    graph.eliminate_dead_code()
    tidy(module)
    places = [node for node in graph.nodes if node.op == "placeholder"]
    names = [*parameters, *buffers, *named.tensors]
    by_name = dict(zip(names, places, strict=True))
    left = list(graph.output_node().args[0])  # type: ignore[arg-type]
    count = results[0]
    changed = {
        node.name: name
        for name, node in zip(buffers, left[count:], strict=True)
        if node is not None and node is not by_name[name]
    }
    constants = {
        node.name: value
        for node in graph.nodes
        if node.op == "get_attr" and isinstance(value := getattr(module, str(node.target), None), Tensor)
    }
    return {
        "program": module,
        "graph": graph,
        "way": "",
        "parameters": {by_name[name].name: name for name in parameters},
        "buffers": {by_name[name].name: name for name in buffers},
        "constants": real(constants),
        "inputs": {by_name[name].name: key for name, key in named.keys.items()},
        "results": tuple(node.name for node in left[:count]),
        "mutated": changed,
    }


def _functional(graph: fx.Graph, first: int, buffers: list[str], results: int) -> None:
    """Batch norm in training writes into its statistics without saying so; this form returns them."""
    places = [node for node in graph.nodes if node.op == "placeholder"][first : first + len(buffers)]
    output = graph.output_node()
    left = list(output.args[0])  # type: ignore[arg-type]
    for node in list(graph.nodes):
        if str(node.target) != "aten.native_batch_norm.default" or node.args[3] not in places or not node.args[5]:
            continue
        node.target = torch.ops.aten._native_batch_norm_legit_functional.default
        old = node.args[3:5]
        value = node.meta["val"]
        node.meta["val"] = (*value, *(source.meta["val"] for source in old))
        for number, source in enumerate(old):
            with graph.inserting_before(output):
                new = graph.call_function(operator.getitem, (node, 3 + number))
            new.meta["val"] = source.meta["val"]
            left[results + places.index(source)] = new
    output.args = (left,)
