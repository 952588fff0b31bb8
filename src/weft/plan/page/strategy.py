"""The splits of a plan: what each colour means, and the graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from weft.plan.page.boxes import Boxes
from weft.plan.page.colours import WHOLE, colours, labels, split_words
from weft.plan.page.columns import picture
from weft.plan.page.drawing import drawing
from weft.plan.page.groups import Group
from weft.plan.page.prices import Prices
from weft.plan.page.words import Teller, called
from weft.plan.plan import Plan

_NONE = "There is no operator to draw."


@dataclass(frozen=True, slots=True)
class Drawn:
    """The graph as SVG, and the colour of each label that is in it, on a light and on a dark page."""

    svg: str
    colours: dict[str, tuple[str, str]]


def strategy(plan: Plan, boxes: Boxes, groups: Sequence[Group], prices: Prices | None) -> str:
    """The legend and the graph."""
    if not boxes.places:
        return f"<p>{_NONE}</p>"
    return (
        f"{_legend(plan, boxes, labels(plan), prices)}"
        '<div class="graph" tabindex="0" role="region" aria-label="graph of operators, arrow keys go from box to box">'
        f'{drawn(plan, boxes, groups, prices).svg}</div><pre id="told" aria-live="polite">{_HINT}</pre>'
    )


def drawn(plan: Plan, boxes: Boxes, groups: Sequence[Group], prices: Prices | None) -> Drawn:
    """The graph by itself; its style has only the colours."""
    split = labels(plan)
    order = _order(plan, boxes, split)
    known = colours(order)
    numbers = {label: number for number, label in enumerate(known)}
    copies = {
        place: alike
        for group in groups
        for place, alike in zip(group.places, zip(*group.copies, strict=True), strict=True)
    }
    home = {place: group for group in groups for place in group.places}
    teller = Teller(plan, boxes.folded(), prices)

    def words(place: int) -> tuple[str, str]:
        operator, group = plan.graph.operators[place], home[place]
        name = operator.module.removeprefix(group.modules[0]).removeprefix(".") if group.layer else operator.module
        return name or operator.name, f"{called(operator)} · {'whole' if split[place] == WHOLE else split[place]}"

    svg = drawing(
        plan,
        picture(boxes, groups),
        _style(known),
        {place: numbers[split[place]] for place in copies},
        words,
        lambda place: teller.tell(place, copies[place]),
    )
    return Drawn(svg, {label: known[label] for label in order})


_HINT = "Point at an operator, tap it, or go there by the arrow keys to read about it."


def _order(plan: Plan, boxes: Boxes, split: Sequence[str]) -> list[str]:
    """The labels: the batch alone first, whole last, and between them those that most is computed with first."""
    flops: dict[str, float] = {}
    for place in boxes.places:
        flops[split[place]] = flops.get(split[place], 0.0) + plan.graph.operators[place].flops
    return sorted(
        flops, key=lambda label: (label == WHOLE, not label.startswith("batch/") or " " in label, -flops[label], label)
    )


def _style(known: dict[str, tuple[str, str]]) -> str:
    """The colours, by their numbers."""
    light = "".join(f".c{number}{{--c:{pair[0]}}}" for number, pair in enumerate(known.values()))
    dark = "".join(f".c{number}{{--c:{pair[1]}}}" for number, pair in enumerate(known.values()))
    return f"{light}@media (prefers-color-scheme:dark){{{dark}}}"


def _legend(plan: Plan, boxes: Boxes, split: Sequence[str], prices: Prices | None) -> str:
    order = _order(plan, boxes, split)
    numbers = {label: number for number, label in enumerate(colours(order))}
    counts = Counter(split[place] for place in boxes.places)
    written: dict[str, Counter[str]] = {}
    for place in boxes.places:
        written.setdefault(split[place], Counter())[split_words(plan, place)] += 1
    items = []
    for label in order:
        ways = [way for way, _ in written[label].most_common(6) if way != label]
        note = f"{counts[label]} operator{'s' if counts[label] != 1 else ''}"
        note += f", written {', '.join(ways)}" if ways else ""
        items.append(
            f'<li><i class="swatch c{numbers[label]}"></i><b>{escape(label)}</b> <span>{escape(note)}</span></li>'
        )
    # Without prices it is not known what else is moved.
    strokes = (
        {"still": "read where it lies", "moved": "moved between devices"}
        if prices
        else {"moved": "sent to another stage"}
    )
    lines = "".join(f'<li><i class="stroke {kind}"></i>{words}</li>' for kind, words in strokes.items())
    return f'<ul class="key">{"".join(items)}</ul>' + (f'<ul class="key">{lines}</ul>' if boxes.moved else "")
