"""The sizes of an elastic weight: what its dimensions come to for a subnet, and which part of it a mixture expects."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.elastic.mixture import Mixture, choice_options
from weft.errors import SpaceError, SupernetError
from weft.space import Expr, Space, Subnet, Value
from weft.space.subnet import FrozenSpace

Dim = int | Expr
"""A size that is fixed, or an expression over the choices of a space; of 3.5 * width the whole part counts."""

MOST_COMBINATIONS = 4096

Probabilities = tuple[Tensor | None, ...]
"""Probabilities of the combinations of the choices that dimensions share, and of those that one dimension has for
itself; None where there are no such choices."""


class Sizes:
    """The dimensions of one weight, each of which is a prefix of its largest size.

    ``mask_factors(mixture)`` gives one matrix a dimension, of a row for every combination s of the choices that several
    dimensions share, so that the probability that the entry (i, j, ...) is within the pick is the sum over s of
    factors[0][s, i] * factors[1][s, j] * ...: rank 1 where the dimensions are independent.
    """

    def __init__(self, space: Space, *dims: Dim, what: str = "a layer") -> None:
        self.space = space
        self.dims = dims
        self._exprs = [_expand(space, dim) for dim in dims]
        names = [sorted(expr.names, key=list(space.choices).index) for expr in self._exprs]
        counts = [name for choices in names for name in choices]
        self.shared = tuple(name for name in space.choices if counts.count(name) > 1)
        self._own = [tuple(name for name in choices if name not in self.shared) for choices in names]
        self.names = tuple(name for name in space.choices if name in counts)
        self.tables = [self._table(index, what) for index in range(len(dims))]
        """The size of each dimension, by shared combination and by one of its choices choices."""
        self.rank = len(self.tables[0])
        """The number of combinations of shared choices."""
        self.combinations = sum(table.numel() for table in self.tables)
        """Those of a dimension, shared choices included, for all dimensions together."""
        self.largest = tuple(int(table.max()) for table in self.tables)
        self.values = tuple(tuple(sorted({int(v) for v in table.flatten() if v > 0})) for table in self.tables)
        """The sizes that each dimension can have, in order."""
        self.key = (self.shared, tuple(self._own), tuple(tuple(t.flatten().tolist()) for t in self.tables))
        self._cached: dict[Any, Any] = {}

    def of(self, subnet: Subnet) -> tuple[int, ...]:
        """The sizes for one subnet."""
        values = subnet.values
        key = tuple(values.get(name) for name in self.names)
        return self.cached(("sizes", key), lambda: tuple(int(expr.value(values)) for expr in self._exprs))  # type: ignore[no-any-return]

    def is_fixed(self, index: int) -> bool:
        """Whether the dimension has one size for all subnets."""
        return len(self.values[index]) == 1

    def mask_factors(self, mixture: Mixture) -> tuple[Tensor, ...]:
        """For each dimension a matrix: combinations of the shared choices, by the dimension's largest size."""
        factors: tuple[Tensor, ...] = mixture.cached(
            ("factors", self.key), lambda: self.make_mask_factors(*self.probabilities(mixture))
        )
        return factors

    def probabilities(self, mixture: Mixture) -> Probabilities:
        """The probabilities of the combinations of shared choices, and of those of each dimension alone."""
        return tuple(mixture.joint(names) if names else None for names in (self.shared, *self._own))

    def distribution(self, mixture: Mixture) -> Tensor:
        """The probability of each of the sizes of the first dimension."""
        return mixture.cached(("distribution", self.key), lambda: self._distribution(mixture))  # type: ignore[no-any-return]

    def keep_probability(self, mixture: Mixture) -> Tensor:
        """For each place along the first dimension the probability that it is within the pick."""
        # The first place of every other dimension is always within.
        return self.mask_factors(mixture)[0].sum(0)

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """The value of ``make()``, called once a key for these sizes."""
        if key not in self._cached:
            self._cached[key] = make()
        return self._cached[key]

    def make_mask_factors(self, shared: Tensor | None, *each: Tensor | None) -> tuple[Tensor, ...]:
        """The factors, computed anew from the ``probabilities``."""
        like = next((part for part in (shared, *each) if part is not None), torch.zeros(()))
        factors = []
        for index, probabilities in enumerate(each):
            table = self.table(index, like)
            # In this order autograd keeps the table and no copy.
            factors.append(table[:, :, 0] if probabilities is None else torch.matmul(table, probabilities))
        if shared is not None:
            factors[0] = factors[0] * shared[:, None]
        return tuple(factors)

    def _distribution(self, mixture: Mixture) -> Tensor:
        names, sizes = (*self.shared, *self._own[0]), self.tables[0].flatten().tolist()
        joint = mixture.joint(names)
        if sizes == list(self.values[0]):
            return joint  # a size for each, in order

        def make() -> Tensor:
            rows = [[float(size == value) for value in self.values[0]] for size in sizes]
            return torch.tensor(rows, device="cpu").to(joint)

        return joint @ self.cached(("distribution", joint.device, joint.dtype), make)  # type: ignore[no-any-return]

    def table(self, index: int, like: Tensor) -> Tensor:
        """Which places are within the pick: shared combinations x places x own combinations, as 0 and 1."""

        def make() -> Tensor:
            places = torch.arange(self.largest[index], device="cpu")
            return (places[:, None] < self.tables[index][:, None, :]).to(like.device, like.dtype)

        return self.cached(("table", index, like.device, like.dtype), make)  # type: ignore[no-any-return]

    def _table(self, index: int, what: str) -> Tensor:
        """Sizes by combination of the shared choices and combination of the dimension's own."""
        expr = self._exprs[index]
        count = math.prod(len(choice_options(self.space, name)) for name in (*self.shared, *self._own[index]))
        if count > MOST_COMBINATIONS:
            raise SupernetError(
                f"a dimension of {what}, '{self.dims[index]}', has {count:,} combinations of options, more than "
                f"{MOST_COMBINATIONS:,}: let it depend on fewer choices"
            )
        own = combinations(self.space, self._own[index])
        shared = combinations(self.space, self.shared)
        rows = [[self._size(expr, {**some, **alone}, what) for alone in own] for some in shared]
        return torch.tensor(rows, device="cpu")  # whatever the default device: these are numbers, not weights

    def _size(self, expr: Expr, values: dict[str, Value], what: str) -> int:
        if self.space.rules.broken(values):
            return 0
        size = expr.value({name: values[name] for name in expr.names})
        if isinstance(size, str) or int(size) < 1:
            chosen = " ".join(f"{name}={values[name]}" for name in sorted(expr.names))
            raise SupernetError(f"a dimension of {what}, '{expr}', comes to {size!r} with {chosen or 'no choice'}")
        return int(size)


