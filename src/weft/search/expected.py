"""Expected costs: the parameters, FLOPs or latency of every subnet of a chain as a sum of tables over few choices."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from weft.errors import SearchError, nearest
from weft.keys import generator
from weft.search.cost import latencies, latency
from weft.search.storages import tensors
from weft.space import Space, Subnet, Value
from weft.space.counter import Counter, TooManyCases
from weft.space.rules import Rules
from weft.supernet import Carry, Chain, Layer, Unbuilt, as_carry, build_layer
from weft.supernet.elastic import Leaf, Mixture, Module
from weft.supernet.elastic.mixture import choice_options
from weft.supernet.elastic.plain import plain_module

METRICS = ("parameters", "flops", "latency")
LIMIT = 1 << 14  # combinations of options that one table may have
CLIQUE = 1 << 22  # and that may come together where the range is worked out
TRIES = 64  # random fillings of a partial subnet before the exact, slower way
TIMES = 4  # subnets that are measured in search of one combination that a module is to be seen with
CHECKS = 16  # random subnets that must agree with the tables before they are believed
WHOLE = 64  # up to so many combinations a latency is that of a whole layer, and a part follows the modules around it
JOINT = 256  # up to so many combinations of the choices that a module reads are all tried, else each choice by itself

Array = npt.NDArray[np.float64]
Values = dict[str, Value]
Unit = tuple[str, str]  # a layer, and the path of a module within it
Key = tuple[Value | None, ...]

_SIZES = ""  # in the place of a layer: the sizes of what enters the block of this number


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Numbers by the options of a few choices: one axis a choice, in the order of the space."""

    names: tuple[str, ...]
    values: Array

    def along(self, names: Sequence[str]) -> Array:
        """The values with an axis for each of these names, which hold its own in the same order."""
        sizes = dict(zip(self.names, self.values.shape, strict=True))
        return self.values.reshape([sizes.get(name, 1) for name in names])


class Expected:
    """What subnets cost: exact for parameters and FLOPs, a sum of measured parts for latency (milliseconds).

    ``low`` and ``high`` are the least and the most that a valid subnet costs; where constraints tie so many choices
    together that this cannot be worked out, they are bounds that no subnet goes beyond. It holds tables alone and can
    be pickled.
    """

    def __init__(
        self,
        metric: str,
        space_id: str,
        options: Mapping[str, tuple[Value, ...]],
        tables: Sequence[Table],
        allowed: Sequence[Array | None],
        low: float,
        high: float,
    ) -> None:
        self.metric, self.space_id, self.low, self.high = metric, space_id, low, high
        self.options = {name: options[name] for table in tables for name in table.names}
        self.constant = float(sum(table.values.sum() for table in tables if not table.names))
        pairs = [(table, mask) for table, mask in zip(tables, allowed, strict=True) if table.names]
        pairs.sort(key=lambda pair: pair[1] is not None)
        self.tables = tuple(table for table, _ in pairs)
        self._allowed = tuple(mask for _, mask in pairs)
        self._on: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_on": {}}

    def __repr__(self) -> str:
        return f"Expected({self.metric}, {len(self.tables)} tables, {self.low:g} to {self.high:g})"

    def of(self, subnet: Subnet) -> float:
        """The cost of one subnet."""
        if subnet.space_id != self.space_id:
            raise SearchError(f"the subnet '{subnet}' is of space {subnet.space_id}, not of {self.space_id}")
        total = self.constant
        for table in self.tables:
            # An inactive choice makes no difference, so that any option of it will do.
            given = [(self.options[name], subnet.values.get(name)) for name in table.names]
            total += table.values[tuple(0 if value is None else options.index(value) for options, value in given)]
        return float(total)

    def expect(self, mixture: Mixture) -> Tensor:
        """The expectation over the valid subnets of a mixture, in its precision; differentiable, and never waits for
        the device but to bring the tables there once.

        Constraints are minded by the tables that hold all choices they tie together, if these have no more than 16,384
        combinations.
        """
        if not self.tables:
            return torch.tensor(self.constant)
        joints = [mixture.joint(table.names) for table in self.tables]
        known = self._tables_on(joints[0])
        free = len(joints) - len(known) + 1
        total = torch.dot(torch.cat([joints[0][:0], *joints[:free]]), known[0][0]) + self.constant
        for joint, (weighted, allowed) in zip(joints[free:], known[1:], strict=True):
            total = total + torch.dot(joint, weighted) / torch.dot(joint, allowed).clamp_min(1e-30)
        return total

    def _tables_on(self, like: Tensor) -> list[tuple[Tensor, Tensor]]:
        """On the device: all tables without forbidden combinations as one, then each other one with what is allowed."""
        key = (like.device, like.dtype)
        if key not in self._on:
            free = [
                table.values.ravel() for table, mask in zip(self.tables, self._allowed, strict=True) if mask is None
            ]
            pairs = [(np.concatenate([np.zeros(0), *free]), np.zeros(0))]
            for table, mask in zip(self.tables, self._allowed, strict=True):
                if mask is not None:
                    pairs.append(((table.values * mask).ravel(), mask.ravel()))
            self._on[key] = [tuple(torch.from_numpy(one).to(*key) for one in pair) for pair in pairs]  # type: ignore[misc]
        return self._on[key]


