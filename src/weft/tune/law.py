"""The law of a study: what its results depend on beside its definition, as a resumed one must keep it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from weft.data import Data
from weft.errors import TuneError
from weft.runs.files import plain
from weft.space import Space
from weft.tune.attempt import Terms
from weft.tune.devices import nominal
from weft.tune.job import Device
from weft.tune.recipe import Recipe
from weft.tune.task import Way
from weft.units import size

WITHOUT = ("objectives", "checkpoint", "cuda_graphs")
"""Fields of a recipe that change no result, or are told by another name."""
MISSING = object()


def law_of(terms: Terms, way: Way, devices: Sequence[Device], threads: int, space: Space) -> dict[str, Any]:
    """As plain values, for the manifest. What the space chooses in every trial is no part of it, nor are threads where
    there is no CPU."""
    recipe = terms.objective if isinstance(terms.objective, Recipe) else None
    called = recipe.model if recipe is not None else terms.objective
    law = {
        "objective": f"{getattr(called, '__module__', '')}:{getattr(called, '__qualname__', type(called).__name__)}",
        "names": list(terms.objectives),
        "fuse": way.fuse,
        "memory": nominal(way.memory, devices) if recipe is not None else None,
    }
    if any(device.name == "cpu" for device in devices):
        law["threads"] = threads
    if recipe is not None:
        law["recipe"] = dict(_fields(recipe, {name for name in space.choices if name not in space.conditions}))
    return law


def agree(study: str, before: object, law: Mapping[str, Any]) -> None:
    """TuneError, with the first thing that differs, where a study was begun under another law. What an older weft did
    not write down counts as equal."""
    if not isinstance(before, Mapping):
        return
    for key, old, new in _differences(before, law):
        shown = [size(v) if key == "memory" and isinstance(v, int) else repr(v) for v in (old, new)]
        remedy = f"give memory={old!r}, or " if key == "memory" and old is not None else ""
        raise TuneError(
            f"study '{study}' cannot be resumed with another {key}: it was {shown[0]}, and is now {shown[1]}; "
            f"{remedy}use another name"
        )


def _differences(before: Mapping[str, Any], law: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key, new in law.items():
        old = before.get(key, MISSING)
        if key == "recipe" and isinstance(old, Mapping):
            yield from ((f"recipe.{name}", was, now) for name, was, now in _differences(old, new))
        elif old is not MISSING and old != new:
            yield key, old, new


def _fields(recipe: Recipe, chosen: set[str]) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if field.name == "options":
            yield field.name, {name: named(item) for name, item in value.items() if name not in chosen}
        elif field.name not in WITHOUT and field.name not in chosen:
            yield field.name, named(value)


def named(value: Any) -> Any:
    """A plain value as it is, and code or data by its name, with what it was made with as far as that can be told.

    >>> named(partial(sorted, reverse=True)), named(("a", 1))
    ('builtins:sorted(reverse=True)', ['a', 1])
    """
    if isinstance(value, Mapping):
        return {str(name): named(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [named(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return plain(value)
    if isinstance(value, msgspec.Struct):
        return named(msgspec.to_builtins(value))
    if isinstance(value, partial):
        return f"{named(value.func)}({_given(value.args, value.keywords)})"
    if isinstance(value, Data):
        parts = [len(part) for part in (value.train, value.validation) if part is not None]
        return f"{value.name} of {' + '.join(map(str, parts))} samples"
    kind = type(value)
    name = f"{getattr(value, '__module__', kind.__module__)}:{getattr(value, '__qualname__', kind.__qualname__)}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.repr}
        return f"{name}({_given((), given)})"
    return name


def _given(args: Sequence[Any], named_ones: Mapping[str, Any]) -> str:
    return ", ".join([*(str(named(one)) for one in args), *(f"{n}={named(one)}" for n, one in named_ones.items())])
