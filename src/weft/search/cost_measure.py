"""Measures what the parts of a chain cost, each for every combination of the choices that its cost depends on.

A part is a leaf, a module without elastic modules, or a composite whose cost is more than that of the modules within
it: one that multiplies matrices itself, or for latencies one with few combinations of choices. The cost of a part
depends on the choices that it reads, that the modules around it read, that decide whether its block runs, and that the
shapes of the layer's inputs depend on.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from weft.elastic import Leaf, Module
from weft.elastic.extract import plain_module
from weft.elastic.mixture import choice_options
from weft.elastic.sizes import active_values, with_conditions
from weft.errors import SearchError, SpaceError
from weft.search.cost import flops, latency, parameters
from weft.search.cost_table import (
    LIMIT,
    Table,
    Values,
    combinations,
    count_combinations,
    drop_unused_choices,
    make_table,
)
from weft.space import Subnet, Value
from weft.supernet import Chain, as_activations, build_on_meta, initialise
from weft.supernet.blocks import Block
from weft.supernet.layer import extra_inputs

WHOLE = 64  # combinations of choices up to which a composite is one part if nothing else decides
Key = tuple[Value | None, ...]
Names = tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A module that is measured, with the choices that its cost depends on; ``own``: its own parameters alone."""

    module: nn.Module
    names: Names
    reads: Names
    own: bool = False
    costs: dict[Key, float] = field(default_factory=dict)

    def cost_at(self, values: Values) -> float:
        """NaN for a combination that was not measured, since no subnet has it."""
        return self.costs.get(_key(values, self.names), math.nan)


_Call = tuple[_Part, tuple[Any, ...], dict[str, Any]]
"""A part with the arguments that it is called with, without the pick."""