def measure_expected(
    chain: Chain,
    batch: Mapping[str, Tensor],
    metric: str,
    device: torch.device | str = "cpu",
    repeats: int = 20,
) -> Expected:
    """The cost of every subnet of the chain, for one forward of the batch.

    A few subnets are extracted and measured part by part, such that every part is seen with every combination of the
    choices that it depends on: those it reads, and those that its inputs' sizes are found to follow. Random subnets
    are compared with the result until none differs. Parameters and FLOPs need no device and, unless a layer reads
    values of tensors, nothing is computed. A latency is the median of ``repeats`` on the device, layer by layer (part
    by part where a layer reads choices with more than 64 combinations), and scaled such that whole subnets come out
    right in the middle.

    What a composite does only for one rare combination of the choices that it asks for may be missed where these have
    more than 256 combinations. Raises SearchError where a part depends on choices with more than 16,384.
    """
    if metric not in METRICS:
        raise SearchError(f"no metric '{metric}' can be expected{nearest(metric, METRICS)}")
    meter = _Meter(chain, batch, metric, torch.device(device), repeats)
    survey = _Survey(chain, meter)
    survey.cover()
    rules = chain.space.rules
    tables = [_pruned(table) for table in survey.tables()]
    if metric == "latency":
        scale = meter.scale(survey.seen)
        tables = [Table(table.names, table.values * scale) for table in tables]
    tables = _merged([_tied(rules, table) for table in tables])
    low, high = _range(chain.space, tables)
    allowed = [_allowed(rules, table.names) for table in tables]
    options = {name: choice_options(chain.space, name) for table in tables for name in table.names}
    return Expected(metric, chain.space.id, options, tables, allowed, low, high)


# -- choices and their tables


