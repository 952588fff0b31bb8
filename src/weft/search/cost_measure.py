"""What the parts of a chain cost, each as a table over the choices that it depends on.

Nothing is sampled. A composite is traced once for every combination of the choices that its own forward asks the pick
for, with the elastic modules within as black boxes, which are worked out by themselves in turn. What travels between
modules is a table of shapes over choices. So a part depends on what it asks for, on what decides whether it runs, and
on what the shapes of its inputs follow.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from weft.elastic.extract import plain_module
from weft.elastic.mixture import choice_options
from weft.errors import SearchError
from weft.search.cost import flops, latencies, latency, parameters
from weft.search.cost_table import LIMIT, Table, Values, closed, combinations, reduced
from weft.search.cost_trace import Held, LevelTracer, NotedSubnet, Open, call_node, node_key
from weft.space import Subnet, Value
from weft.supernet import Chain, Layer, LazyLayer, as_activations, build_layer, build_on_meta, extract
from weft.utils.rng import generator

WHOLE = 64  # up to so many combinations a latency is that of a whole layer
CHECKS = 2  # random subnets, beside the last, that must agree with the tables
GIVES = ""  # among the parts of a module: what it gives
Key = tuple[Value | None, ...]
Parts = dict[str, Table]
Inside = Callable[[Values, Values], Parts | None]


class Measure:
    """Works out the tables of a chain for one forward of a batch."""

    def __init__(
        self, chain: Chain, batch: Mapping[str, Tensor], metric: str, device: torch.device, repeats: int
    ) -> None:
        self.given, self.metric, self.device, self.repeats = (chain, batch), metric, device, repeats
        self.space, self.rules = chain.space, chain.space.rules
        self._order = {name: at for at, name in enumerate(self.rules.choices)}
        self._start(real=metric == "latency")

    def _start(self, real: bool) -> None:
        self._real = real
        place = self.device if real else torch.device("meta")
        self.chain = (_copied(self.given[0], place) if real else build_on_meta(self.given[0])).eval()
        self.batch = {name: tensor.to(place) for name, tensor in self.given[1].items()}
        self._layer = ""
        self._open: set[nn.Module] = set()  # composites that are traced as a part of the one around them
        self._explored: dict[Any, tuple[tuple[str, ...], dict[Key, Any]]] = {}
        self._results: dict[Any, Parts] = {}
        self._costs: dict[Any, tuple[int, float]] = {}
        self._grids: dict[Any, list[tuple[Values, Values | None]]] = {}
        self._things: list[Any] = []  # what travels between modules, by number
        self._numbers: dict[Any, int] = {}

    def tables(self) -> list[Table]:
        """Tables whose sum is what a subnet costs, with NaN for combinations that no subnet has."""
        try:
            return self._tables()
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            if self._real:
                raise
        # Shapes were not enough: a layer reads values of tensors, so it has to run.
        self._start(real=True)
        return self._tables()

    def _tables(self) -> list[Table]:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if not self._real:
                stack.enter_context(torch.device("meta"))
            if self.metric == "flops":
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # as plain products it counts the same everywhere
            carry, found = self._thing(self.chain.enter(self.batch)), list[Table]()
            for index in range(len(self.chain.blocks)):
                parts = self._block(index, carry)
                carry = parts.pop(GIVES)
                found += parts.values()
            if self.metric == "parameters":
                found += [_number(-self.chain.get_parameter(str(tie.second)).numel()) for tie in self.chain.ties]
            if self.metric != "latency":
                self._check(found)
        return found

    # -- the chain

    def _block(self, index: int, carry: Table) -> Parts:
        names, picked = self._explore(index, self.chain.blocks[index].pick)

        def inside(given: Values, values: Values) -> Parts:
            name, entering = _found(picked, names, values), self._at(carry, given)
            return {GIVES: entering} if name is None else self._whole(self.chain.layers[name], entering, given)

        return self._over(names, {}, inside)

    def _whole(self, layer: Layer, carry: Table, given: Values) -> Parts:
        """A layer: a graph that does nothing but call it."""
        self._layer, module = layer.name, self.chain.module(layer)
        modules = [part for _, part in module.named_modules(remove_duplicate=False)]
        weights = [weight for _, weight in module.named_parameters(remove_duplicate=False)]
        if len(modules) > len(set(modules)) or len(weights) > len(set(weights)):
            # What is in two places is there once: only a trace of the whole layer tells.
            self._open |= {part for part in modules if isinstance(part, Module)}
        counts = {len(self._things[int(number)]) for number in carry.values.flat if not math.isnan(number)}
        if len(counts) > 1:
            raise SearchError(f"layer '{layer.name}' takes {counts} tensors: costs need one number of them")
        inputs = [self._each(carry, itemgetter(at)) for at in range(max(counts, default=0))]
        side = [self._thing(self.batch[name]) for name in layer.side]
        graph = fx.Graph()
        places = [graph.placeholder(f"x{at}") for at in range(len(inputs))]
        graph.output(graph.call_module("held", tuple(places), {name: graph.placeholder(name) for name in layer.side}))
        while True:
            try:
                parts = self._walk(Held(module), graph, [*inputs, *side], given)
                break
            except Open as wanted:
                self._open |= wanted.modules
                self._explored.clear()
                self._results.clear()
        gives = self._each(parts.pop(GIVES), lambda out: as_activations(out, layer.name))
        return {GIVES: gives} | {f"{layer.name} {path}": table for path, table in parts.items()}

    # -- modules

    def _walk(self, root: nn.Module, graph: fx.Graph, inputs: Sequence[Table], given: Values) -> Parts:
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
                found = {GIVES: self._thing(tensor)}
                if self.metric == "parameters" and isinstance(tensor, nn.Parameter):
                    found["own"] = _number(tensor.numel())
            else:
                module = root.get_submodule(path) if node.op == "call_module" else None
                found = self._node(node, module, [known[one] for one in node.all_input_nodes], given)
            known[node] = found.pop(GIVES)
            for inner, table in found.items():
                # Parameters are there once, however often their module is called.
                parts[f"{path if self.metric == 'parameters' else node.name} {inner}"] = table
        return {**parts, GIVES: known[node]}

    def _node(self, node: fx.Node, module: nn.Module | None, inputs: Sequence[Table], given: Values) -> Parts:
        names, plain, what = tuple[str, ...](), dict[Key, Any]({(): module}), node_key(node)
        if isinstance(module, Leaf):
            names, plain = self._explore(module, module.plain, module.reads)
        elif isinstance(module, Module):
            read = {name for part in module.modules() if isinstance(part, Module) for name in part.reads}
            if self.metric != "latency" or combinations(self.rules, closed(self.rules, read)) > WHOLE:
                return self._composite(module, node, inputs, given)
            make = partial(plain_module, module, inputs=len(node.args), side=tuple(node.kwargs))
            names, plain = self._explore((module, "whole"), make, read)

        def inside(given: Values, values: Values) -> Parts | None:
            numbers = [float(self._at(table, given).values) for table in inputs]
            if any(map(math.isnan, numbers)):
                return None
            key = (module, what, tuple(values.get(name) for name in names), *numbers)
            if key not in self._costs:
                things = [self._things[int(number)] for number in numbers]
                self._costs[key] = self._measured(node, _found(plain, names, values), things)
            number, cost = self._costs[key]
            return {GIVES: _number(number)} | ({"own": _number(cost)} if cost else {})

        return self._over((*names, *(name for table in inputs for name in table.names)), given, inside)

    def _composite(self, module: Module, node: fx.Node, inputs: Sequence[Table], given: Values) -> Parts:
        # What was settled around the module matters only where it is read within, or where its inputs follow it.
        below = self._below(module, node).union(*(table.names for table in inputs))
        near = {name: given[name] for name in closed(self.rules, below) if name in given}
        key = (module, tuple((t.names, t.values.tobytes()) for t in inputs), tuple(near.items()))
        if key not in self._results:
            names, graphs = self._graphs(module, node)

            def inside(given: Values, values: Values) -> Parts:
                graph = _found(graphs, names, values)
                return self._walk(Held(module), graph, [self._at(table, given) for table in inputs], given)

            self._results[key] = self._over(names, near, inside)
        return {path: self._at(table, given) for path, table in self._results[key].items()}

    def _graphs(self, module: Module, node: fx.Node) -> tuple[tuple[str, ...], dict[Key, Any]]:
        """The graph of a composite by the choices that it reads."""
        inner = [part for part in module.modules() if isinstance(part, Module) and not isinstance(part, Leaf)]

        def trace(subnet: Subnet) -> fx.Graph:
            try:
                graph = LevelTracer(subnet, len(node.args), tuple(node.kwargs), {module} | self._open).trace(
                    Held(module)
                )
            except (TypeError, fx.proxy.TraceError):
                if self._open.issuperset(inner):
                    raise
                raise Open(inner) from None  # what is within may give more than a tensor
            (out,) = next(node for node in graph.nodes if node.op == "output").args
            inside = module is not self.chain.module(self._layer)
            if inside and not (isinstance(out, fx.Node) and out.op != "placeholder"):
                raise Open([module])  # what is around it may look at what it gives: several tensors, or what it took
            return graph

        read = [name for part in inner if part is module or part in self._open for name in part.reads]
        return self._explore((module, len(node.args), tuple(node.kwargs)), trace, read)

    def _below(self, module: nn.Module, node: fx.Node) -> set[str]:
        """The choices that are read in a module or within it."""
        if isinstance(module, Leaf):
            return set(self._explore(module, module.plain, module.reads)[0])
        if not isinstance(module, Module):
            return set()
        names, graphs = self._graphs(module, node)
        within = {
            str(one.target): one
            for graph in graphs.values() if isinstance(graph, fx.Graph)
            for one in graph.nodes if one.op == "call_module"
        }  # fmt: skip
        root = Held(module)
        return set(names).union(*(self._below(root.get_submodule(path), one) for path, one in within.items()))

    def _explore(
        self, key: Any, function: Callable[[Subnet], Any], declared: Iterable[str] = ()
    ) -> tuple[tuple[str, ...], dict[Key, Any]]:
        """What a function of the subnet gives, by the choices that it asks for, whether they are declared or not."""
        while key not in self._explored:
            names, asked, found = closed(self.rules, declared), set[str](), dict[Key, Any]()
            for _, values in self._grid(names, {}):
                own = tuple(values.get(name) for name in names) if values is not None else None
                if values is None or own is None or own in found:
                    continue
                try:
                    found[own] = function(NotedSubnet(self.rules, values, asked.add))
                except Open:
                    raise
                except Exception as problem:  # raised if a subnet comes to it
                    found[own] = problem
                declared = (*names, *(asked & self.rules.choices.keys() - set(names)))
                if len(declared) > len(names):
                    break
            else:
                self._explored[key] = names, found
        return self._explored[key]

    def _measured(self, node: fx.Node, module: nn.Module | None, things: Sequence[Any]) -> tuple[int, float]:
        """What a node gives, by number, and what it costs."""

        def run() -> Any:
            return call_node(node, module, things)

        if self.metric == "latency":
            return self._intern(run()), latency(_Call(run), [things], self.repeats) if node.op != "output" else 0.0
        if self.metric == "parameters":
            return self._intern(run()), float(parameters(module)) if module is not None else 0.0
        with FlopCounterMode(display=False) as counter:
            out = run()
        return self._intern(out), float(counter.get_total_flops())

    # -- tables

    def _over(self, names: Iterable[str], given: Values, inside: Inside) -> Parts:
        """What there is inside for every combination of these choices, as tables over them too."""
        axes = tuple(name for name in closed(self.rules, names) if name not in given)
        found = [None if v is None else inside({**given, **raw}, v) for raw, v in self._grid(axes, given)]
        parts = Parts()
        for path in dict.fromkeys((GIVES, *(path for one in found if one is not None for path in one))):
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

    def _grid(self, axes: tuple[str, ...], given: Values) -> list[tuple[Values, Values | None]]:
        """Every combination of options of these choices, and all active values unless it is forbidden."""
        key = (axes, tuple(given.items()))
        if key not in self._grids:
            self._grids[key] = []
            for index in np.ndindex(*self._shape(axes)):
                raw = {n: choice_options(self.space, n)[at] for n, at in zip(axes, index, strict=True)}
                every, values = {**given, **raw}, Values()
                for name in sorted(every, key=self._order.__getitem__):
                    if self.rules.is_active(name, values):
                        values[name] = every[name]
                self._grids[key].append((raw, None if self.rules.broken(values) else values))
        return self._grids[key]

    def _at(self, table: Table, given: Values) -> Table:
        """What is left of a table once some choices are settled."""
        if not any(name in given for name in table.names):
            return table
        options = [(name, choice_options(self.space, name)) for name in table.names]
        at = tuple(own.index(given[name]) if name in given else slice(None) for name, own in options)
        return reduced(Table(tuple(n for n in table.names if n not in given), np.asarray(table.values[at])))

    def _each(self, table: Table, change: Callable[[Any], Any]) -> Table:
        """A table of things, each changed."""
        values = np.full(table.values.shape, math.nan)
        for index, number in np.ndenumerate(table.values):
            if not math.isnan(number):
                values[index] = self._intern(change(self._things[int(number)]))
        return reduced(Table(table.names, values))

    def _thing(self, thing: Any) -> Table:
        return _number(self._intern(thing))

    def _intern(self, thing: Any) -> int:
        key = _told_apart(thing)
        if key not in self._numbers:
            self._numbers[key] = len(self._things)
            self._things.append(thing)
        return self._numbers[key]

    # -- whole subnets

    def _samples(self, count: int) -> Iterator[tuple[Subnet, nn.Module, tuple[Tensor, ...]]]:
        """The last subnet and some random ones, each as a plain module with its inputs."""
        rng = generator("expected", self.space.id)
        chosen = [self.space.last(), *(self.space.sample(rng) for _ in range(count))] if self.space.choices else []
        for subnet in chosen or [self.space.subnet()]:
            side = [name for layer in self.chain.route(subnet) for name in layer.side]
            names = dict.fromkeys((*(self.chain.inputs or tuple(self.batch)[:1]), *side))
            plain = extract(self.chain, subnet, self.batch)
            yield subnet, plain, tuple(self.batch[name] for name in names)

    def _check(self, tables: Sequence[Table]) -> None:
        """Raises SearchError where whole subnets cost something else."""
        for subnet, plain, inputs in self._samples(CHECKS):
            cost = parameters(plain) if self.metric == "parameters" else flops(plain, inputs)
            told = self.total(tables, subnet)
            if told != cost:
                raise SearchError(
                    f"the {self.metric} of '{subnet}' are {cost:,} and not the {told:,.0f} of its parts: a layer does "
                    "what follows neither from the choices that its modules ask the pick for nor from the shapes of "
                    "their inputs"
                )

    def scale(self, tables: Sequence[Table]) -> float:
        """What whole subnets take, over the sum of their parts."""
        subnets, rows, inputs = zip(*self._samples(4), strict=True)
        times = latencies(rows, inputs[0], self.repeats)
        sums = [self.total(tables, subnet) for subnet in subnets]
        return statistics.median(time / part for time, part in zip(times, sums, strict=True)) if all(sums) else 1.0

    def total(self, tables: Sequence[Table], subnet: Subnet) -> float:
        """The sum of the tables for one subnet."""
        options = {name: choice_options(self.space, name) for table in tables for name in table.names}
        place = {n: own.index(subnet.values[n]) if n in subnet.values else 0 for n, own in options.items()}
        return float(sum(table.values[tuple(place[name] for name in table.names)] for table in tables))


class _Call(nn.Module):
    """A function as a module, to be timed; the arguments tell on which device."""

    def __init__(self, run: Callable[[], Any]) -> None:
        super().__init__()
        self._run = run

    def forward(self, *args: Any) -> Any:
        return self._run()


def _copied(chain: Chain, place: torch.device) -> Chain:
    """The chain with every layer built, and its weights on the device."""
    memo: dict[int, Any] = {id(chain.space): chain.space}
    for tensor in (*chain.parameters(), *chain.buffers()):
        if not tensor.is_meta:
            moved = tensor.detach().to(place)
            kept = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(moved, requires_grad=tensor.requires_grad) if kept else moved
    made = copy.deepcopy(chain, memo)
    for name in made.layers:
        module = made.module(name)
        if isinstance(module, LazyLayer) or any(t.is_meta for t in (*module.parameters(), *module.buffers())):
            where, _, label = name.rpartition(".")
            built = build_layer(module, name, 0, torch.device("cpu")).to(place)
            made.get_submodule(where).add_module(label, built)
    return made


def _found(known: Mapping[Key, Any], names: Sequence[str], values: Values) -> Any:
    """What was explored for these values; raises what was raised then."""
    found = known[tuple(values.get(name) for name in names)]
    if isinstance(found, Exception):
        raise found
    return found


def _number(number: float) -> Table:
    return Table((), np.array(float(number)))


def _told_apart(thing: Any) -> Any:
    """The shapes of tensors, and other values as they are."""
    if isinstance(thing, Tensor):
        return Tensor, tuple(thing.shape), thing.dtype, thing.stride()
    if isinstance(thing, (tuple, list)):
        return type(thing), tuple(map(_told_apart, thing))
    return type(thing), repr(thing)
