"""Runs of steps of one layer, of which only what goes in is kept: the backward computes the rest once more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from weft.plan.execute.recipe import Call, Pass, Recipe
from weft.plan.execute.wire import Wire

Step = Pass | Call


@dataclass(frozen=True, slots=True)
class Span:
    """Steps that follow each other: the slots that they read from before, and those that are read after them."""

    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    again: bool  # whether the backward computes them once more

    def run(self, slots: list[Any], wire: Wire) -> None:
        if not self.again or not self.outputs or not torch.is_grad_enabled():
            for step in self.steps:
                step.run(slots, wire)
                for slot in step.frees:
                    slots[slot] = None
            return
        results = checkpoint(self._alone(len(slots), wire), *(slots[slot] for slot in self.inputs), use_reentrant=False)
        for slot in {slot for step in self.steps for slot in step.frees}:
            slots[slot] = None
        for slot, value in zip(self.outputs, results, strict=True):
            slots[slot] = value

    def _alone(self, count: int, wire: Wire) -> Callable[..., tuple[Tensor, ...]]:
        def run(*values: Any) -> tuple[Tensor, ...]:
            slots: list[Any] = [None] * count
            for slot, value in zip(self.inputs, values, strict=True):
                slots[slot] = value
            for step in self.steps:
                step.run(slots, wire)
                for slot in step.frees:
                    slots[slot] = None
            return tuple(slots[slot] for slot in self.outputs)

        return run


def spans(recipe: Recipe, steps: Sequence[Step], layers: Mapping[str, str] | None) -> tuple[Span, ...]:
    """The steps in spans: one for each run of a layer's calls, and of those that belong to none. A passage belongs to
    the call that it is made for. ``layers``: a call's name -> its layer; without it nothing is computed again."""
    names: list[str] = []
    following = ""
    for step in reversed(steps):
        if isinstance(step, Call):
            following = (layers or {}).get(step.name, "")
        names.append(following)
    names.reverse()
    later = set(recipe.results.values())
    after: list[frozenset[int]] = []  # of each step: the slots that are read after it
    for step in reversed(steps):
        after.append(frozenset(later))
        later.update(step.reads)
    after.reverse()
    found = []
    for name, group in groupby(range(len(steps)), key=lambda number: names[number]):
        numbers = list(group)
        members = tuple(steps[number] for number in numbers)
        made: set[int] = set()
        reads: dict[int, None] = {}
        for step in members:
            reads.update(dict.fromkeys(slot for slot in step.reads if slot not in made))
            made.update(_targets(step))
        outputs = tuple(sorted(made & after[numbers[-1]]))
        found.append(Span(members, tuple(reads), outputs, bool(name)))
    return tuple(found)


def _targets(step: Step) -> tuple[int, ...]:
    return step.targets if isinstance(step, Pass) else tuple(slot for _, slot in step.targets)
