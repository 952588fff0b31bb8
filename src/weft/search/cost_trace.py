"""Traces of composites one by one, and subnets that tell which of their choices are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from typing import Any

from torch import fx, nn

from weft.elastic import Leaf, Module
from weft.elastic.extract import ElasticTracer
from weft.search.cost_table import Values
from weft.space import Subnet, Value
from weft.space.subnet import FrozenSpace


class Open(Exception):
    """Says that composites cannot be traced by themselves."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.modules = set(modules)


class Held(nn.Module):
    """A root above a module that is traced."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.add_module("held", module)


class LevelTracer(ElasticTracer):
    """Traces composites that are open, and stops at all others."""

    def __init__(self, subnet: Subnet, inputs: int, side: Sequence[str], opened: set[nn.Module]) -> None:
        super().__init__(subnet, inputs, side)
        self._opened = opened

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (isinstance(m, Module) and m not in self._opened) or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        told = all(isinstance(value, fx.Proxy) or value is self._subnet for value in (*args, *kwargs.values()))
        if isinstance(m, Module) and not isinstance(m, Leaf) and not told:
            self._opened = self._opened | {m}  # it is told more than tensors and the pick
        return super().call_module(m, forward, args, kwargs)


class NotedSubnet(Subnet):
    """Tells ``note`` of every choice that is asked for, whether there or not; to be shown in an error asks for none."""

    __slots__ = ()

    def __init__(self, rules: FrozenSpace, values: Values, note: Callable[[str], None]) -> None:
        super().__init__(rules.layout, _Noted(values, rules.choices, note))  # type: ignore[arg-type]

    def __str__(self) -> str:
        return "..."

    __repr__ = __str__


class _Noted(Mapping[str, Value]):
    """The values of a subnet."""

    def __init__(self, values: Values, every: Iterable[str], note: Callable[[str], None]) -> None:
        self._values, self._every, self._note = values, tuple(every), note

    def __getitem__(self, name: str) -> Value:
        self._note(name)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        self._note(str(name))
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        for name in self._every:
            self._note(name)
        return iter(self._values)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def keys(self) -> KeysView[str]:
        return _NotedKeys(self)


class _NotedKeys(KeysView[str]):
    def __ge__(self, other: Any) -> bool:
        """Asks for these names alone, where a set would look at the lengths first."""
        return all(name in self for name in other)


def node_key(node: fx.Node) -> Any:
    """What a node does, but for the values of its inputs."""
    places = {one: at for at, one in enumerate(node.all_input_nodes)}
    args = fx.node.map_arg((node.args, node.kwargs), lambda one: slice(places[one], "input"))
    return node.op, node.target if node.op != "call_module" else None, repr(args)


def call_node(node: fx.Node, module: nn.Module | None, values: Sequence[Any]) -> Any:
    """What the node gives with these values of its inputs."""
    known = dict(zip(node.all_input_nodes, values, strict=True))
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
    if node.op == "output":
        return args[0]
    if module is not None:
        return module(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)
