"""Sampling from a space: a random subnet, all subnets in order, the neighbours, a mutation, a crossover of subnets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from weft.errors import SpaceError
from weft.space.choice import Choice, Floats, draw
from weft.space.counting import Counter, TooManyCases
from weft.space.expression import Value
from weft.space.subnet import FrozenSpace, Subnet

TRIES = 64  # plain draws before the exact, slower way
MANY_TRIES = 10_000


def sample(rules: FrozenSpace, rng: np.random.Generator) -> Subnet:
    if not rules.choices:
        raise rules.empty()
    return first_valid(rules, lambda _, choice: choice.sample(rng), TRIES) or _sample_exactly(rules, rng)


def first_valid(rules: FrozenSpace, pick: Callable[[str, Choice], Value], tries: int) -> Subnet | None:
    """The first of so many picks that keeps the constraints; None where none does."""
    for _ in range(tries):
        values = rules.settle(pick)
        if rules.broken(values) is None:
            return rules.subnet(values)
    return None


def enumerate_subnets(rules: FrozenSpace, backwards: bool = False) -> Iterator[Subnet]:
    """Every valid subnet in the order of choices and options; of a real choice, a few points.

    Counts what is left of the space at each step, so that it leaves out parts that hold no valid subnet.
    """
    if not rules.choices:
        raise rules.empty()
    counter = Counter(rules) if rules.constraints else None
    names = list(rules.choices)
    stack = [(0, dict[str, Value](), counter.start() if counter else None)]
    if counter and not counter.weight(stack[0][2]):
        return
    dead = 0  # ends that the counter did not foresee, since it cannot look into constraints on real choices
    while stack and dead < MANY_TRIES:
        at, values, state = stack.pop()
        if at == len(names):
            yield rules.subnet(values)
            continue
        name = names[at]
        if not rules.is_active(name, values):
            stack.append((at + 1, values, state))
            continue
        before = len(stack)
        options = _points(rules.choices[name])
        for value in options if backwards else options[::-1]:
            after = counter.assign(state, name, value) if counter and state else None
            if counter is None or counter.weight(after):
                stack.append((at + 1, {**values, name: value}, after))
        dead += len(stack) == before


def first_or_last(rules: FrozenSpace, last: bool) -> Subnet:
    for subnet in enumerate_subnets(rules, backwards=last):
        return subnet
    raise rules.empty()


def neighbours(rules: FrozenSpace, subnet: Subnet) -> list[Subnet]:
    old = subnet.values
    results: dict[Subnet, None] = {}
    for changed, here in old.items():
        for value in rules.choices[changed].neighbours(here):

            def pick(name: str, choice: Choice, changed: str = changed, value: Value = value) -> Value:
                return value if name == changed else old[name] if name in old else _points(choice)[0]

            neighbour = first_valid(rules, pick, 1)
            if neighbour is not None:
                results[neighbour] = None
    return list(results)


def mutate(rules: FrozenSpace, subnet: Subnet, rng: np.random.Generator, probability: float | None = None) -> Subnet:
    """Another valid subnet: one choice changes, and each other with the probability; itself only if it is alone."""
    old = subnet.values
    movable = [name for name in old if _movable(rules.choices[name])]
    if probability is None:
        probability = 1 / max(len(movable), 1)
    if not 0 <= probability <= 1:
        raise SpaceError(f"a probability is between 0 and 1, got {probability}")
    for _ in range(TRIES if movable else 0):
        forced = movable[draw(rng, len(movable))]

        def pick(name: str, choice: Choice, forced: str = forced) -> Value:
            if name not in old:
                return choice.sample(rng)
            if not _movable(choice) or (name != forced and rng.random() >= probability):
                return old[name]
            others = [option for option in choice.options or () if option != old[name]]
            return others[draw(rng, len(others))] if others else choice.sample(rng)

        values = rules.settle(pick)
        if values != old and rules.broken(values) is None:
            return rules.subnet(values)
    nearby = neighbours(rules, subnet)
    if nearby:
        return nearby[draw(rng, len(nearby))]
    for _ in range(8):
        drawn = sample(rules, rng)
        if drawn != subnet:
            return drawn
    return next((other for other in islice(enumerate_subnets(rules), 2) if other != subnet), subnet)


def crossover(rules: FrozenSpace, a: Subnet, b: Subnet, rng: np.random.Generator) -> Subnet:
    """Each choice from one of the parents at random; one of the parents where no such child is valid."""

    def pick(name: str, choice: Choice) -> Value:
        held = [parent.values[name] for parent in (a, b) if name in parent.values]
        return held[draw(rng, len(held))] if held else choice.sample(rng)

    return first_valid(rules, pick, TRIES) or (a, b)[draw(rng, 2)]


def _sample_exactly(rules: FrozenSpace, rng: np.random.Generator) -> Subnet:
    """The same distribution as drawing until the constraints hold, however rarely they do."""
    try:
        counter: Counter = rules.memo.setdefault("probabilities", Counter(rules, probabilities=True))
        if not counter.weight(counter.start()):
            raise rules.empty()
        for _ in range(MANY_TRIES):  # a second round is needed only where rules read real choices
            values = _draw_weighted(rules, counter, rng)
            if values is not None and rules.broken(values) is None:
                return rules.subnet(values)
    except TooManyCases:
        if found := first_valid(rules, lambda _, choice: choice.sample(rng), MANY_TRIES):
            return found
    raise SpaceError(f"no valid subnet in {MANY_TRIES:,} draws; {rules.empty()}")


def _draw_weighted(rules: FrozenSpace, counter: Counter, rng: np.random.Generator) -> dict[str, Value] | None:
    """Each choice drawn by what every option leaves; None where a drawn real number leaves nothing."""
    state = counter.start()
    values: dict[str, Value] = {}
    for name, choice in rules.choices.items():
        if state is None:
            return None
        if not rules.is_active(name, values):
            continue
        options = choice.options or (choice.sample(rng),)
        left = [counter.assign(state, name, option) for option in options]
        weights = [counter.weight(after) for after in left]
        total = sum(weights)
        if not total:
            return None
        at = float(rng.random())
        for option, after, weight in zip(options, left, weights, strict=True):
            if weight and at >= 0:
                values[name], state = option, after
                at -= float(weight / total)
    return values


def _points(choice: Choice) -> tuple[Value, ...]:
    """All options, or nine points from end to end of a real choice."""
    return choice.grid(9) if isinstance(choice, Floats) else choice.options


def _movable(choice: Choice) -> bool:
    return choice.options is None or len(choice.options) > 1
