"""What the parts of a chain cost, each as a table over the choices that it depends on.

Nothing is sampled. A composite is traced once for every combination of the choices that its ``reads`` declare, with the
elastic modules inside it as black boxes, which are worked out by themselves in turn. What travels between modules is a
table of shapes over choices. So a part depends on the choices that it reads, on those that decide whether it runs, and
on those that the shapes of its inputs follow.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, KeysView, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from weft.elastic import Leaf, Module
from weft.elastic.extract import ElasticTracer, plain_module
from weft.elastic.mixture import choice_options
from weft.errors import SearchError
from weft.search.cost import latency, parameters
from weft.search.cost_table import LIMIT, Table, Values, closed, combinations, grid, reduced
from weft.space import Subnet, Value
from weft.supernet import Chain, Layer, LazyLayer, as_activations, build_layer, build_on_meta

WHOLE = 64  # a layer with up to so many combinations has its latency taken as one
OUTPUT = ""  # among the tables of a module: that of what it returns
Key = tuple[Value | None, ...]
Parts = dict[str, Table]


class Measure:
    """Works out the tables of a chain for one forward of a batch; on the meta device nothing is computed."""

    def __init__(
        self, chain: Chain, batch: Mapping[str, Tensor], metric: str, device: torch.device, repeats: int = 1
    ) -> None:
        self.chain = (build_on_meta(chain) if device.type == "meta" else _copied(chain, device)).eval()
        self.batch = {name: tensor.to(device) for name, tensor in batch.items()}
        self.metric, self.device, self.repeats = metric, device, repeats
        self.space, self.rules = chain.space, chain.space.rules
        self._layer = ""
        self._grids: dict[Any, list[tuple[Values, Values | None]]] = {}
        self._variants: dict[Any, tuple[tuple[str, ...], dict[Key, Any]]] = {}
        self._results: dict[Any, Parts] = {}
        self._costs: dict[Any, tuple[int, float]] = {}
        self._things: list[Any] = []  # what travels between modules; tables hold the numbers of these
        self._numbers: dict[Any, int] = {}

    def tables(self) -> list[Table]:
        """Tables whose sum is what a subnet costs, with NaN for combinations that no subnet has."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self.device.type == "meta":
                stack.enter_context(self.device)
            if self.metric == "flops":
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # as plain products it counts the same everywhere
            activations, found = _number(self._intern(self.chain.enter(self.batch))), list[Table]()
            for index in range(len(self.chain.blocks)):
                parts = self._block(index, activations)
                activations = parts.pop(OUTPUT)
                found += parts.values()
            if self.metric == "parameters":
                found += [_number(-self.chain.get_parameter(str(tie.second)).numel()) for tie in self.chain.ties]
        return found

    # -- the chain

    def _block(self, index: int, activations: Table) -> Parts:
        block = self.chain.blocks[index]
        condition = getattr(block, "condition", None)
        reads = {block.name} & self.rules.choices.keys() | set(() if condition is None else condition.names)
        names, layers = self._variants_of(index, block.pick, reads, f"block '{block.name}'")

        def inside(settled: Values, values: Values) -> Parts:
            name, entering = _variant(layers, names, values), self._at(activations, settled)
            return {OUTPUT: entering} if name is None else self._whole(self.chain.layers[name], entering, settled)

        return self._over(names, {}, inside)

    def _whole(self, layer: Layer, activations: Table, settled: Values) -> Parts:
        """A layer: a graph that does nothing but call it."""
        self._layer, module = layer.name, self.chain.module(layer)
        counts = {len(self._things[int(number)]) for number in activations.values.flat if not math.isnan(number)}
        if len(counts) > 1:
            raise SearchError(f"layer '{layer.name}' takes {counts} tensors: costs need one number of them")
        inputs = [self._each(activations, itemgetter(at)) for at in range(max(counts, default=0))]
        extra = [_number(self._intern(self.batch[name])) for name in layer.extra_inputs]
        graph = fx.Graph()
        places = [graph.placeholder(f"x{at}") for at in range(len(inputs))]
        graph.output(
            graph.call_module("held", tuple(places), {name: graph.placeholder(name) for name in layer.extra_inputs})
        )
        parts = self._walk(_Root(module), graph, [*inputs, *extra], settled)
        output = self._each(parts.pop(OUTPUT), lambda out: as_activations(out, layer.name))
        return {OUTPUT: output} | {f"{layer.name} {path}": table for path, table in parts.items()}

    # -- modules

    def _walk(self, root: nn.Module, graph: fx.Graph, inputs: Sequence[Table], settled: Values) -> Parts:
        """The parts of one traced forward."""
        known: dict[fx.Node, Table] = {}
        entering, parts = iter(inputs), Parts()
        for node in graph.nodes:
            path = str(node.target)
            if node.op == "placeholder":
                known[node] = next(entering)
                continue
            if node.op == "get_attr":
                where, _, name = path.rpartition(".")
                tensor = getattr(root.get_submodule(where), name)
                found = {OUTPUT: _number(self._intern(tensor))}
                if self.metric == "parameters" and isinstance(tensor, nn.Parameter):
                    found["own"] = _number(tensor.numel())
            else:
                module = root.get_submodule(path) if node.op == "call_module" else None
                found = self._node(node, module, [known[one] for one in node.all_input_nodes], settled)
            known[node] = found.pop(OUTPUT)
            for inner, table in found.items():
                # Parameters are there once, however often their module is called.
                parts[f"{path if self.metric == 'parameters' else node.name} {inner}"] = table
        return {**parts, OUTPUT: known[node]}

    def _node(self, node: fx.Node, module: nn.Module | None, inputs: Sequence[Table], settled: Values) -> Parts:
        names, plain, what = tuple[str, ...](), dict[Key, Any]({(): module}), _call_of(node)
        if isinstance(module, Leaf):
            names, plain = self._variants_of(module, module.plain, module.reads, type(module).__name__)
        elif isinstance(module, Module):
            read = _read_within(module)
            if self.metric != "latency" or combinations(self.rules, closed(self.rules, read)) > WHOLE:
                return self._composite(module, node, inputs, settled)
            make = partial(plain_module, module, inputs=len(node.args), extra_inputs=tuple(node.kwargs))
            names, plain = self._variants_of((module, "whole"), make, read, type(module).__name__)

        def inside(settled: Values, values: Values) -> Parts | None:
            numbers = [float(self._at(table, settled).values) for table in inputs]
            if any(map(math.isnan, numbers)):
                return None
            key = (module, what, tuple(values.get(name) for name in names), *numbers)
            if key not in self._costs:
                things = [self._things[int(number)] for number in numbers]
                self._costs[key] = self._measured(_Call(node, _variant(plain, names, values)), things)
            number, cost = self._costs[key]
            return {OUTPUT: _number(number)} | ({"own": _number(cost)} if cost else {})

        return self._over((*names, *(name for table in inputs for name in table.names)), settled, inside)

    def _composite(self, module: Module, node: fx.Node, inputs: Sequence[Table], settled: Values) -> Parts:
        # What is settled around the module matters only where it is read inside, or where its inputs follow it.
        names = closed(self.rules, _read_within(module).union(*(table.names for table in inputs)))
        near = {name: settled[name] for name in names if name in settled}
        key = (module, tuple((t.names, t.values.tobytes()) for t in inputs), tuple(near.items()))
        if key not in self._results:
            names, graphs = self._graphs(module, node)

            def inside(settled: Values, values: Values) -> Parts:
                graph = _variant(graphs, names, values)
                return self._walk(_Root(module), graph, [self._at(table, settled) for table in inputs], settled)

            self._results[key] = self._over(names, near, inside)
        return {path: self._at(table, settled) for path, table in self._results[key].items()}

    def _graphs(self, module: Module, node: fx.Node) -> tuple[tuple[str, ...], dict[Key, Any]]:
        """The graph of a composite by the choices that it reads.

        A graph goes one level deep, but where the forward needs to see more than tensors of the modules inside, and
        where one of these is in two places: it has its parameters once, and only a deep graph shows if it is there.
        """
        inputs, extra = len(node.args), tuple(node.kwargs)

        def trace(subnet: Subnet, kind: type[ElasticTracer]) -> fx.Graph:
            return kind(subnet, inputs, extra).trace(_Root(module))

        name, key = type(module).__name__, (module, inputs, extra)
        names, graphs = self._variants_of((*key, 1), partial(trace, kind=_LevelTracer), module.reads, name)
        if _has_twins(module) or any(isinstance(one, (TypeError, fx.proxy.TraceError)) for one in graphs.values()):
            return self._variants_of(key, partial(trace, kind=ElasticTracer), _read_within(module), name)
        return names, graphs

    def _variants_of(
        self, key: Any, function: Callable[[Subnet], Any], reads: Iterable[str], owner: str
    ) -> tuple[tuple[str, ...], dict[Key, Any]]:
        """What a function of the subnet returns, by the choices that its owner reads."""
        if key not in self._variants:
            names, found = closed(self.rules, reads), dict[Key, Any]()
            for _, values in self._grid(names, {}):
                if values is None or (at := tuple(values.get(name) for name in names)) in found:
                    continue
                try:
                    found[at] = function(Subnet(self.rules.layout, _Declared(values, names, self.rules.choices, owner)))
                except Exception as problem:  # raised if a subnet comes to it
                    found[at] = problem
            self._variants[key] = names, found
        return self._variants[key]

    def _measured(self, call: _Call, things: Sequence[Any]) -> tuple[int, float]:
        """What a node returns, by number, and what it costs."""
        if self.metric == "latency":
            return self._intern(call(*things)), 0.0 if call.is_output else latency(call, things, self.repeats)
        if self.metric == "parameters":
            return self._intern(call(*things)), float(parameters(call))
        with FlopCounterMode(display=False) as counter:
            number = self._intern(call(*things))
        return number, float(counter.get_total_flops())

    # -- tables

    def _over(self, names: Iterable[str], settled: Values, inside: Callable[[Values, Values], Parts | None]) -> Parts:
        """What ``inside`` returns for every combination of these choices, as tables over them too."""
        axes = tuple(name for name in closed(self.rules, names) if name not in settled)
        found = [None if v is None else inside({**settled, **raw}, v) for raw, v in self._grid(axes, settled)]
        parts = Parts()
        for path in dict.fromkeys((OUTPUT, *(path for one in found if one is not None for path in one))):
            tables = [None if one is None else one.get(path, _number(0)) for one in found]
            inner = {name for table in tables if table is not None for name in table.names}
            both = (*axes, *(name for name in self.rules.choices if name in inner))
            shape = self._shape(both)
            values = np.full((len(found), *shape[len(axes) :]), math.nan)
            for at, table in enumerate(tables):
                if table is not None:
                    values[at] = table.along(both[len(axes) :])
            ordered = tuple(name for name in self.rules.choices if name in both)
            turned = values.reshape(shape).transpose([both.index(name) for name in ordered])
            parts[path] = reduced(Table(ordered, turned))
        return parts

    def _shape(self, names: Sequence[str]) -> list[int]:
        shape = [len(choice_options(self.space, name)) for name in names]
        if math.prod(shape) > LIMIT:
            raise SearchError(
                f"the {self.metric} of layer '{self._layer}' depend on {', '.join(names)}: "
                f"{math.prod(shape):,} combinations, more than {LIMIT:,}. Let it depend on fewer choices"
            )
        return shape

    def _grid(self, axes: tuple[str, ...], settled: Values) -> list[tuple[Values, Values | None]]:
        """Every combination of options of these choices, and all active values unless it is forbidden."""
        key = (axes, tuple(settled.items()))
        if key not in self._grids:
            self._shape(axes)
            every = grid(self.rules, axes, settled)
            self._grids[key] = [(raw, None if self.rules.broken(values) else values) for raw, values in every]
        return self._grids[key]

    def _at(self, table: Table, settled: Values) -> Table:
        """What is left of a table once some choices are settled."""
        if not any(name in settled for name in table.names):
            return table
        options = [(name, choice_options(self.space, name)) for name in table.names]
        at = tuple(own.index(settled[name]) if name in settled else slice(None) for name, own in options)
        return reduced(Table(tuple(n for n in table.names if n not in settled), np.asarray(table.values[at])))

    def _each(self, table: Table, change: Callable[[Any], Any]) -> Table:
        """A table of things, each changed."""
        values = np.full(table.values.shape, math.nan)
        for index, number in np.ndenumerate(table.values):
            if not math.isnan(number):
                values[index] = self._intern(change(self._things[int(number)]))
        return reduced(Table(table.names, values))

    def _intern(self, thing: Any) -> int:
        key = _identity(thing)
        if key not in self._numbers:
            self._numbers[key] = len(self._things)
            self._things.append(thing)
        return self._numbers[key]


