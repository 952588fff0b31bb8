"""A program under a strategy, as the flat list of steps that one device takes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.plan.execute.chance import draws, shadow
from weft.plan.execute.check import fill
from weft.plan.execute.flow import Moves, carried
from weft.plan.execute.local import local
from weft.plan.execute.passage import Kind, passage
from weft.plan.execute.reading import Reading, Value
from weft.plan.execute.site import Local, Operand, Run, Site, operands
from weft.plan.execute.wire import Wire
from weft.plan.layout import PARTIAL, REPLICATED, Layout, Mesh, gradient_layout
from weft.plan.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a value lies while it is needed."""

    number: int


@dataclass(frozen=True, slots=True)
class Pass:
    """Brings a value to how readers want it: one target for each way that their gradients lie."""

    source: int
    moves: Moves
    backs: tuple[Moves, ...]
    targets: tuple[int, ...]
    frees: tuple[int, ...] = ()

    @property
    def reads(self) -> Iterable[int]:
        return (self.source,)

    def run(self, slots: list[Any], wire: Wire) -> None:
        for target, value in zip(self.targets, carried(slots[self.source], wire, self.moves, self.backs), strict=True):
            slots[target] = value


@dataclass(frozen=True, slots=True)
class Call:
    """Computes this device's part of an operator; ``targets`` says where each output that is read goes."""

    name: str
    compute: Run
    args: list[Any]
    kwargs: dict[str, Any]
    targets: tuple[tuple[int, int], ...]
    frees: tuple[int, ...] = ()

    @property
    def reads(self) -> Iterable[int]:
        return [slot.number for slot in _slots([self.args, self.kwargs])]

    def run(self, slots: list[Any], wire: Wire) -> None:
        out = self.compute(wire, _filled(self.args, slots), _filled(self.kwargs, slots))
        several = isinstance(out, (tuple, list))
        for output, target in self.targets:
            slots[target] = out[output] if several else out


@dataclass(frozen=True, slots=True)
class Recipe:
    """The steps, and the slots of the values that are there before the first and after the last."""

    slots: int
    steps: tuple[Pass | Call, ...]
    given: Mapping[Value, int]
    results: Mapping[Value, int]  # whole, or as they lie
    layouts: Mapping[Value, Layout]  # how each value comes to lie
    random: bool

    def gathers(self, slots: Collection[int]) -> frozenset[int]:
        """The steps that gather what lies in these slots."""
        return frozenset(
            number
            for number, step in enumerate(self.steps)
            if isinstance(step, Pass)
            and step.source in slots
            and any(move.kind is Kind.ALL_GATHER for move in step.moves)
        )


def recipe(
    reading: Reading,
    strategy: Strategy,
    given: Mapping[Value, Layout],
    results: Sequence[Value],
    as_they_lie: Collection[Value] = (),
    only: Collection[int] | None = None,
) -> Recipe:
    """The steps from the given values, which lie as said, to the results: those in ``as_they_lie`` are cut or whole as
    they come to lie (never partial), all others whole on every device. With ``only``, the operators at these places
    alone are computed; of the others, the random ones are drawn and thrown away, so that the generator goes on as if
    they were."""
    mesh = strategy.mesh
    whole: Layout = (REPLICATED,) * len(mesh.sizes)
    sites = [(place, reading.site(place, node, strategy.splits[place], mesh)) for place, node in reading.calls()]
    made = [(place, site, local(site)) for place, site in sites if only is None or place in only]
    layouts = dict(given)
    for place, site, how in made:
        for output in range(len(site.operator.outputs)):
            layouts[Value(place, output)] = _lying(site.result(output), output in how.whole)
    wants: dict[tuple[Value, Layout], list[Layout]] = {}  # to the ways in which gradients come back
    for _, site, how in made:
        for operand in operands([how.args, how.kwargs]):
            _want(wants, Value(operand.source, operand.output), *_demand(site, operand))
    ends = {value: _lying(layouts[value], value in as_they_lie) if value in as_they_lie else whole for value in results}
    for value, wanted in ends.items():
        _want(wants, value, wanted, wanted)
    kitchen = _Kitchen(mesh, layouts, wants)
    begin = {value: kitchen.slot(value) for value in given}
    ours = {place: (site, how) for place, site, how in made}
    for place, site in sites:
        if place in ours:
            kitchen.call(place, *ours[place])
        elif draws(site):
            kitchen.steps.append(Call(f"{site.operator.name} elsewhere", shadow(site), [], {}, ()))
    final = {value: kitchen.fetch(value, wanted, wanted) for value, wanted in ends.items()}
    steps = _freed(kitchen.steps, frozenset(final.values()))
    return Recipe(kitchen.count, steps, begin, final, layouts, any(draws(site) for _, site in sites))