def combinations(space: Space, names: Sequence[str]) -> list[dict[str, Value]]:
    """All combinations of options, the last choice varying fastest."""
    options = [choice_options(space, name) for name in names]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*options)]


def with_conditions(rules: FrozenSpace, names: Iterable[str]) -> tuple[str, ...]:
    """The names and all that their conditions read, in the order of the space."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += rules.conditions[name].names if name in rules.conditions else ()
    return tuple(name for name in rules.choices if name in found)


def active_values(rules: FrozenSpace, names: Iterable[str], options: Mapping[str, Value]) -> dict[str, Value]:
    """Of one option for each choice, those of the choices that are active."""
    values: dict[str, Value] = {}
    for name in names:
        if rules.is_active(name, values):
            values[name] = options[name]
    return values


def _expand(space: Space, dim: Dim) -> Expr:
    expr = Expr.of(dim).substitute(space.rules.layout.derived)
    for name in expr.names:
        if name not in space.choices:
            raise SpaceError(f"'{expr}' reads '{name}', which is not a choice of the space")
    return expr


class Condition:
    """An expression that holds for some subnets, and its probability under a mixture.

    It reads its own choices and those that decide whether these are active: without its choices it does not hold.
    """

    def __init__(self, space: Space, expr: Expr) -> None:
        self.expr = _expand(space, expr)
        self.names = with_conditions(space.rules, self.expr.names)
        self._space = space
        self._on: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def holds(self, subnet: Subnet) -> bool:
        """Whether it holds for the subnet; not where it reads an inactive choice."""
        return self.expr.names <= subnet.values.keys() and bool(self.expr.value(subnet.values))

    def probability(self, mixture: Mixture) -> Tensor:
        """The probability that it holds."""

        def make() -> Tensor:
            joint = mixture.joint(self.names)
            key = (joint.device, joint.dtype)
            if key not in self._on:  # copied once: a copy from the host would make a GPU wait
                self._on[key] = self._table().to(joint)
            return joint @ self._on[key]

        return mixture.cached(("condition", self.expr.program), make)  # type: ignore[no-any-return]

    def _table(self) -> Tensor:
        """1 for the combinations of options of its choices for which it holds."""
        holds = []
        for options in combinations(self._space, self.names):
            values = active_values(self._space.rules, self.names, options)
            holds.append(float(self.expr.names <= values.keys() and bool(self.expr.value(values))))
        return torch.tensor(holds, device="cpu")
