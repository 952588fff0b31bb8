"""Stacked bars, as HTML that fits its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar: what it is (the name of its colour, too), how long, and that in words."""

    name: str
    value: float
    words: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar with a label before and a note after it."""

    label: str
    parts: Sequence[Part]
    note: str


def bars(rows: Sequence[Bar], full: float, mark: float | None = None) -> str:
    """Bars one below the other; ``full`` fills the width, and at ``mark`` there is a line."""
    return '<div class="bars">' + "".join(_bar(row, full, mark) for row in rows) + "</div>"


def _bar(row: Bar, full: float, mark: float | None) -> str:
    told = f"{row.label}: " + ", ".join(f"{part.name} {part.words}" for part in row.parts) + f"; {row.note}"
    parts = "".join(
        f'<i class="k-{part.name.split()[0]}" style="width:{_percent(part.value, full)}" '
        f'title="{escape(f"{part.name}: {part.words}")}"></i>'
        for part in row.parts
        if part.value > 0
    )
    line = f'<b class="mark" style="left:{_percent(mark, full)}"></b>' if mark is not None else ""
    return (
        f'<div class="label">{escape(row.label)}</div>'
        f'<div class="bar" role="img" aria-label="{escape(told)}">{parts}{line}</div>'
        f'<div class="note">{escape(row.note)}</div>'
    )


def key(names: Sequence[str]) -> str:
    """What the colours of bars mean."""
    items = "".join(f'<li><i class="swatch k-{name.split()[0]}"></i>{escape(name)}</li>' for name in names)
    return f'<ul class="key">{items}</ul>'


def _percent(value: float, full: float) -> str:
    return f"{100 * min(value / full, 1.0) if full > 0 else 0:.3f}%"