def settled(reading: Reading, strategy: Strategy, values: Collection[Value]) -> dict[Value, Layout]:
    """How some values come to lie, with their summands added up."""
    found: dict[Value, Layout] = {}
    for place, node in reading.calls():
        for value in values:
            if value.source == place:
                found[value] = _lying(
                    reading.site(place, node, strategy.splits[place], strategy.mesh).result(value.output), True
                )
    return found


def _lying(laid: Layout, whole: bool) -> Layout:
    return tuple(REPLICATED if whole and place == PARTIAL else place for place in laid)


def _demand(site: Site, operand: Operand) -> tuple[Layout, Layout]:
    return site.wanted(operand), gradient_layout(operand.tensor, site.split)


def _want(wants: dict[tuple[Value, Layout], list[Layout]], value: Value, wanted: Layout, gradient: Layout) -> None:
    known = wants.setdefault((value, wanted), [])
    if gradient not in known:
        known.append(gradient)


class _Kitchen:
    """Lays out the steps in order; a passage is made once, just before its first reader."""

    def __init__(
        self, mesh: Mesh, layouts: Mapping[Value, Layout], wants: Mapping[tuple[Value, Layout], list[Layout]]
    ) -> None:
        self.mesh, self.layouts, self.wants = mesh, layouts, wants
        self.steps: list[Pass | Call] = []
        self.count = 0
        self._slots: dict[Value, int] = {}
        self._fetched: dict[tuple[Value, Layout], dict[Layout, int]] = {}

    def slot(self, value: Value) -> int:
        if value not in self._slots:
            self._slots[value] = self._new()
        return self._slots[value]

    def fetch(self, value: Value, wanted: Layout, gradient: Layout) -> int:
        """The slot of a value as a reader wants it."""
        key = (value, wanted)
        if key not in self._fetched:
            held = self.layouts[value]
            # The gradient of a summand is that of the sum: whole where the value is partial.
            home = _lying(held, True)
            moves = passage(held, wanted, self.mesh)
            backs = {each: passage(each, home, self.mesh) for each in self.wants[key]}
            if not moves and not any(backs.values()):
                self._fetched[key] = dict.fromkeys(backs, self.slot(value))
            else:
                targets = {each: self._new() for each in backs}
                self.steps.append(Pass(self.slot(value), moves, tuple(backs.values()), tuple(targets.values())))
                self._fetched[key] = targets
        return self._fetched[key][gradient]

    def call(self, place: int, site: Site, how: Local) -> None:
        def slot(operand: Operand) -> Slot:
            return Slot(self.fetch(Value(operand.source, operand.output), *_demand(site, operand)))

        args, kwargs = fill(how.args, slot), fill(how.kwargs, slot)
        targets = tuple((output, self.slot(Value(place, output))) for output in sorted(site.used))
        self.steps.append(Call(site.operator.name, how.run, args, kwargs, targets))

    def _new(self) -> int:
        self.count += 1
        return self.count - 1


def _freed(steps: Sequence[Pass | Call], kept: frozenset[int]) -> tuple[Pass | Call, ...]:
    """The steps, each with the slots that nobody reads after it."""
    out: list[Pass | Call] = []
    later = set(kept)
    for step in reversed(steps):
        targets = step.targets if isinstance(step, Pass) else [slot for _, slot in step.targets]
        done = sorted({slot for slot in (*step.reads, *targets) if slot not in later})
        later.update(done)
        out.append(replace(step, frees=tuple(done)))
    return tuple(reversed(out))


def _slots(value: Any) -> Iterable[Slot]:
    if isinstance(value, Slot):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _slots(each)
    elif isinstance(value, dict):
        yield from _slots(list(value.values()))


def _filled(value: Any, slots: list[Any]) -> Any:
    kind = type(value)
    if kind is Slot:
        return slots[value.number]
    if kind is list:
        return [_filled(each, slots) for each in value]
    if kind is tuple:
        return tuple(_filled(each, slots) for each in value)
    if kind is dict:
        return {name: _filled(each, slots) for name, each in value.items()}
    return value