class _Declared(dict[str, Value]):
    """The values of the choices that a module declares; raises SearchError where it asks for another choice."""

    def __init__(self, values: Values, names: Sequence[str], choices: Mapping[str, Any], owner: str) -> None:
        super().__init__(values)
        self._undeclared, self._owner = choices.keys() - set(names), owner

    def __contains__(self, name: object) -> bool:
        if name in self._undeclared:
            raise SearchError(f"{self._owner} asks the pick for '{name}', which its `reads` do not name: add it there")
        return super().__contains__(name)

    def __getitem__(self, name: str) -> Value:
        if name not in self:
            raise KeyError(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return super().__getitem__(name) if name in self else default

    def keys(self) -> Any:
        return KeysView(self)


class _Root(nn.Module):
    """A root above a module that is traced."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.add_module("held", module)


class _LevelTracer(ElasticTracer):
    """Traces one composite, and stops at those inside it."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        inside = isinstance(m, Module) and m is not self.root.held
        return inside or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        plain = all(isinstance(value, fx.Proxy) or value is self._subnet for value in (*args, *kwargs.values()))
        if isinstance(m, Module) and not isinstance(m, Leaf) and not plain:
            raise TypeError(f"{type(m).__name__} takes more than tensors and the pick")
        return super().call_module(m, forward, args, kwargs)


class _Call(nn.Module):
    """What a node of a graph does, with a plain module in the place of an elastic one."""

    def __init__(self, node: fx.Node, module: nn.Module | None) -> None:
        super().__init__()
        self._node, self.module, self.is_output = node, module, node.op == "output"

    def forward(self, *inputs: Any) -> Any:
        node, known = self._node, dict(zip(self._node.all_input_nodes, inputs, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
        if self.is_output:
            return args[0]
        if self.module is not None:
            return self.module(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)


def _copied(chain: Chain, device: torch.device) -> Chain:
    """The chain with every layer built, and its weights on the device."""
    memo: dict[int, Any] = {id(chain.space): chain.space}
    for tensor in (*chain.parameters(), *chain.buffers()):
        if not tensor.is_meta:
            moved = tensor.detach().to(device)
            kept = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(moved, requires_grad=tensor.requires_grad) if kept else moved
    made = copy.deepcopy(chain, memo)
    for name in made.layers:
        module = made.module(name)
        if isinstance(module, LazyLayer) or any(t.is_meta for t in (*module.parameters(), *module.buffers())):
            where, _, label = name.rpartition(".")
            built = build_layer(module, name, 0, torch.device("cpu")).to(device)
            made.get_submodule(where).add_module(label, built)
    return made


def _read_within(module: nn.Module) -> set[str]:
    """The choices that a module reads, or a module inside it."""
    return {name for part in module.modules() if isinstance(part, Module) for name in part.reads}


def _has_twins(module: nn.Module) -> bool:
    """Whether a module or a parameter is in two places."""
    modules = [part for _, part in module.named_modules(remove_duplicate=False)]
    weights = [weight for _, weight in module.named_parameters(remove_duplicate=False)]
    return len(modules) > len(set(modules)) or len(weights) > len(set(weights))


def _variant(variants: Mapping[Key, Any], names: Sequence[str], values: Values) -> Any:
    """The one for these values; raises what was raised when it was made."""
    found = variants[tuple(values.get(name) for name in names)]
    if isinstance(found, Exception):
        raise found
    return found


def _number(number: float) -> Table:
    return Table((), np.array(float(number)))


def _identity(thing: Any) -> Any:
    """The shapes of tensors, and other values as they are."""
    if isinstance(thing, Tensor):
        return Tensor, tuple(thing.shape), thing.dtype, thing.stride()
    if isinstance(thing, (tuple, list)):
        return type(thing), tuple(map(_identity, thing))
    return type(thing), repr(thing)


def _call_of(node: fx.Node) -> Any:
    """What a node does, but for the values of its inputs."""
    places = {one: at for at, one in enumerate(node.all_input_nodes)}
    args = fx.node.map_arg((node.args, node.kwargs), lambda one: slice(places[one], "input"))
    return node.op, node.target if node.op != "call_module" else None, repr(args)
