"""A saved plan read again, perhaps edited by hand: its form, and its splits for a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from weft.errors import PlanError
from weft.plan.graph import Graph
from weft.plan.layout import REPLICATED, Mesh, Split, splits
from weft.utils.files import read_json

FORMAT = 1


def read_plan(path: Path | str) -> dict[str, Any]:
    """What `Plan.save` wrote, checked for its form; bound to a model by ``weft.plan(..., load=path)``."""
    return checked(read_json(Path(path)), f"'{path}'")


def checked(found: Any, where: str = "what is given") -> dict[str, Any]:
    """A saved plan, perhaps edited, as it is; raises PlanError where it has not the form of one."""
    wanted = set(_Saved.__struct_fields__)
    if not isinstance(found, Mapping) or not wanted <= set(found):
        missing = sorted(wanted - set(found)) if isinstance(found, Mapping) else sorted(wanted)
        raise PlanError(f"{where} is no plan: it lacks {', '.join(missing)}")
    if found["format"] != FORMAT:
        raise PlanError(f"{where} has format {found['format']!r}, and format {FORMAT} is read here: plan again")
    try:
        told = msgspec.convert(dict(found), _Saved)
    except msgspec.ValidationError as error:
        raise PlanError(f"{where} is no plan: {error}") from error
    if told.devices % math.prod(told.mesh):
        raise PlanError(f"{where} is no plan: {told.devices} devices are not stages of the mesh {told.mesh}")
    return dict(found)


def read_splits(graph: Graph, mesh: Mesh, given: Mapping[str, Any]) -> tuple[Split, ...]:
    """Splits from the names of dimensions; raises PlanError for an operator or a split that cannot be."""
    places = {operator.name: place for place, operator in enumerate(graph.operators)}
    if unknown := [name for name in given if name not in places]:
        raise PlanError(
            f"the plan splits '{unknown[0]}', which the model has not: it is of another model, batch or torch"
        )
    found = []
    for operator in graph.operators:
        if operator.name not in given:
            raise PlanError(f"the plan says nothing of '{operator.name}'")
        names = [dim.name for dim in operator.dims]
        words = list(given[operator.name])
        if len(words) != len(mesh.sizes):
            raise PlanError(
                f"'{operator.name}' is split as {words}: the mesh {mesh} takes {len(mesh.sizes)}, one for each axis"
            )
        if wrong := [word for word in words if word != "-" and word not in names]:
            raise PlanError(f"'{operator.name}' has no dimension '{wrong[0]}': it has {', '.join(names) or 'none'}")
        split = tuple(REPLICATED if word == "-" else names.index(word) for word in words)
        if split not in set(splits(operator, mesh)):
            raise PlanError(f"'{operator.name}' cannot be split as {words} on the mesh {mesh}: the parts are not equal")
        found.append(split)
    return tuple(found)


_Count = Annotated[int, msgspec.Meta(ge=1)]


class _Saved(msgspec.Struct):
    """What of a saved plan is read again."""

    format: int
    machine: str
    devices: _Count
    mesh: list[_Count]
    microbatches: _Count
    recompute: bool
    splits: dict[str, list[str]]
    stage: dict[str, int]