def closed(rules: Rules, names: Iterable[str]) -> tuple[str, ...]:
    """The names and all that their conditions read, in the order of the space."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += rules.conditions[name].names if name in rules.conditions else ()
    return tuple(name for name in rules.choices if name in found)


def grid(rules: Rules, names: Sequence[str]) -> Iterator[Values]:
    """All combinations of options of closed names, the last varying fastest, each with its active choices alone."""
    for combination in itertools.product(*(rules.choices[name].options or () for name in names)):
        values: Values = {}
        for name, value in zip(names, combination, strict=True):
            if rules.is_active(name, values):
                values[name] = value
        yield values


def combinations(rules: Rules, names: Iterable[str]) -> int:
    """How many combinations of options there are; real choices raise SpaceError elsewhere and count as one here."""
    return math.prod(len(rules.choices[name].options or ("",)) for name in names)


def tabled(rules: Rules, names: Iterable[str], number: Callable[[Values], float]) -> Table:
    """The table of a function of these choices."""
    names = closed(rules, names)
    shape = [len(rules.choices[name].options or ()) for name in names]
    return Table(names, np.array([number(values) for values in grid(rules, names)], dtype=np.float64).reshape(shape))


def constraint_tables(rules: Rules) -> tuple[list[Table], bool]:
    """Tables of 0 where a constraint holds and infinity where not; and whether there is one for every constraint."""
    found, complete = [], True
    for constraint in rules.constraints:
        names = closed(rules, constraint.meaning.names)
        if combinations(rules, names) > LIMIT or any(rules.choices[name].options is None for name in names):
            complete = False
            continue
        one = Rules(rules.choices, rules.conditions, (constraint,), rules.layout)
        found.append(tabled(rules, names, lambda values, one=one: math.inf if one.broken(values) else 0.0))  # type: ignore[misc]
    return found, complete


def elimination(tables: Sequence[Table], order: Sequence[str]) -> list[tuple[str, tuple[str, ...]]] | None:
    """The choices of the tables in the order in which to eliminate them, each with all that it is tied to by then.

    None where too many combinations come together. ``order`` is that of the space.
    """
    size = {name: count for table in tables for name, count in zip(table.names, table.values.shape, strict=True)}
    place = {name: at for at, name in enumerate(order)}
    tied: dict[str, set[str]] = {name: set() for name in size}
    for table in tables:
        for name in table.names:
            tied[name] |= set(table.names)
    plan = []
    while tied:
        count = {name: math.prod(size[other] for other in scope) for name, scope in tied.items()}
        name = min(tied, key=lambda name: (count[name], place[name]))
        if count[name] > CLIQUE:
            return None
        scope = tied.pop(name)
        plan.append((name, tuple(sorted(scope, key=place.__getitem__))))
        for other in scope - {name}:
            tied[other] = (tied[other] | scope) - {name}
    return plan


def _lowest(tables: Sequence[Table], order: Sequence[str]) -> float | None:
    """The least sum of the tables; None where too many choices come together."""
    plan, left = elimination(tables, order), list(tables)
    if plan is None:
        return None
    for name, scope in plan:
        total = sum((table.along(scope) for table in left if name in table.names), np.zeros([1] * len(scope)))
        rest = tuple(other for other in scope if other != name)
        left = [table for table in left if name not in table.names] + [Table(rest, total.min(scope.index(name)))]
    return float(sum(table.values.sum() for table in left))


def _range(space: Space, tables: Sequence[Table]) -> tuple[float, float]:
    """The least and the most that the tables come to for a valid subnet, or bounds on them."""
    rules = space.rules
    required, complete = constraint_tables(rules)
    ends = []
    for sign in (1, -1):
        signed = [Table(table.names, sign * table.values) for table in tables]
        found = _lowest([*signed, *required], list(rules.choices)) if complete or not _is_small(space) else None
        if found is not None:
            ends.append(sign * found)
        elif _is_small(space):
            ends.append(sign * min(_at(space, signed, subnet) for subnet in space.enumerate(LIMIT)))
        else:
            ends.append(sign * sum(float(table.values.min()) for table in signed))
    return ends[0], ends[1]


def _is_small(space: Space) -> bool:
    try:
        return 0 < space.size() <= LIMIT
    except TooManyCases:
        return False


def _at(space: Space, tables: Sequence[Table], subnet: Subnet) -> float:
    place = {name: choice_options(space, name).index(value) for name, value in subnet.values.items()}
    return float(sum(table.values[tuple(place.get(name, 0) for name in table.names)] for table in tables))


def _pruned(table: Table) -> Table:
    """Without the choices that make no difference; combinations that no subnet has (NaN) agree with everything."""
    names, values = list(table.names), table.values
    for name in table.names:
        axis = names.index(name)
        low, high = np.fmin.reduce(values, axis), np.fmax.reduce(values, axis)
        if np.array_equal(low, high, equal_nan=True):
            names.remove(name)
            values = low
    seen = values[~np.isnan(values)]
    return Table(tuple(names), np.where(np.isnan(values), seen.mean() if seen.size else 0.0, values))


def _tied(rules: Rules, table: Table) -> Table:
    """With all choices that constraints tie to those of the table, so that forbidden combinations can be left out."""
    names = set(table.names)
    if not any(constraint.meaning.names & names for constraint in rules.constraints):
        return table
    while True:
        more = set(closed(rules, names))
        for constraint in rules.constraints:
            if constraint.meaning.names & more:
                more |= constraint.meaning.names
        if more == names:
            break
        if combinations(rules, more) > LIMIT or any(rules.choices[name].options is None for name in more):
            break
        names = more
    ordered = tuple(name for name in rules.choices if name in names)
    shape = [len(rules.choices[name].options or ()) for name in ordered]
    return Table(ordered, np.broadcast_to(table.along(ordered), shape))


def _merged(tables: Sequence[Table]) -> list[Table]:
    """Fewer tables with the same sum: one whose choices are among another's is added to that."""
    kept: list[Table] = []
    for table in sorted(tables, key=lambda table: -len(table.names)):
        for at, other in enumerate(kept):
            if set(table.names) <= set(other.names):
                kept[at] = Table(other.names, other.values + table.along(other.names))
                break
        else:
            kept.append(table)
    return kept


