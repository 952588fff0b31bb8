"""A plan as a file holds it, checked part by part, since any file may lie among the plans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from weft.errors import PlanError
from weft.plan.page.parts import picked
from weft.plan.plan import Cost
from weft.plan.saved import read_plan
from weft.serve.plan.drawings import is_drawing

LARGEST = 32 << 20
"""Bytes of a file that may be a plan."""

DRAWING = 400_000
"""Characters of a graph that is shown."""

NOT_DRAWN = "it was saved without its graph: save it with `weft plan ... --save`"
EDITED = "its splits were edited: price it anew with `weft plan ... --load` and save it again"
TOO_LARGE = "its graph is too large to be shown here: see `weft plan ... --html`"
STRANGE = "its graph is not one that weft draws"

Word = Annotated[str, Meta(max_length=1000)]
Count = Annotated[int, Meta(ge=1, le=2**31)]


class Row(Struct):
    name: Word
    mesh: Word = ""
    why: Word = ""
    step: float | None = None
    memory: float | None = None


class Saved(Struct):
    model: Word
    machine: Word
    devices: Count
    mesh: Annotated[list[Count], Meta(min_length=1, max_length=16)]
    stages: Count
    microbatches: Count
    recompute: bool
    cost: Cost
    limit: float | None = None
    untried: int = 0
    compared: Annotated[list[Row], Meta(max_length=100)] = []


class Strategy(Struct):
    label: Word
    colour: tuple[Annotated[str, Meta(pattern="^#[0-9a-f]{6}$")], Annotated[str, Meta(pattern="^#[0-9a-f]{6}$")]]


class Memory(Struct):
    device: Word
    parts: dict[Word, float]


class Layer(Struct):
    name: Word
    compute: float
    communication: float


class Page(Struct):
    picked: str
    svg: str | None = None
    strategies: Annotated[list[Strategy], Meta(max_length=500)] = []
    memory: Annotated[list[Memory], Meta(max_length=4096)] = []
    layers: Annotated[list[Layer], Meta(max_length=1000)] = []


def read(path: Path) -> tuple[Saved, dict[str, Any]]:
    """What a file says of a plan, and all that it says; PlanError where it is none."""
    try:
        inside = path.is_file() and path.resolve().parent == path.parent.resolve()
        if not inside or path.stat().st_size > LARGEST:
            raise PlanError(f"'{path.name}' is no plan: it is no file of its own, or larger than any plan")
    except (OSError, RuntimeError) as problem:
        raise PlanError(f"'{path.name}' cannot be read: {problem}") from problem
    raw = read_plan(path)
    try:
        return msgspec.convert(raw, Saved), raw
    except (msgspec.ValidationError, RecursionError) as problem:
        raise PlanError(f"'{path.name}' is no plan that weft saved: {problem}") from problem


def page_of(raw: dict[str, Any]) -> tuple[Page | None, str | None]:
    """The parts of the page that were saved with a plan, and what is to be said where there are none."""
    try:
        page = msgspec.convert(raw.get("page"), Page)
    except (msgspec.ValidationError, RecursionError):
        return None, NOT_DRAWN if raw.get("page") is None else STRANGE
    if page.picked != picked(raw):
        return None, EDITED
    if page.svg is None:
        return page, "there is no operator to draw"
    if len(page.svg) > DRAWING:
        return page, TOO_LARGE
    return page, None if is_drawing(page.svg) else STRANGE
