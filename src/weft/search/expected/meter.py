"""What the parts of a subnet cost: measured on the extracted modules, each with the choices that it reads."""

from __future__ import annotations

import copy
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from weft.search.cost import latencies, latency
from weft.search.expected.noted import Noted
from weft.search.expected.table import combinations
from weft.search.storages import tensors
from weft.space import Subnet
from weft.space.rules import Rules
from weft.supernet import Carry, Chain, Layer, Unbuilt, as_carry, build_layer
from weft.supernet.elastic import Leaf, Module
from weft.supernet.elastic.plain import plain_module

WHOLE = 64  # up to so many combinations a latency is that of a whole layer, and a part follows the modules around it
JOINT = 256  # up to so many combinations of the choices that a module reads are all tried, else each choice by itself
Unit = tuple[str, str]  # a layer, and the path of a module within it


class Meter:
    """Measures the parts of subnets as extraction gives them, and notes which choices each part reads."""

    def __init__(
        self, chain: Chain, batch: Mapping[str, Tensor], metric: str, device: torch.device, repeats: int
    ) -> None:
        self.chain, self.batch, self.metric, self.device, self.repeats = chain, batch, metric, device, repeats
        self.reads: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.whole: dict[str, bool] = {}
        self._real = metric == "latency"
        self._inside: list[str] = []
        self._entered: set[str] = set()
        self._skeletons: dict[str, nn.Module] = {}
        self._known: dict[Any, Run] = {}
        self._gauged: dict[Any, tuple[float, Any]] = {}
        self._names: dict[Unit, tuple[int, set[str]]] = {}
        self._counter = FlopCounterMode(display=False)

    def costs(self, subnet: Subnet) -> dict[Unit, float]:
        """The cost of every part that costs anything."""
        return {unit: cost for run in self.runs(subnet) for unit, cost in run.costs.items()}

    def runs(self, subnet: Subnet) -> list[Run]:
        """What there is to know of each layer that the subnet uses."""
        try:
            return self._runs(subnet)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            if self._real:
                raise
        # Shapes were not enough: a layer reads values of tensors, so it has to run.
        self._real = True
        self._skeletons.clear()
        self._known.clear()
        return self._runs(subnet)

    def own(self, unit: Unit) -> list[tuple[str, ...]]:
        """The choices that a module itself reads, one by one if they have many combinations."""
        rules, read = self.chain.space.rules, self.reads[unit[0]].get(unit[1], set())
        names = tuple(name for name in rules.choices if name in read)
        if self.whole[unit[0]] or not names:
            return []
        return [names] if combinations(rules, names) <= JOINT else [(name,) for name in names]

    def names(self, unit: Unit) -> set[str]:
        """The choices that a part is known to read, itself or through the modules around it, which may leave it out.

        What a composite computes by itself is taken to follow all that is read within, where that is little.
        """
        rules, reads = self.chain.space.rules, self.reads[unit[0]]
        version = sum(len(names) for names in reads.values())
        if self._names.get(unit, (-1, set()))[0] != version:
            self._names[unit] = version, self._follows(unit, rules, reads)
        return self._names[unit][1]

    def _follows(self, unit: Unit, rules: Rules, reads: Mapping[str, set[str]]) -> set[str]:
        own = set().union(*(names for path, names in reads.items() if _within(unit[1], path)))
        every = own.union(*(names for path, names in reads.items() if self.whole[unit[0]] or _within(path, unit[1])))
        if self.whole[unit[0]] or combinations(rules, every) <= WHOLE:
            return every
        return own if combinations(rules, own) <= WHOLE else set(reads.get(unit[1], ()))

    def scale(self, subnets: Iterable[Subnet]) -> float:
        """What whole subnets take, over the sum of their parts."""
        some = [subnet for subnet, _ in zip(subnets, range(5), strict=False)]
        sums = [sum(self.costs(subnet).values()) for subnet in some]
        times = latencies([self._row(subnet) for subnet in some], self._enter(), self.repeats)
        return statistics.median(time / part for time, part in zip(times, sums, strict=True)) if all(sums) else 1.0

    def _runs(self, subnet: Subnet) -> list[Run]:
        found: list[Run] = []
        for layer in self.chain.route(subnet):
            carry = found[-1].carry if found else self._enter()
            key = self._key(layer, subnet, carry)
            if key not in self._known:
                run = self._measured(layer, subnet, carry)
                key = self._key(layer, subnet, carry)  # the layer may have read more choices than ever before
                self._known[key] = run
            found.append(self._known[key])
        return found

    def _key(self, layer: Layer, subnet: Subnet, carry: Carry) -> Any:
        read = sorted(set().union(*self.reads[layer.name].values()))
        return layer.name, tuple((name, subnet.values.get(name)) for name in read), shapes_of(carry)

    def _enter(self) -> Carry:
        return tuple(tensor.to(self._place) for tensor in self.chain.enter(self.batch))

    @property
    def _place(self) -> torch.device:
        return self.device if self._real else torch.device("meta")

    def _measured(self, layer: Layer, subnet: Subnet, carry: Carry) -> Run:
        plain = self._plain(layer, subnet, len(carry))
        side = {name: self.batch[name].to(self._place) for name in layer.side}
        read = set().union(*self.reads[layer.name].values())
        few = self.metric == "latency" and combinations(self.chain.space.rules, read) <= WHOLE
        whole = self.whole.setdefault(layer.name, few)
        costs: dict[str, float] = defaultdict(float)
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if not self._real:
                stack.enter_context(torch.device("meta"))
            if self.metric == "flops":
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # as plain products it counts the same everywhere
                self._counter = stack.enter_context(FlopCounterMode(display=False))
            if isinstance(plain, fx.GraphModule) and layer.elastic and not whole:

                def gauge(path: str, what: str, run: Callable[[], Any], args: Any) -> Any:
                    own = tuple(subnet.values.get(name) for name in sorted(self.reads[layer.name].get(path, ())))
                    cost, out = self._gauge((layer.name, path, own, what), run, args)
                    costs[path] += cost
                    return out

                out = _Parts(plain, gauge).run(*carry, *side.values())
            else:
                key = self._key(layer, subnet, carry)
                costs[""], out = self._gauge(key, lambda: plain(*carry, **side), carry)
        if self.metric == "parameters":
            called = {str(n.target) for n in plain.graph.nodes} if isinstance(plain, fx.GraphModule) else set()
            for name, parameter in plain.named_parameters():
                above = ["", *itertools.accumulate(name.split(".")[:-1], "{}.{}".format)] if layer.elastic else [""]
                costs[next((path for path in above if path in called), above[-1])] += parameter.numel()
        kept = {(layer.name, path): cost for path, cost in costs.items() if cost}
        return Run(kept, as_carry(out, layer.name), [(layer.name, path) for path in sorted(self._entered)])

    def _gauge(self, key: Any, run: Callable[[], Any], args: Any) -> tuple[float, Any]:
        """What a run costs, and what it gives; runs with the same key are the same but for values of tensors."""
        if key in self._gauged and not self._real:
            return self._gauged[key]
        before = self._counter.get_total_flops()
        out = run()
        cost = float(self._counter.get_total_flops() - before)
        if self.metric == "latency":  # timed once, since no two timings agree
            cost = self._gauged[key][0] if key in self._gauged else latency(_Call(run), [args], self.repeats)
        self._gauged[key] = cost, None if self._real else out
        return cost, out

    def _row(self, subnet: Subnet) -> _Row:
        carries = [self._enter(), *(run.carry for run in self.runs(subnet))]
        parts = []
        for layer, carry in zip(self.chain.route(subnet), carries, strict=False):
            side = {name: self.batch[name].to(self._place) for name in layer.side}
            parts.append((self._plain(layer, subnet, len(carry)), side, layer.name))
        return _Row(parts)

    def _plain(self, layer: Layer, subnet: Subnet, inputs: int) -> nn.Module:
        if layer.name not in self._skeletons:
            self._skeletons[layer.name] = self._skeleton(layer)
        skeleton = self._skeletons[layer.name]
        self._entered.clear()
        if not layer.elastic:
            return skeleton.eval()
        reads = self.reads[layer.name]
        rules = self.chain.space.rules

        def note(name: str) -> None:
            if name in rules.choices:
                reads[self._inside[-1] if self._inside else ""].add(name)

        noted = rules.subnet(Noted(subnet.values, rules.choices, note))
        return plain_module(skeleton, noted, inputs, layer.side).eval()

    def _skeleton(self, layer: Layer) -> nn.Module:
        """A copy of the layer that tells where the pick is read; its weights are shared, or on the meta device."""
        module = self.chain.module(layer)
        if isinstance(module, Unbuilt) or (self._real and any(tensor.is_meta for tensor in _weights(module))):
            module = module if isinstance(module, Unbuilt) else copy.deepcopy(module)
            module = build_layer(module, layer.name, 0, torch.device("cpu"))
        memo: dict[int, Any] = {id(self.chain.space): self.chain.space}
        for tensor in _weights(module):
            moved = tensor.detach().to(self._place)
            kept = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(moved, requires_grad=tensor.requires_grad) if kept else moved
        copied = copy.deepcopy(module, memo)
        for path, part in copied.named_modules():
            if isinstance(part, Leaf):
                part.plain = self._noting(path, part.plain, False)  # type: ignore[method-assign]
            elif isinstance(part, Module):
                part.forward = self._noting(path, part.forward, True)
        return copied

    def _noting(self, path: str, function: Callable[..., Any], branches: bool) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(path)
            if branches:
                self._entered.add(path)
            try:
                return function(*args, **kwargs)
            finally:
                self._inside.pop()

        return run