class Measurement:
    """One forward of a batch, for a chain; on the meta device nothing is computed."""

    def __init__(
        self, chain: Chain, batch: Mapping[str, Tensor], metric: str, device: torch.device, repeats: int = 1
    ) -> None:
        on_meta = device.type == "meta"
        self.chain = (
            build_on_meta(chain)
            if on_meta
            else initialise(copy.deepcopy(chain, {id(chain.space): chain.space}), 0, device)
        )
        self.chain.eval()
        self.batch = {name: tensor.to(device) for name, tensor in batch.items()}
        self.metric, self.device, self.repeats = metric, device, repeats
        self.rules = chain.space.rules
        self.options = {name: choice.options or () for name, choice in chain.space.choices.items()}
        self._measured: dict[Any, float] = {}
        self._multiplies: dict[nn.Module, bool] = {}  # composites that were seen, and whether they multiply themselves
        self._activations: list[Any] = []  # by number: tables hold numbers
        self._numbers: dict[Any, int] = {}

    def tables(self) -> list[Table]:
        """Tables whose sum is what a subnet costs, with NaN for combinations that no subnet has."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self.device.type == "meta":
                stack.enter_context(self.device)
            if self.metric == "flops":
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # its products are counted alike on every device
            inputs, tables = _number(self._number_of(self.chain.enter(self.batch))), list[Table]()
            for block in self.chain.blocks:
                found, inputs = self._block(block, inputs)
                tables += found
        if self.metric == "parameters":
            tables += [_number(-self.chain.get_parameter(str(tie.second)).numel()) for tie in self.chain.ties]
        return tables

    def _block(self, block: Block, inputs: Table) -> tuple[list[Table], Table]:
        """The tables of a block's parts, and that of its outputs, by number."""
        condition = block.condition
        around = {block.name} & self.rules.choices.keys() | set(inputs.names)
        around = around.union(() if condition is None else condition.names)
        modules = [self.chain.module(name) for name in block.candidates()]
        names = with_conditions(self.rules, around.union(*map(_reads_within, modules)))
        if self.metric == "flops":
            self._find_products(block, around, names, inputs)
        parts = [part for module in modules for part in self._parts(module, around)]
        scopes = dict.fromkeys((with_conditions(self.rules, around), *(part.names for part in parts)))
        done: dict[Names, set[Key]] = {scope: set() for scope in scopes}
        outputs: list[tuple[Values, int]] = []
        for scope in scopes:
            self._check_size(block, scope)
            for some in combinations(self.rules, scope):
                if _key(some, scope) in done[scope]:
                    continue
                values = self._completed(some, names, len(outputs))
                if values is None or math.isnan(number := inputs.at(self.options, values)):
                    continue
                outputs.append((values, self._run(block, parts, values, self._activations[int(number)])))
                for other in scopes:
                    done[other].add(_key(values, other))
        tables = [drop_unused_choices(make_table(self.rules, part.names, part.cost_at)) for part in parts]
        return tables, self._table_of_outputs(block, list(scopes), outputs)

    def _parts(self, module: nn.Module, around: set[str]) -> Iterator[_Part]:
        reads = with_conditions(self.rules, _reads_within(module))
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not self._is_sum_of_its_modules(module, reads):
            yield _Part(module, with_conditions(self.rules, around.union(reads)), reads)
            return
        if isinstance(module, Module):
            around = around.union(module.reads)
            if self.metric == "parameters" and any(True for _ in module.parameters(recurse=False)):
                yield _Part(module, with_conditions(self.rules, around), (), own=True)
        for child in module.children():
            yield from self._parts(child, around)

    def _is_sum_of_its_modules(self, module: nn.Module, reads: Names) -> bool:
        if not isinstance(module, Module) or isinstance(module, Leaf) or _has_shared_parts(module):
            return False
        if self.metric == "parameters":
            return True
        multiplies = self._multiplies.get(module)
        return count_combinations(self.rules, reads) > WHOLE if multiplies is None else not multiplies

    def _find_products(self, block: Block, around: set[str], names: Names, inputs: Table) -> None:
        """Notes which composites of a block multiply outside of the modules within them, in a subnet a candidate."""
        seen = set()
        for some in combinations(self.rules, with_conditions(self.rules, around)):
            values = self._completed(some, names, 0)
            if values is None or math.isnan(number := inputs.at(self.options, values)):
                continue
            subnet = self.rules.subnet(values)
            name = block.pick(subnet)
            if name is None or name in seen:
                continue
            seen.add(name)
            module = self.chain.module(name)
            with FlopCounterMode(display=False) as counter, suppress(SpaceError):
                module(*self._activations[int(number)], **extra_inputs(self.chain.layers[name], self.batch, subnet))
            totals = {path: sum(counts.values()) for path, counts in counter.get_flop_counts().items()}
            own = dict(totals)
            for path, total in totals.items():
                caller = max((other for other in totals if path.startswith(f"{other}.")), key=len, default=None)
                if caller is not None:
                    own[caller] -= total
            root = type(module).__name__
            for path, inner in module.named_modules():
                if (path := f"{root}.{path}" if path else root) in own:
                    self._multiplies[inner] = own[path] > 0

    def _completed(self, some: Values, names: Names, turn: int) -> dict[str, Value] | None:
        """With options of the other choices, which differ from turn to turn; None where a constraint forbids all."""
        others = [name for name in names if name not in some]
        options = [choice_options(self.chain.space, name) for name in others]
        rotated = [own[turn % len(own) :] + own[: turn % len(own)] for own in options]
        for combination in islice(product(*rotated), LIMIT):
            values = active_values(self.rules, names, {**dict(zip(others, combination, strict=True)), **some})
            if not self.rules.broken(values):
                return values
        return None

    def _run(
        self, block: Block, parts: Sequence[_Part], values: dict[str, Value], activations: tuple[Tensor, ...]
    ) -> int:
        """Runs the block for a subnet and keeps what its parts cost; returns the number of its outputs."""
        subnet, calls = self.rules.subnet(values), list[_Call]()
        name = block.pick(subnet)
        if name is not None:
            layer, module = self.chain.layers[name], self.chain.module(name)
            hooks = [
                part.module.register_forward_pre_hook(
                    lambda _, args, kwargs, part=part: calls.append((part, *_without_pick(part.module, args, kwargs))),
                    with_kwargs=True,
                )
                for part in parts
            ]
            try:
                out = module(*activations, **extra_inputs(layer, self.batch, subnet))
            except SpaceError as problem:
                raise SearchError(
                    f"block '{block.name}' asks the pick for a choice that `reads` of its modules do not name, or one "
                    f"that is inactive: {problem}"
                ) from problem
            finally:
                for hook in hooks:
                    hook.remove()
            activations = as_activations(out, name)
        costs = dict.fromkeys(parts, 0.0)
        for part, args, kwargs in calls:
            cost = self._cost(part, subnet, args, kwargs)
            # Parameters are there once, however often their module is called.
            costs[part] = cost if self.metric == "parameters" else costs[part] + cost
        for part, cost in costs.items():
            known = part.costs.setdefault(_key(values, part.names), cost)
            if known != cost and self.metric != "latency":
                raise SearchError(
                    f"the {self.metric} of {type(part.module).__name__} in '{block.name}' are {known:,.0f} and "
                    f"{cost:,.0f} for the same {', '.join(part.names) or 'choices'}: add the other choices that its "
                    "inputs depend on to `reads` of a module around it"
                )
        return self._number_of(activations)

    def _cost(self, part: _Part, subnet: Subnet, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        if part.own:
            return sum(parameter.numel() for parameter in part.module.parameters(recurse=False))
        key = (part.module, _key(subnet.values, part.reads), _identity(args), _identity(list(kwargs.items())))
        if key not in self._measured:
            plain = part.module
            if isinstance(plain, Module):
                plain = plain_module(plain, subnet, len(args), tuple(kwargs)).eval()
            if self.metric == "parameters":
                self._measured[key] = parameters(plain)
            elif self.metric == "flops":
                self._measured[key] = flops(_WithKeywords(plain, kwargs), args)
            else:
                self._measured[key] = latency(_WithKeywords(plain, kwargs), args, self.repeats)
        return self._measured[key]

    def _table_of_outputs(self, block: Block, scopes: Sequence[Names], runs: Sequence[tuple[Values, int]]) -> Table:
        """The numbers of the outputs by the choices around the block, or by those of the last part that they follow."""
        for names in (scopes[0], *reversed(scopes)):
            found: dict[Key, int] = {}
            if all(found.setdefault(_key(values, names), number) == number for values, number in runs):
                table = make_table(self.rules, names, lambda values: found.get(_key(values, names), math.nan))  # noqa: B023
                return drop_unused_choices(table)
        raise SearchError(
            f"the shapes of what block '{block.name}' returns depend on more choices than those that one of its parts "
            "reads: make it several blocks"
        )

    def _check_size(self, block: Block, names: Names) -> None:
        for name in names:
            choice_options(self.chain.space, name)  # raises SpaceError for a choice of real numbers
        count = count_combinations(self.rules, names)
        if count > LIMIT:
            raise SearchError(
                f"the {self.metric} of block '{block.name}' depend on {', '.join(names)}: {count:,} combinations, more "
                f"than {LIMIT:,}. Let it depend on fewer choices"
            )

    def _number_of(self, activations: tuple[Tensor, ...]) -> int:
        key = _identity(activations)
        if key not in self._numbers:
            self._numbers[key] = len(self._activations)
            self._activations.append(activations)
        return self._numbers[key]


class _WithKeywords(nn.Module):
    """A module that gets the same keyword arguments in every call."""

    def __init__(self, module: nn.Module, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.module, self._kwargs = module, kwargs

    def forward(self, *args: Any) -> Any:
        return self.module(*args, **self._kwargs)


def _without_pick(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call but for the pick; what is passed by position behind it gets its name."""
    at = next((index for index, one in enumerate(args) if isinstance(one, Subnet)), len(args))
    behind = zip(list(inspect.signature(module.forward).parameters)[at + 1 :], args[at + 1 :], strict=False)
    return args[:at], {name: value for name, value in (*behind, *kwargs.items()) if name != "pick"}


def _reads_within(module: nn.Module) -> set[str]:
    """The choices that a module reads, or a module inside it."""
    return {name for part in module.modules() if isinstance(part, Module) for name in part.reads}


def _has_shared_parts(module: nn.Module) -> bool:
    """Whether a module or a parameter stands in two places inside."""
    every = [*module.named_modules(remove_duplicate=False), *module.named_parameters(remove_duplicate=False)]
    return len({id(part) for _, part in every}) < len(every)


def _key(values: Values, names: Names) -> Key:
    return tuple(values.get(name) for name in names)


def _number(number: float) -> Table:
    return Table((), np.array(float(number)))


def _identity(thing: Any) -> Any:
    """The shapes of tensors, and other values as they are."""
    if isinstance(thing, Tensor):
        return Tensor, tuple(thing.shape), thing.dtype, thing.stride()
    if isinstance(thing, (tuple, list)):
        return type(thing), tuple(map(_identity, thing))
    return type(thing), repr(thing)
