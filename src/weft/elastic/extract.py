"""The plain form of an elastic module for one subnet: ordinary torch modules, joined by an fx graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn

from weft.elastic.module import Leaf, Module
from weft.errors import SupernetError
from weft.space import Subnet

_ROOT = "held"


def plain_module(module: nn.Module, subnet: Subnet, inputs: int = 1, extra_inputs: Sequence[str] = ()) -> nn.Module:
    """A copy of what the subnet uses of the module, without elastic parts: the same outputs to the last bit.

    A composite of elastic modules becomes an ``fx.GraphModule`` that takes ``inputs`` tensors, and the extra inputs by
    name.
    """
    if isinstance(module, Leaf):
        return module.plain(subnet)
    if not isinstance(module, Module):
        return copy.deepcopy(module)
    tracer = ElasticTracer(subnet, inputs, extra_inputs)
    holder = nn.Module()  # a root above the module, which may itself be a container of nothing but leaves
    holder.add_module(_ROOT, module)
    holder.training = module.training
    try:
        graph = tracer.trace(holder)
    except (TypeError, fx.proxy.TraceError) as problem:
        raise SupernetError(
            f"{type(module).__name__} cannot be extracted, since its forward cannot be traced: {problem}. "
            "A forward of elastic modules is made of calls of modules and torch functions"
        ) from problem
    root = nn.Module()
    for node in list(graph.nodes):
        if node.op not in ("call_module", "get_attr"):
            continue
        target = str(node.target)
        node.target = target.removeprefix(f"{_ROOT}.")
        where, _, name = node.target.rpartition(".")
        owner = _submodule(root, where)
        if name in owner._modules or name in owner._parameters or name in owner._buffers:
            continue
        if node.op == "call_module":
            owner.add_module(name, plain_module(holder.get_submodule(target), subnet))
        else:
            _hold_tensor(owner, name, holder, target)
    graph.lint()
    return fx.GraphModule(root, graph, class_name=type(module).__name__).train(module.training)


def _submodule(root: nn.Module, path: str) -> nn.Module:
    for part in path.split(".") if path else ():
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    return root


def _hold_tensor(owner: nn.Module, name: str, holder: nn.Module, target: str) -> None:
    where, _, last = target.rpartition(".")
    tensor = getattr(holder.get_submodule(where), last)
    if isinstance(tensor, nn.Parameter):
        owner.register_parameter(name, nn.Parameter(tensor.detach().clone(), tensor.requires_grad))
    else:
        owner.register_buffer(name, tensor.detach().clone())


class ElasticTracer(fx.Tracer):
    """Traces composites down to leaves and to modules without elastic parts, without the pick."""

    def __init__(self, subnet: Subnet, inputs: int, extra_inputs: Sequence[str]) -> None:
        super().__init__()
        self._subnet = subnet
        self._inputs = [f"x{index}" for index in range(inputs)] if inputs > 1 else ["x"]
        self._extra_inputs = list(extra_inputs)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Placeholders for the inputs; the pick is not an input of the graph."""
        values = [self.create_proxy("placeholder", name, (), {}) for name in (*self._inputs, *self._extra_inputs)]

        def run(root: nn.Module, *values: Any) -> Any:
            inputs, extras = values[: len(self._inputs)], values[len(self._inputs) :]
            return root.held(*inputs, pick=self._subnet, **dict(zip(self._extra_inputs, extras, strict=True)))  # type: ignore[operator]

        return run, [self.root, *values]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Leaf) or not any(isinstance(part, Module) for part in m.modules())

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.is_leaf_module(m, ""):
            args = tuple(value for value in args if not isinstance(value, Subnet))
            kwargs = {name: value for name, value in kwargs.items() if name != "pick"}
        return super().call_module(m, forward, args, kwargs)
