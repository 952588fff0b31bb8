"""Boxes grouped by layer, and layers that are alike folded into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.plan.page.alike import Signatures, repeats
from weft.plan.page.boxes import Boxes
from weft.plan.plan import Plan
from weft.plan.tables import layer_of

_TALL = 32  # a group of more boxes is looked into for layers of its own


@dataclass(frozen=True, slots=True)
class Group:
    """The boxes of one layer, or of one module outside the layers.

    ``copies`` has the places of its boxes for each of the layers that are folded into it, in one order. ``run`` tells
    the groups apart that are repeated together: copy i of one feeds copy i of the next.
    """

    modules: tuple[str, ...]  # of each copy
    layer: bool
    stage: int
    copies: tuple[tuple[int, ...], ...]
    run: int = 0

    @property
    def places(self) -> tuple[int, ...]:
        return self.copies[0]

    @property
    def times(self) -> int:
        return len(self.copies)

    @property
    def title(self) -> str:
        """Such as ``transformer.h.0-11``."""
        first, last = self.modules[0] or "model", self.modules[-1] or "model"
        return first + (f"-{last.rsplit('.', 1)[-1]}" if first != last else "")


def groups(plan: Plan, boxes: Boxes) -> list[Group]:
    """The groups in the order they run in, stage by stage."""
    found = _within(Signatures(plan, boxes), boxes.places, 1)
    found.sort(key=lambda group: group.stage)
    return [replace(group, run=number) if group.times == 1 else group for number, group in enumerate(found)]


def _within(signatures: Signatures, places: Sequence[int], depth: int) -> list[Group]:
    """The groups of some boxes by the numbers in their modules' paths, so many deep."""
    plain = _split(signatures.plan, places, depth)
    found: list[Group] = []
    for start, period, times in repeats(
        [signatures.of(group.places, group.modules[0] if group.layer else None) for group in plain]
    ):
        for number in range(start, start + period):
            alike = plain[number : number + period * times : period]
            group = plain[number]
            if times > 1:
                copies = tuple(own.copies[0] for own in alike)
                modules = tuple(own.modules[0] for own in alike)
                # Numbers below zero, so that no group that stands alone has the same.
                found.append(replace(group, modules=modules, copies=copies, run=-1 - plain[start].places[0]))
            elif len(group.places) > _TALL and group.layer:
                inner = _within(signatures, group.places, depth + 1)
                found += inner if any(own.layer for own in inner) else [group]
            else:
                found.append(group)
    return found


def _split(plan: Plan, places: Sequence[int], depth: int) -> list[Group]:
    """A group for each layer, wherever its boxes are; of the others one for each module as long as it runs."""
    found: dict[object, list[int]] = {}
    named: dict[object, tuple[str, bool, int]] = {}
    previous: object = None
    for place in places:
        module, stage = plan.graph.operators[place].module, plan.stage[place]
        layer = _layer(module, depth)
        key: object = (stage, layer) if layer else (stage, module, len(named))
        if not layer and previous is not None and named[previous] == (module, False, stage):
            key = previous
        named.setdefault(key, (layer or module, bool(layer), stage))
        found.setdefault(key, []).append(place)
        previous = key
    return [Group((name,), layer, stage, (tuple(found[key]),)) for key, (name, layer, stage) in named.items()]


def _layer(module: str, depth: int) -> str:
    """The path of a module up to its number that is so many deep; empty if it has fewer.

    >>> _layer("stages.2.layers.1.conv", 1), _layer("stages.2.layers.1.conv", 2), _layer("stages.2.norm", 2)
    ('stages.2', 'stages.2.layers.1', '')
    """
    found: list[str] = []
    for _ in range(depth):
        inner = layer_of(".".join(module.split(".")[len(found) :]))
        if not inner:
            return ""
        found += inner.split(".")
    return ".".join(found)
