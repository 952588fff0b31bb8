"""Small changes to a captured program that make it one which can be run in parts, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

Made = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def tidy(module: fx.GraphModule) -> None:
    """Assertions about whole tensors go, and operands that are read for their type only; a view becomes a reshape,
    since a part need not lie as the whole would; what autograd does not know becomes what it knows. Names stay."""
    graph = module.graph
    for node in list(graph.nodes):
        name = str(node.target)
        if node.op != "call_function":
            continue
        if name in ("aten.view.default", "aten._unsafe_view.default"):
            node.target = torch.ops.aten.reshape.default
        elif name.startswith("aten.squeeze."):  # a part may have an axis of one where the whole has more
            node.target, node.kwargs = torch.ops.aten.reshape.default, {}
            node.args = (node.args[0], list(node.meta["val"].shape))
        elif name.startswith("aten.new_"):
            node.target, node.args, node.kwargs = _factory(node)
        elif "_assert" in name and not node.users:
            graph.erase_node(node)
        elif name == "aten.copy.default":
            node.target, node.args, node.kwargs = _copied(graph, node)
        elif name == "aten.type_as.default":
            dtype = node.meta["val"].dtype
            node.target, node.args, node.kwargs = torch.ops.aten._to_copy.default, (node.args[0],), {"dtype": dtype}
    module.recompile()


def detach(module: fx.GraphModule) -> None:
    """Detaches what is computed under ``no_grad``. Export marks such parts as submodules, which become part of the one
    graph later; without this the gradient would then flow through them."""
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and isinstance(inner := getattr(module, str(node.target), None), fx.GraphModule):
            detach(inner)
            if any("wrap_with_set_grad_enabled" in str(user.target) and user.args[0] is False for user in node.users):
                _detach_results(inner)


def _detach_results(inner: fx.GraphModule) -> None:
    output = inner.graph.output_node()

    def detached(value: Any) -> Any:
        found = value.meta.get("val") if isinstance(value, fx.Node) else None
        if not isinstance(found, Tensor) or not found.is_floating_point():
            return value
        node = inner.graph.call_function(torch.ops.aten.detach.default, (value,))
        node.meta = dict(value.meta)
        return node

    with inner.graph.inserting_before(output):
        output.args = (pytree.tree_map(detached, output.args[0]),)
    inner.recompile()


def _factory(node: fx.Node) -> Made:
    """``x.new_ones(size)`` without x."""
    value = node.meta["val"]
    name = str(node.target).split(".")[1].removeprefix("new_")
    options = {"dtype": value.dtype, "device": value.device}
    size = list(value.shape)
    if name == "full":
        filling = node.args[2] if len(node.args) > 2 else node.kwargs["fill_value"]
        return torch.ops.aten.full.default, (size, filling), options
    makers: dict[str, Callable[..., Any]] = {
        "zeros": torch.ops.aten.zeros.default,
        "ones": torch.ops.aten.ones.default,
    }
    return makers.get(name, torch.ops.aten.empty.memory_format), (size,), options


def _copied(graph: fx.Graph, node: fx.Node) -> Made:
    """``copy(x, y)``, which autograd does not know, is y in the shape and type of x."""
    value, source = node.meta["val"], node.args[1]
    if isinstance(source, fx.Node) and source.meta["val"].shape != value.shape:
        with graph.inserting_before(node):
            wide = graph.call_function(torch.ops.aten.expand.default, (source, list(value.shape)))
        wide.meta = {**node.meta, "val": source.meta["val"].expand(value.shape)}
        source = wide
    return torch.ops.aten._to_copy.default, (source,), {"dtype": value.dtype}
