"""A captured micro-batch in stages, before anything runs: its loss, its sections, and why it could not be run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import PlanError
from weft.plan.capture import Captured
from weft.plan.execute.calling import Calling
from weft.plan.execute.chance import draws, shadow
from weft.plan.execute.check import executable
from weft.plan.execute.reading import Reading, Value
from weft.plan.execute.sections import Section, sections
from weft.plan.execute.site import Unfit
from weft.plan.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Outline:
    """The loss of the program, the buffers that it changes with their next values, and what each stage does."""

    loss: Value
    changes: dict[str, Value]
    sections: tuple[Section, ...]

    @classmethod
    def of(cls, captured: Captured, strategy: Strategy, stage: Sequence[int | None]) -> Outline:
        """Raises PlanError where the stages cannot be run."""
        reading = Reading(captured)
        loss = _loss(captured, Calling.of(captured, reading))
        changes = {name: reading.value(node) for node, name in captured.mutated.items()}
        places = {name: reading.value(node).source for node, name in captured.buffers.items()}
        random = set()
        calls = set()
        for place, node in reading.calls():
            calls.add(place)
            site = reading.site(place, node, strategy.splits[place], strategy.mesh)
            if not draws(site):
                continue
            random.add(place)
            if max(each or 0 for each in stage):
                try:
                    shadow(site)
                except Unfit as problem:
                    told = f"operator '{site.operator.name}' ({site.operator.target}): {problem}"
                    raise PlanError(f"{told}, so other stages cannot keep pace: ask for stages=1") from problem
        updates = {places[name]: value for name, value in changes.items()}
        return cls(loss, changes, sections(captured.graph, stage, calls, [loss], updates, random))


def staged_reasons(captured: Captured, strategy: Strategy, stage: Sequence[int | None]) -> list[str]:
    """Why a strategy in stages cannot be run; empty if it can."""
    if found := executable(captured, strategy):
        return found
    try:
        Outline.of(captured, strategy, stage)
    except PlanError as problem:
        return [str(problem)]
    return []


def _loss(captured: Captured, calling: Calling) -> Value:
    """The first number among the results that a gradient flows through."""
    for value in calling.outputs:
        if isinstance(value, Value):
            tensor = captured.graph.operators[value.source].outputs[value.output]
            if tensor.gradient and tensor.elements == 1:
                return value
    raise PlanError(
        f"'{captured.graph.name}' returns no loss, which micro-batches and stages need: plan it with loss=..., or give "
        "it labels"
    )