def _allowed(rules: Rules, names: Sequence[str]) -> Array | None:
    """1 for the combinations of options that no constraint over them forbids; None where none does."""
    within = [constraint for constraint in rules.constraints if constraint.meaning.names <= set(names)]
    if not within or tuple(names) != closed(rules, names):
        return None
    some = Rules(rules.choices, rules.conditions, tuple(within), rules.layout)
    mask = tabled(rules, names, lambda values: float(some.broken(values) is None)).values
    return None if mask.all() else mask


# -- what a subnet's parts cost


class _Noted(dict[str, Value]):
    """The values of a subnet; tells ``note`` of every name that is asked for, whether there or not."""

    def __init__(self, values: Mapping[str, Value], names: Iterable[str], note: Callable[[str], None]) -> None:
        super().__init__(values)
        self._every, self._note = tuple(names), note

    def __getitem__(self, name: str) -> Value:
        self._note(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._note(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._note(name)
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        self._note_all()
        return super().__iter__()

    def __len__(self) -> int:
        self._note_all()
        return super().__len__()

    def items(self) -> Any:
        self._note_all()
        return super().items()

    def values(self) -> Any:
        self._note_all()
        return super().values()

    def keys(self) -> Any:
        return _NotedKeys(self)

    def _note_all(self) -> None:
        for name in self._every:
            self._note(name)


class _NotedKeys(KeysView[str]):
    def __ge__(self, other: Any) -> bool:
        """Asks for every name, where a set would look at the lengths first."""
        return sum(name not in self for name in other) == 0


class _Meter:
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
        self._known: dict[Any, _Run] = {}
        self._gauged: dict[Any, tuple[float, Any]] = {}
        self._names: dict[Unit, tuple[int, set[str]]] = {}
        self._counter = FlopCounterMode(display=False)

    def costs(self, subnet: Subnet) -> dict[Unit, float]:
        """The cost of every part that costs anything."""
        return {unit: cost for run in self.runs(subnet) for unit, cost in run.costs.items()}

    def runs(self, subnet: Subnet) -> list[_Run]:
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

    def _runs(self, subnet: Subnet) -> list[_Run]:
        found: list[_Run] = []
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
        return layer.name, tuple((name, subnet.values.get(name)) for name in read), _shapes(carry)

    def _enter(self) -> Carry:
        return tuple(tensor.to(self._place) for tensor in self.chain.enter(self.batch))

    @property
    def _place(self) -> torch.device:
        return self.device if self._real else torch.device("meta")

    def _measured(self, layer: Layer, subnet: Subnet, carry: Carry) -> _Run:
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
        return _Run(kept, as_carry(out, layer.name), [(layer.name, path) for path in sorted(self._entered)])

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

        noted = rules.subnet(_Noted(subnet.values, rules.choices, note))
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
class _Run:
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
        what = (n.op, str(n.target), _shapes(tensors(given)), fx.node.map_aggregate(given, _unless_tensor))
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


def _around(unit: Unit) -> Unit:
    return unit[0], unit[1].rpartition(".")[0]


def _within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _weights(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _unless_tensor(value: Any) -> Any:
    return ... if isinstance(value, Tensor) else value


def _shapes(several: Iterable[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in several)


# -- which subnets to measure


class _Survey:
    """Measures subnets until every part has been seen with every combination of the choices that it depends on."""

    def __init__(self, chain: Chain, meter: _Meter) -> None:
        self.chain, self.meter, self.rules = chain, meter, chain.space.rules
        self.seen: dict[Subnet, dict[Unit, Any]] = {}
        self._modules: dict[Subnet, set[Unit]] = {}
        self._names: dict[Unit, tuple[str, ...]] = {}
        self._blamed: dict[Unit, set[str]] = defaultdict(set)
        self._filed: dict[Unit, dict[Key, float]] = {}
        self._scopes: dict[tuple[str, tuple[str, ...]], _Scope] = {}
        self._ways: dict[int, tuple[str, ...]] = {}
        self._entered: dict[tuple[Unit, tuple[str, ...]], set[Key]] = {}
        self._tried: dict[Any, int] = defaultdict(int)
        self._rng = generator("expected", chain.space.id)
        self._counter = Counter(self.rules)

    def cover(self) -> None:
        space = self.chain.space
        if not space.choices:
            self._see(space.subnet())
            return
        first, last = space.first(), space.last()
        for subnet in (first, last, *(self._between(last, first, {name}) for name in space.choices)):
            if subnet is not None:
                self._see(subnet)
        checked = 0
        while checked < CHECKS:
            gap = self._gap()
            taught = self._see(gap or space.sample(self._rng))
            checked = 0 if gap or taught else checked + 1

    def tables(self) -> list[Table]:
        """One for each part, with NaN for combinations that no subnet has."""
        found = []
        for unit, names in self._parts():
            scope, filed = self._scope(unit[0], names), self._filed[unit]
            cells = [0.0 if key is None else filed.get(key, math.nan) for key in scope.cells]
            found.append(Table(scope.names, np.array(cells, dtype=np.float64).reshape(scope.shape)))
        return found

    def _see(self, subnet: Subnet) -> bool:
        """Measures the subnet; says whether this taught that a part is there, or depends on a choice."""
        if subnet in self.seen:
            return False
        runs = self.meter.runs(subnet)
        self.seen[subnet] = self._facts(subnet, runs)
        self._modules[subnet] = {unit for run in runs for unit in run.entered}
        before = dict(self._names)
        for unit in self._modules[subnet]:
            for names in self.meter.own(unit):
                known = (unit, names) in self._entered
                keys = self._entered.setdefault((unit, names), set())
                for other in [subnet] if known else self.seen:
                    if unit in self._modules[other]:
                        keys.add(tuple(other.values.get(name) for name in names))
        for unit in dict.fromkeys((*self.seen[subnet], *self._names)):  # sizes come first, since parts follow them
            self._file(unit)
        return before != self._names

    def _facts(self, subnet: Subnet, runs: Sequence[_Run]) -> dict[Unit, Any]:
        """The sizes of what enters each block (unless they make no difference), and the cost of each part."""
        facts: dict[Unit, Any] = {}
        if self.meter.metric != "parameters":
            after = {layer.block: _shapes(run.carry) for layer, run in zip(self.chain.route(subnet), runs, strict=True)}
            sizes: Any = ()
            for index in range(len(self.chain.blocks)):
                facts[_SIZES, str(index)] = sizes
                sizes = after.get(index, sizes)
        return facts | {unit: cost for run in runs for unit, cost in run.costs.items()}

    def _parts(self) -> list[tuple[Unit, tuple[str, ...]]]:
        return [(unit, names) for unit, names in self._names.items() if unit[0] != _SIZES]

    def _file(self, unit: Unit) -> None:
        """Keeps what the part costs by the choices that it depends on; where that is contradictory, there are more."""
        while True:
            wanted = self._known_names(unit) | self._blamed[unit]
            names = tuple(name for name in self.rules.choices if name in wanted)
            if names != self._names.get(unit):
                self._names[unit], self._filed[unit], subnets = names, {}, list(self.seen)
            else:
                subnets = [next(reversed(self.seen))]
            for subnet in subnets:
                if self._uses(subnet, unit[0]):
                    cost, key = self._cost(subnet, unit)
                    if self._filed[unit].setdefault(key, cost) != cost:
                        self._blamed[unit] |= self._blame(unit, subnet)
                        break
            else:
                return

    def _known_names(self, unit: Unit) -> set[str]:
        """What a part reads, and what the sizes of the layer's inputs follow."""
        if unit[0] == _SIZES:
            return set()
        own = self.meter.names(unit)
        every = own.union(self._names.get((_SIZES, str(self.chain.layers[unit[0]].block)), ()))
        return every if combinations(self.rules, every) <= JOINT else own

    def _cost(self, subnet: Subnet, unit: Unit) -> tuple[Any, Key]:
        return self.seen[subnet].get(unit, 0.0), tuple(subnet.values.get(name) for name in self._names[unit])

    def _uses(self, subnet: Subnet, layer: str) -> bool:
        return layer == _SIZES or any(used.name == layer for used in self.chain.route(subnet))

    def _blame(self, unit: Unit, second: Subnet) -> set[str]:
        """Choices that change the cost: of those in which a subnet differs from the most similar one that should cost
        the same, found by halving the way between the two."""
        cost, key = self._cost(second, unit)
        others = [other for other in self.seen if self._uses(other, unit[0])]
        others = [other for other in others if self._cost(other, unit)[1] == key and self._cost(other, unit)[0] != cost]
        first = min(others, key=lambda other: len(self._differing(other, second)))
        differ = self._differing(first, second)
        reads = self.meter.reads[unit[0]]
        likely = set().union(*reads.values()) & set(differ) if reads else set(differ)
        # A part is often like others: its neighbours in a module, or the same part of another layer.
        alike = [
            names for other, names in self._blamed.items() if other[1] == unit[1] or _around(other) == _around(unit)
        ]
        found = set().union(*alike) & likely - set(self._names[unit])
        if found:
            return found
        low, high, cost = 0, len(differ), self._cost(first, unit)[0]
        tried: set[int] = set()
        while left := sorted(set(range(low + 1, high)) - tried, key=lambda at: abs(2 * at - low - high)):
            tried.add(left[0])
            between = self._between(first, second, set(differ[: left[0]]))
            if between is not None and self._uses(between, unit[0]):
                if self._facts(between, self.meter.runs(between)).get(unit, 0.0) == cost:
                    low = left[0]
                else:
                    high = left[0]
        found = set(differ[low:high]) - set(self._names[unit])
        if not found:
            raise SearchError(
                f"the {self.meter.metric} of layer '{unit[0]}' differ between two runs of what should be the same "
                f"('{first}' and '{second}'): only what follows from the subnet can be expected"
            )
        return found

    def _differing(self, first: Subnet, second: Subnet) -> list[str]:
        return [name for name in self.rules.choices if first.values.get(name) != second.values.get(name)]

    def _between(self, first: Subnet, second: Subnet, changed: set[str]) -> Subnet | None:
        def pick(name: str, choice: Any) -> Value:
            ordered = (second, first) if name in changed else (first, second)
            held = [subnet.values[name] for subnet in ordered if name in subnet.values]
            value: Value = held[0] if held else choice.options[0] if choice.options else choice.sample(self._rng)
            return value

        values = self.rules.settle(pick)
        return None if self.rules.broken(values) else self.rules.subnet(values)

    def _gap(self) -> Subnet | None:
        """A subnet with combinations that have not been seen, as many as fit together; None where none is left.

        To be seen are every layer, every module with all that it asks for, and every part with all that its cost
        follows.
        """
        used = {layer.name for subnet in self.seen for layer in self.chain.route(subnet)}
        done: dict[tuple[str, tuple[str, ...]], set[Key]] = {}
        done.update({(name, ()): {()} if name in used else set() for name in self.chain.layers})
        parts = [((unit, names), self._filed[unit].keys()) for unit, names in self._parts()]
        for (unit, names), keys in (*self._entered.items(), *parts):
            place = (unit[0], names)
            done[place] = done[place] & keys if place in done else set(keys)
        open_: list[tuple[_Scope, Key]] = []
        for place, seen in done.items():
            scope = self._scope(*place)
            open_ += [(scope, key) for key in scope.ways if key not in seen and self._tried[(*place, key)] < TIMES]
        open_.sort(key=lambda pair: -len(pair[0].ways))
        while open_:
            scope, key = open_[0]
            for way in scope.ways[key][:TRIES]:
                subnet = self._complete(self._joined(way, open_[1:])) or self._complete(way)
                if subnet is not None:
                    used = {layer.name for layer in self.chain.route(subnet)}
                    for other, wanted in open_:
                        if other.layer in used and wanted == tuple(subnet.values.get(name) for name in other.reads):
                            self._tried[other.layer, other.reads, wanted] += 1
                    return subnet
            self._tried[scope.layer, scope.reads, key] = TIMES
            del open_[0]
        return None

    def _joined(self, way: Values, others: Sequence[tuple[_Scope, Key]]) -> Values:
        joined, done = dict(way), set[int]()
        for scope, key in others:
            if id(scope) not in done:
                for other in scope.ways[key]:
                    if all(joined.get(name, value) == value for name, value in other.items()):
                        joined.update(other)
                        done.add(id(scope))
                        break
        return joined

    def _complete(self, given: Values) -> Subnet | None:
        """A valid subnet with the given values; None where there is none."""

        def fill(name: str, choice: Any) -> Value:
            value: Value = given[name] if name in given else choice.sample(self._rng)
            return value

        for _ in range(TRIES if self.rules.constraints else 1):
            values = self.rules.settle(fill)
            if given.keys() <= values.keys() and self.rules.broken(values) is None:
                return self.rules.subnet(values)
        try:
            return self._complete_surely(given) if self.rules.constraints else None
        except TooManyCases:
            return None

    def _complete_surely(self, given: Values) -> Subnet | None:
        state, values = self._counter.start(), Values()
        for name, choice in self.rules.choices.items():
            if not self.rules.is_active(name, values):
                continue
            options = [given[name]] if name in given else list(choice.options or (choice.sample(self._rng),))
            for option in options:
                after = self._counter.assign(state, name, option) if state is not None else None
                if self._counter.weight(after):
                    values[name], state = option, after
                    break
            else:
                return None
        return self.rules.subnet(values) if given.keys() <= values.keys() and not self.rules.broken(values) else None

    def _scope(self, layer: str, reads: tuple[str, ...]) -> _Scope:
        if (layer, reads) not in self._scopes:
            self._scopes[layer, reads] = self._make_scope(layer, reads)
        return self._scopes[layer, reads]

    def _make_scope(self, layer: str, reads: tuple[str, ...]) -> _Scope:
        block = self.chain.blocks[self.chain.layers[layer].block]
        names = closed(self.rules, (*reads, *self._activity(self.chain.layers[layer].block)))
        for name in names:
            choice_options(self.chain.space, name)
        if combinations(self.rules, names) > LIMIT:
            raise SearchError(
                f"the {self.meter.metric} of layer '{layer}' depend on {', '.join(names)}: "
                f"{combinations(self.rules, names):,} combinations, more than {LIMIT:,}. Let it depend on fewer choices"
            )
        cells: list[Key | None] = []
        ways: dict[Key, list[Values]] = {}
        for values in grid(self.rules, names):
            if block.pick(self.rules.subnet(values)) != layer:
                cells.append(None)
                continue
            key = tuple(values.get(name) for name in reads)
            cells.append(key)
            if self.rules.broken(values) is None:
                ways.setdefault(key, []).insert(0, values)  # the last first: with the deepest way the most goes along
        shape = tuple(len(choice_options(self.chain.space, name)) for name in names)
        return _Scope(layer, reads, names, shape, cells, ways)

    def _activity(self, index: int) -> tuple[str, ...]:
        """The choices that say which layer of the block is used: whatever the block asks for when it picks."""
        if index not in self._ways:
            block, names = self.chain.blocks[index], set[str]()
            while True:
                asked: set[str] = set()
                for values in grid(self.rules, closed(self.rules, names)):
                    try:
                        block.pick(self.rules.subnet(_Noted(values, self.rules.choices, asked.add)))
                    except Exception:  # of a name that is not there yet
                        if not asked & self.rules.choices.keys() - names:
                            raise
                new = asked & self.rules.choices.keys() - names
                if not new:
                    break
                names |= new
            self._ways[index] = closed(self.rules, names)
        return self._ways[index]


@dataclass(frozen=True, slots=True, eq=False)
class _Scope:
    """What a part of a layer depends on: choices, the key of each combination, and values that lead to each key."""

    layer: str
    reads: tuple[str, ...]
    names: tuple[str, ...]
    shape: tuple[int, ...]
    cells: list[Key | None]  # None where the layer is not used
    ways: dict[Key, list[Values]]
