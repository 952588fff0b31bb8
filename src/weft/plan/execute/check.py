"""Whether a strategy can be run: every reason why not, before anything runs."""

from __future__ import annotations

from typing import Any

import torch

from weft.errors import PlanError
from weft.plan.capture import Captured
from weft.plan.execute.local import local
from weft.plan.execute.reading import Reading
from weft.plan.execute.site import Local, Operand, Site, Unfit, operands
from weft.plan.execute.wire import Dry
from weft.plan.graph import Operator
from weft.plan.layout import Mesh, Split, local_shape
from weft.plan.strategy import Strategy


def executable(captured: Captured, strategy: Strategy) -> list[str]:
    """Why the strategy cannot be run, an entry for each operator that cannot; empty if it can."""
    graph, mesh = captured.graph, strategy.mesh
    if any(size < 1 for size in mesh.sizes):
        return [f"a mesh of {mesh} has an axis without devices"]
    if len(strategy.splits) != len(graph):
        return [f"the strategy has {len(strategy.splits)} splits for the {len(graph)} operators of '{graph.name}'"]
    found = [
        f"operator '{each.name}' ({each.target}): {reason}"
        for each, split in zip(graph.operators, strategy.splits, strict=True)
        if (reason := misfit(each, split, mesh))
    ]
    if found:
        return found
    try:
        reading = Reading(captured)
        seen: dict[str, str | None] = {}
        for place, node in reading.calls():
            site = reading.site(place, node, strategy.splits[place], mesh)
            if reason := _unfit(site, seen):
                found.append(f"operator '{site.operator.name}' ({site.operator.target}): {reason}")
    except PlanError as problem:
        found.append(str(problem))
    return found


def misfit(operator: Operator, split: Split, mesh: Mesh) -> str | None:
    """Why a split is none of this operator on this mesh."""
    if len(split) != len(mesh.sizes):
        return f"the split {split} has {len(split)} entries for the {len(mesh.sizes)} axes of the mesh {mesh}"
    for place in set(split):
        if place < 0:
            continue
        if place >= len(operator.dims):
            return f"the split {split} names dimension {place} of {len(operator.dims)}"
        parts = 1
        for size, each in zip(mesh.sizes, split, strict=True):
            parts *= size if each == place else 1
        dim = operator.dims[place]
        if dim.parts % parts:
            return f"'{dim.name}' cannot be split into {parts} equal parts, whose number must divide {dim.parts}"
        for tensor in (*(read.tensor for read in operator.reads), *operator.outputs):
            for size, has in zip(tensor.shape, tensor.dims, strict=True):
                if has == place and size % parts:
                    return f"an axis of {size} cannot be cut into {parts} equal parts along '{dim.name}'"
    return None


def _unfit(site: Site, seen: dict[str, str | None]) -> str | None:
    try:
        made = local(site)
    except Unfit as problem:
        return str(problem)
    if not site.is_cut:
        return None
    key = _told(site, made)
    if key not in seen:
        seen[key] = _wrong_shape(site, made)
    return seen[key]


def _wrong_shape(site: Site, made: Local) -> str | None:
    """Computes the part without data: it must come out as the part of the result that it should be."""

    def hollow(operand: Operand) -> torch.Tensor:
        shape = local_shape(operand.tensor.shape, site.wanted(operand), site.mesh)
        return torch.empty(shape, dtype=operand.dtype, device="meta")

    try:
        with torch.no_grad():
            got = made.run(Dry(site.mesh.sizes), fill(made.args, hollow), fill(made.kwargs, hollow))
    except Exception as problem:
        return f"its kernel does not take parts ({str(problem).splitlines()[0] if str(problem) else problem!r})"
    for output, result in enumerate(got if isinstance(got, (tuple, list)) else (got,)):
        if isinstance(result, torch.Tensor) and output in site.used and tuple(result.shape) != site.shape(output):
            return f"its part has the shape {tuple(result.shape)}, not {site.shape(output)}"
    return None


def _told(site: Site, made: Local) -> str:
    """All that the shapes of a part depend on, so that equal layers are looked at once."""
    shapes = [
        (local_shape(each.tensor.shape, site.wanted(each), site.mesh), str(each.dtype))
        for each in operands([made.args, made.kwargs])
    ]
    results = [site.shape(output) for output in sorted(site.used)]
    plain = fill([made.args, made.kwargs], lambda operand: None)
    return repr((str(site.target), shapes, results, plain, site.split))


def fill(value: Any, give: Any) -> Any:
    """A copy of arguments in which every operand is replaced by what ``give`` has for it."""
    if isinstance(value, Operand):
        return give(value)
    if isinstance(value, list):
        return [fill(each, give) for each in value]
    if isinstance(value, tuple):
        return tuple(fill(each, give) for each in value)
    if isinstance(value, dict):
        return {name: fill(each, give) for name, each in value.items()}
    return value
