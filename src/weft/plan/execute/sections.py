"""What each stage of a plan computes, which tensors it holds, and which values it gets from and gives to others.

What has no gradient and comes from inputs and constants alone, such as masks and positions, is computed anew in every
stage that reads it. Every other value is computed in one stage and sent straight to each stage that reads it, also over
the stages between.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from weft.errors import PlanError
from weft.plan.execute.reading import Value
from weft.plan.graph import Graph


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that one stage computes and a later one reads."""

    value: Value
    source: int
    target: int
    gradient: bool


@dataclass(frozen=True, slots=True)
class Section:
    """A stage's part of a graph, as places in it: operators that it computes, and what it holds or is given from the
    start. ``ends`` are values that are wanted for themselves. Crossings are in the order in which they are sent."""

    operators: frozenset[int]
    leaves: frozenset[int]
    ends: tuple[Value, ...]
    receives: tuple[Crossing, ...]
    sends: tuple[Crossing, ...]


def sections(
    graph: Graph,
    stage: Sequence[int | None],
    calls: Collection[int],
    ends: Sequence[Value],
    updates: Mapping[int, Value],
    random: Collection[int] = (),
) -> tuple[Section, ...]:
    """The sections of all stages, which compute the ends and what these need.

    ``stage`` says where an operator is computed, if it matters; ``calls`` are the places that are computed at all;
    ``updates``: the place of a buffer -> its next value; ``random`` draw at random, so that they are computed once.
    Raises PlanError where an operator would read from a later stage, or a buffer change in another one.
    """
    count = max(each for each in stage if each is not None) + 1
    free = _free(graph, calls, updates, random)
    at = _settled(graph, stage, calls, free)
    wanted = [*ends, *updates.values()]
    needed = _needed(graph, [value.source for value in wanted])
    homes = {value: at[value.source] if value.source in at else stage[value.source] or 0 for value in wanted}
    found: list[tuple[set[int], set[int], set[Value]]] = []
    for number in range(count):
        queue = [place for place in calls if place in needed and place not in free and at[place] == number]
        queue += [value.source for value, home in homes.items() if home == number]
        operators: set[int] = set()
        leaves: set[int] = set()
        foreign: set[Value] = set()
        while queue:
            place = queue.pop()
            if place not in calls:
                leaves.add(place)
            elif place not in operators:
                operators.add(place)
                for read in graph.operators[place].reads:
                    if read.source in calls and read.source not in free and at[read.source] != number:
                        foreign.add(Value(read.source, read.output))
                    else:
                        queue.append(read.source)
        found.append((operators, leaves, foreign))
    for place, value in updates.items():
        found[homes[value]][1].add(place)
    _house(graph, stage, calls, [leaves for _, leaves, _ in found])
    for place, value in updates.items():
        holders = [number for number, (_, leaves, _) in enumerate(found) if place in leaves]
        if any(number != homes[value] for number in holders):
            raise PlanError(
                f"buffer '{graph.operators[place].target}' changes in stage {homes[value]} and is read in stage "
                f"{next(number for number in holders if number != homes[value])}: ask for fewer stages"
            )
    crossings = sorted(
        (
            Crossing(value, at[value.source], number, graph.operators[value.source].outputs[value.output].gradient)
            for number, (_, _, foreign) in enumerate(found)
            for value in foreign
        ),
        key=lambda each: (each.source, each.target, each.value.source, each.value.output),
    )
    return tuple(
        Section(
            frozenset(operators),
            frozenset(leaves),
            tuple(value for value, home in homes.items() if home == number),
            tuple(each for each in crossings if each.target == number),
            tuple(each for each in crossings if each.source == number),
        )
        for number, (operators, leaves, _) in enumerate(found)
    )


def _free(
    graph: Graph, calls: Collection[int], updates: Mapping[int, Value], random: Collection[int]
) -> frozenset[int]:
    """What every stage can have for itself: no gradient, no draw, and nothing that changes, in all it comes from."""
    free: set[int] = set()
    for place, operator in enumerate(graph.operators):
        if any(tensor.gradient for tensor in operator.outputs) or place in random:
            continue
        if all(read.source in free for read in operator.reads) if place in calls else place not in updates:
            free.add(place)
    return frozenset(free)


def _settled(
    graph: Graph, stage: Sequence[int | None], calls: Collection[int], free: Collection[int]
) -> dict[int, int]:
    """The stage of every operator that is computed once: that of the plan, but without gradient no later than where it
    is first read."""
    last = max(each for each in stage if each is not None)
    at = {place: _given(stage[place], last) for place in calls if place not in free}
    for place in reversed(range(len(graph))):
        if place in at:
            for read in graph.operators[place].reads:
                if read.source in at and not any(each.gradient for each in graph.operators[read.source].outputs):
                    at[read.source] = min(at[read.source], at[place])
    for place in at:
        for read in graph.operators[place].reads:
            if read.source in at and at[read.source] > at[place]:
                raise PlanError(
                    f"operator '{graph.operators[place].name}' of stage {at[place]} reads "
                    f"'{graph.operators[read.source].name}' of stage {at[read.source]}, which comes later: plan anew"
                )
    return at


def _given(stage: int | None, otherwise: int) -> int:
    return otherwise if stage is None else stage


def _needed(graph: Graph, ends: Sequence[int]) -> frozenset[int]:
    needed = set(ends)
    for place in reversed(range(len(graph))):
        if place in needed:
            needed.update(read.source for read in graph.operators[place].reads)
    return frozenset(needed)


def _house(graph: Graph, stage: Sequence[int | None], calls: Collection[int], leaves: list[set[int]]) -> None:
    """What nobody reads stays where the plan has it, so that nothing of the model is lost."""
    held = set().union(*leaves)
    for place in range(len(graph)):
        if place not in calls and place not in held:
            leaves[_given(stage[place], 0)].add(place)