@dataclass(frozen=True, slots=True)
class Run:
    """What the parts of a layer cost, what the layer gives, and the composites that took part."""

    costs: dict[Unit, float]
    carry: Carry
    entered: list[Unit]


class _Parts(fx.Interpreter):
    """Runs a plain layer and has each node gauged, under the path of the module that it belongs to."""

    def __init__(self, module: fx.GraphModule, gauge: Callable[[str, str, Callable[[], Any], Any], Any]) -> None:
        super().__init__(module)
        self._gauge = gauge

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output", "get_attr"):
            return super().run_node(n)
        args, kwargs = given = self.fetch_args_kwargs_from_env(n)
        stack = list(n.meta.get("nn_module_stack", ()))
        path = str(n.target) if n.op == "call_module" else str(stack[-1]).partition(".")[2] if stack else ""
        what = (n.op, str(n.target), shapes_of(tensors(given)), fx.node.map_aggregate(given, _unless_tensor))
        return self._gauge(path, repr(what), lambda: getattr(self, n.op)(n.target, args, kwargs), given)


class _Call(nn.Module):
    """A function as a module, to be timed; the arguments tell on which device."""

    def __init__(self, run: Callable[[], Any]) -> None:
        super().__init__()
        self._run = run

    def forward(self, *args: Any) -> Any:
        return self._run()


class _Row(nn.Module):
    """The plain layers of a subnet, one after another."""

    def __init__(self, parts: Sequence[tuple[nn.Module, dict[str, Tensor], str]]) -> None:
        super().__init__()
        self.rows = nn.ModuleList(module for module, _, _ in parts)
        self._given = [(side, name) for _, side, name in parts]

    def forward(self, *carry: Tensor) -> Any:
        for module, (side, name) in zip(self.rows, self._given, strict=True):
            carry = as_carry(module(*carry, **side), name)
        return carry


def around_of(unit: Unit) -> Unit:
    return unit[0], unit[1].rpartition(".")[0]


def _within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _weights(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _unless_tensor(value: Any) -> Any:
    return ... if isinstance(value, Tensor) else value


def shapes_of(several: Iterable[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in several)
