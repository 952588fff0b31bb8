"""A space: named choices that may vary, some only under a condition, with derived dimensions and constraints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import numpy as np

from weft.errors import SpaceError, nearest
from weft.space import sampling
from weft.space.choice import MAX_OPTIONS, Categorical, Choice, Floats, Integers, choice_from_json
from weft.space.counting import Counter
from weft.space.expression import Expr, Value
from weft.space.subnet import FrozenSpace, Requirement, Subnet, SubnetSchema, digest

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


class Space:
    """Grows by `categorical`, `integer`, `real`, `derive` and `require`; every handle is an expression.

    A choice with a condition (`when`) is inactive, and absent from the subnet, where that is false. A condition that
    reads an inactive choice is false as a whole, `~` and `|` included; a derived dimension that reads one is inactive;
    a constraint that reads one is satisfied.

    >>> space = Space()
    >>> width, ratio = space.integer("width", [16, 32]), space.integer("ratio", 1, 4)
    >>> hidden = space.derive("hidden", ratio * width)
    >>> space.require(hidden <= 64, "must fit")
    >>> space.size(), space.subnet(width=32, ratio=2)["hidden"]
    (6, 64)
    """

    def __init__(self) -> None:
        self._choices: dict[str, Choice] = {}
        self._when: dict[str, Expr] = {}
        self._derived: dict[str, Expr] = {}
        self._meaning: dict[str, Expr] = {}  # derived names, written in choices alone
        self._constraints: list[Requirement] = []
        self._order: list[str] = []  # choices and derived names as they came
        self._rules: FrozenSpace | None = None

    # -- what may vary

    def categorical(self, name: str, options: Iterable[Value], when: Expr | None = None) -> Expr:
        """One of the options, which are told apart by value and kept in this order."""
        if isinstance(options, str | set | frozenset):
            raise SpaceError(f"the options of '{name}' must be a list or tuple, not a {type(options).__name__}")
        return self._add(name, Categorical(tuple(options)), when)

    def integer(
        self,
        name: str,
        values_or_low: int | Iterable[int],
        high: int | None = None,
        step: int = 1,
        when: Expr | None = None,
        ordered: bool = True,
    ) -> Expr:
        """One of the given integers, or of low, low + step, ... up to and including high."""
        if not isinstance(values_or_low, int):
            if high is not None or step != 1:
                raise SpaceError(f"'{name}' takes either a list of values, or low, high and step")
            return self._add(name, Integers(tuple(values_or_low), ordered), when)
        if high is None or step < 1 or high < values_or_low:
            raise SpaceError(
                f"'{name}' needs low <= high and step >= 1, got low={values_or_low} high={high} step={step}"
            )
        values = range(values_or_low, high + 1, step)
        if len(values) > MAX_OPTIONS:
            raise SpaceError(
                f"'{name}' has {len(values)} values, more than {MAX_OPTIONS}; use a step, or a real choice"
            )
        return self._add(name, Integers(tuple(values), ordered), when)

    def real(self, name: str, low: float, high: float, log: bool = False, when: Expr | None = None) -> Expr:
        """A number of [low, high], uniform, or uniform in its logarithm with `log`."""
        return self._add(name, Floats(low, high, log), when)

    def derive(self, name: str, expr: Expr) -> Expr:
        """A dimension that follows from others; read as `subnet[name]` and usable in later expressions."""
        self._check_name(name)
        meaning = self._expand(expr, f"the derived '{name}'")
        self._derived[name], self._meaning[name] = Expr.of(expr), meaning
        return self._append(name)

    def require(self, expr: Expr, message: str = "") -> None:
        """A constraint that every subnet satisfies in which all that it reads is active."""
        if isinstance(expr, bool):
            raise SpaceError("a constraint is an expression over choices; this one is already a plain bool")
        self._constraints.append(Requirement(Expr.of(expr), self._expand(expr, "a constraint"), message))
        self._rules = None

    # -- what is in it

    @property
    def choices(self) -> Mapping[str, Choice]:
        return MappingProxyType(self._choices)

    @property
    def conditions(self) -> Mapping[str, Expr]:
        """The choices that are not always active, with what they depend on."""
        return MappingProxyType(self._when)

    @property
    def derived(self) -> Mapping[str, Expr]:
        return MappingProxyType(self._derived)

    @property
    def constraints(self) -> tuple[Requirement, ...]:
        return tuple(self._constraints)

    @property
    def id(self) -> str:
        """16 hex digits of the canonical JSON; another after every addition."""
        return self.rules.layout.space_id

    @property
    def rules(self) -> FrozenSpace:
        """The space as it is now, frozen."""
        if self._rules is None:
            layout = SubnetSchema(digest(self.to_json()), tuple(self._choices), dict(self._meaning))
            conditions = {name: self._expand(expr, f"'{name}'") for name, expr in self._when.items()}
            self._rules = FrozenSpace(dict(self._choices), conditions, tuple(self._constraints), layout)
        return self._rules

    def handle(self, name: str) -> Expr:
        """The expression that stands for a choice or a derived dimension."""
        if name not in self._choices and name not in self._derived:
            raise SpaceError(f"unknown name '{name}'{nearest(name, self._order)}")
        return Expr.variable(name)

    # -- subnets

    def subnet(self, values: Mapping[str, Value] | None = None, /, **named: Value) -> Subnet:
        """The subnet with these values: one for every active choice and none for an inactive one. A derived dimension
        may stand beside them with the value that it has, as in the values of a trial."""
        chosen = {**(values or {}), **named}
        if values and (twice := sorted(values.keys() & named.keys())):
            raise SpaceError(f"'{twice[0]}' is given twice")
        for name in [*chosen]:
            if name in self._derived:
                meaning = self._meaning[name]
                if meaning.names <= chosen.keys() and meaning.value(chosen) == chosen[name]:
                    del chosen[name]
                    continue
                raise SpaceError(f"'{name}' is derived from '{self._derived[name]}'; leave it out")
            if name not in self._choices:
                raise SpaceError(f"unknown choice '{name}'{nearest(str(name), self._choices)}")

        def pick(name: str, choice: Choice) -> Value:
            if name not in chosen:
                shown = "" if choice.options is None else f"; options: {', '.join(map(repr, choice.options[:12]))}"
                raise SpaceError(f"choice '{name}' has no value{shown}")
            try:
                return choice.canonical(chosen[name])
            except SpaceError as error:
                raise SpaceError(f"choice '{name}': {error}") from None

        settled = self.rules.settle(pick)
        for name in chosen:
            if name not in settled:
                raise SpaceError(f"choice '{name}' is inactive here, since '{self._when[name]}' is false; leave it out")
        subnet = self.rules.subnet(settled)
        broken = self.rules.broken(settled)
        if broken is not None:
            shown = " ".join(f"{name}={subnet[name]}" for name in self._order if name in broken.expr.names)
            raise SpaceError(f"the constraint {broken} does not hold with {shown}")
        return subnet

    def load_subnet(self, data: object) -> Subnet:
        """The subnet that `Subnet.to_json` wrote, checked against this space."""
        if not (isinstance(data, Mapping) and set(data) == {"space", "values"} and isinstance(data["values"], Mapping)):
            raise SpaceError(f'a subnet is written {{"space": id, "values": {{...}}}}, not {data!r}')
        if data["space"] != self.id:
            raise SpaceError(f"the subnet is of space {data['space']}, not of this one ({self.id})")
        return self.subnet(data["values"])

    def check(self, subnet: Subnet) -> None:
        """Raises SpaceError unless the subnet was made by this very space."""
        if not isinstance(subnet, Subnet):
            raise SpaceError(f"{subnet!r} is no subnet; make one by space.subnet(...)")
        if subnet.space_id != self.id:
            raise SpaceError(
                f"the subnet '{subnet}' is of space {subnet.space_id}, not of this one ({self.id}); "
                "every addition makes it another space"
            )

    def contains(self, subnet: Subnet) -> bool:
        return isinstance(subnet, Subnet) and subnet.space_id == self.id

    def size(self) -> int | float:
        """The exact number of valid subnets; math.inf with a real choice, whose constraints count as satisfiable."""
        counter = Counter(self.rules)
        weight = counter.weight(counter.start())
        return weight if isinstance(weight, float) else int(weight)

    def enumerate(self, limit: int = 100_000) -> Iterator[Subnet]:
        """Every valid subnet, in the order of choices and options; more than `limit` are refused."""
        size = self.size()
        if size > limit:
            count = "endless" if isinstance(size, float) else f"{size:,}"
            raise SpaceError(f"the space holds {count} subnets, more than the limit of {limit:,}; sample it instead")
        if not size or not self._choices:
            raise self.rules.empty()
        return sampling.enumerate_subnets(self.rules)

    def sample(self, rng: np.random.Generator) -> Subnet:
        """Each active choice uniform and independent, given that the constraints hold; SpaceError if none can be."""
        return sampling.sample(self.rules, rng)

    def first(self) -> Subnet:
        """The first option of every choice; with constraints, the first valid subnet in that order."""
        return sampling.first_or_last(self.rules, last=False)

    def last(self) -> Subnet:
        """The last option of every choice; with constraints, the last valid subnet in that order."""
        return sampling.first_or_last(self.rules, last=True)

    def neighbours(self, subnet: Subnet) -> list[Subnet]:
        """The valid subnets with one choice changed; choices that this makes active take their first option."""
        self.check(subnet)
        return sampling.neighbours(self.rules, subnet)

    def mutate(self, subnet: Subnet, rng: np.random.Generator, probability: float | None = None) -> Subnet:
        """Another valid subnet: one choice changes for sure, each other one with the probability (1 / choices)."""
        self.check(subnet)
        return sampling.mutate(self.rules, subnet, rng, probability)

    def crossover(self, a: Subnet, b: Subnet, rng: np.random.Generator) -> Subnet:
        """A valid subnet with each choice from one of the parents, or one of them where no such child is valid."""
        self.check(a)
        self.check(b)
        return sampling.crossover(self.rules, a, b, rng)

    # -- on paper

    def to_json(self) -> dict[str, object]:
        names: list[dict[str, object]] = []
        for name in self._order:
            if name in self._derived:
                names.append({"name": name, "kind": "derived", "expr": self._derived[name].to_json()})
            else:
                when = self._when.get(name)
                names.append(
                    {"name": name, **self._choices[name].to_json(), "when": None if when is None else when.to_json()}
                )
        required = [{"expr": c.expr.to_json(), "message": c.message} for c in self._constraints]
        return {"format": 1, "names": names, "require": required}

    @classmethod
    def from_json(cls, data: object) -> Space:
        """The space that `to_json` wrote, with the same id."""
        if not (isinstance(data, Mapping) and data.get("format") == 1 and set(data) == {"format", "names", "require"}):
            raise SpaceError("this is no space of format 1: it needs 'format', 'names' and 'require' and nothing else")
        space = cls()
        for entry in _entries(data["names"], {"name", "kind"}):
            name, when = str(entry["name"]), entry.get("when")
            if entry["kind"] == "derived" and set(entry) == {"name", "kind", "expr"}:
                space.derive(name, Expr.from_json(entry["expr"]))
            else:
                fields = {key: item for key, item in entry.items() if key not in ("name", "when")}
                space._add(name, choice_from_json(fields), None if when is None else Expr.from_json(when))
        for entry in _entries(data["require"], {"expr", "message"}):
            space.require(Expr.from_json(entry["expr"]), str(entry["message"]))
        return space

    def __contains__(self, name: object) -> bool:
        return name in self._choices or name in self._derived

    def __repr__(self) -> str:
        counts = f"{len(self._choices)} choices, {len(self._derived)} derived, {len(self._constraints)} constraints"
        return f"Space({counts}, id={self.id})"

    def _add(self, name: str, choice: Choice, when: Expr | None) -> Expr:
        self._check_name(name)
        if when is not None:
            self._expand(when, f"the condition of '{name}'")
            self._when[name] = Expr.of(when)
        self._choices[name] = choice
        return self._append(name)

    def _append(self, name: str) -> Expr:
        self._order.append(name)
        self._rules = None
        return Expr.variable(name)

    def _check_name(self, name: str) -> None:
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise SpaceError(f"{name!r} is no name: a letter or '_', then letters, digits, '_', '.' or '-'")
        if name in self:
            raise SpaceError(f"the name '{name}' is taken; names of choices and derived dimensions are unique")

    def _expand(self, expr: object, reader: str) -> Expr:
        """The expression in choices alone; everything that it reads must be there already."""
        meaning = Expr.of(expr)
        for name in sorted(meaning.names):
            if name not in self:
                hint = nearest(name, self._order)
                raise SpaceError(f"{reader} reads '{name}', which is not defined before it{hint}")
        return meaning.substitute(self._meaning)


def _entries(data: object, keys: set[str]) -> list[Mapping[str, object]]:
    if not isinstance(data, list) or not all(isinstance(entry, Mapping) and keys <= entry.keys() for entry in data):
        raise SpaceError(f"expected a list of entries with {', '.join(sorted(keys))}, not {data!r}")
    return data
