"""The graph of a saved plan: a node an operator, a column a layer; layers that repeat are shown once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.serve.views.plan_layers import GraphNodes, LayerGroup, PlanOperator, PlanTensor, groups, nodes_of, shown_edges

WHOLE = "whole on each device"

COMMON = ("elementwise", "random", "copy", "along", "normalize", "constant")
"""Kinds that say less than the name of what is called."""

SMALL, SHORT, TALL = 4, 16, 40
"""A layer of fewer than ``SMALL`` nodes shares a column with its neighbours, up to ``SHORT`` nodes; one of more than
``TALL`` has several columns."""


def graph(operators: Sequence[PlanOperator], mesh: Sequence[int], devices: int, stages: int) -> dict[str, Any] | None:
    """Columns of nodes, edges, and the legend of the colours; None where there is no node."""
    nodes = nodes_of(operators)
    if not nodes.places:
        return None
    found = groups(operators, nodes)
    labels = [split_label(operator, mesh) for operator in operators]
    legend = _legend(operators, nodes, labels)
    folded, number = nodes.folded(), {label: at for at, label in enumerate(legend)}
    shown = {
        place: {
            "id": place,
            **_names(operators[place], group),
            "split": number[labels[place]],
            **node_details(operators, place, copies, folded, mesh, stages),
        }
        for group in found
        for place, copies in zip(group.places, zip(*group.copies, strict=True), strict=True)
    }
    edges, moved = shown_edges(nodes, found)
    return {
        "columns": [
            {
                "title": title,
                "times": own[0].times,
                "stage": stage_label(own[0].stage, devices, stages) if stages > 1 else None,
                "nodes": [shown[place] for place in places],
            }
            for title, own, places in columns(found)
        ],
        "edges": [[source, reader, (source, reader) in moved] for source, reader in edges],
        "splits": [{"label": label, "count": count} for label, count in legend.items()],
    }


def columns(found: Sequence[LayerGroup]) -> Iterator[tuple[str, list[LayerGroup], list[int]]]:
    """Columns with their titles: small neighbours share one, and a tall layer has several."""
    for column in _column_groups(found):
        places = [place for group in column for place in group.places]
        first, last = column[0].title, column[-1].title
        pieces = math.ceil(len(places) / TALL)
        for number in range(pieces):
            part = places[len(places) * number // pieces : len(places) * (number + 1) // pieces]
            yield first if first == last else f"{first} … {last}", column, part


def _column_groups(found: Sequence[LayerGroup]) -> Iterator[list[LayerGroup]]:
    """Groups that share a column."""
    now: list[LayerGroup] = []
    for group in found:
        is_small = all(not own.is_layer or len(own.places) < SMALL for own in (group, *now[-1:]))
        is_like = all(group.times == own.times == 1 and group.stage == own.stage for own in now[-1:])
        is_short = sum(len(own.places) for own in (group, *now)) <= SHORT
        if now and not (is_small and is_like and is_short):
            yield now
            now = []
        now.append(group)
    if now:
        yield now


def node_details(
    operators: Sequence[PlanOperator],
    place: int,
    copies: Sequence[int],
    folded: Mapping[int, Sequence[int]],
    mesh: Sequence[int],
    stages: int,
) -> dict[str, Any]:
    """The description of the operator at a place, which stands for those of all ``copies``, with the mean costs of it
    and of what is folded into it."""
    own = operators[place]
    parameters = {at: operators[at] for at in folded[place] if operators[at].kind == "parameter"}
    names = {at: one.target.removeprefix(f"{own.module}.") for at, one in parameters.items()}
    tensors: list[tuple[str, PlanTensor]] = [
        (f"reads {names.get(read.source, '')}".rstrip(), read) for read in own.reads
    ]
    tensors += [("gives", value) for value in own.gives]
    tensors += [(f"keeps {names[at]}", value) for at, one in parameters.items() for value in one.gives]
    costs = None
    if own.compute is not None:
        members = [operators[at] for copy in copies for at in (copy, *folded[copy])]
        sums = {
            "compute": math.fsum(one.compute or 0.0 for one in members),
            "communication": math.fsum(one.communication for one in members),
            "parameters": math.fsum(one.weights + one.states for one in members),
            "activations": math.fsum(one.activations for one in members),
        }
        costs = {name: value / len(copies) for name, value in sums.items()}
    return {
        "operator": own.name,
        "copies": len(copies),
        "module": own.module,
        "target": f"{own.target} ({own.kind})" + ("" if own.known else ", for which weft has no rule"),
        "space": ", ".join(f"{name} {size}" for name, size in own.dims),
        "words": split_words(own, mesh),
        "stage": own.stage + 1 if stages > 1 else None,
        "tensors": [[what, _shape(own.shape), _here(own)] for what, own in tensors],
        "costs": costs,
    }


def split_parts(operator: PlanOperator, mesh: Sequence[int]) -> dict[str, int]:
    """Into how many parts each dimension is split; the one that holds the samples comes first."""
    parts: dict[str, int] = {}
    for size, name in zip(mesh, operator.split, strict=True):
        if name != "-":
            parts[name] = parts.get(name, 1) * size
    order = [name for name, _ in operator.dims]
    return {name: parts[name] for name in sorted(parts, key=lambda name: (name != operator.batch, order.index(name)))}


def split_label(operator: PlanOperator, mesh: Sequence[int]) -> str:
    """Such as ``batch/4 n/2``. The dimension that holds the samples has many names (m, b0, a0): all are the batch here,
    so that data parallelism is one thing throughout."""
    parts = split_parts(operator, mesh)
    return " ".join(f"{'batch' if n == operator.batch else n}/{count}" for n, count in parts.items()) or WHOLE


def split_words(operator: PlanOperator, mesh: Sequence[int]) -> str:
    """Such as ``the batch (m) in 4 parts, n in 2 parts``."""
    parts = split_parts(operator, mesh).items()
    return ", ".join(f"{f'the batch ({n})' if n == operator.batch else n} in {c} parts" for n, c in parts) or WHOLE


def stage_label(stage: int, devices: int, stages: int) -> str:
    """The devices of a stage, such as ``stage 2: devices 4 to 7``."""
    share = max(devices // stages, 1)
    first = stage * share
    names = f"device {first}" if share == 1 else f"devices {first} to {first + share - 1}"
    return f"stage {stage + 1}: {names}" if stages > 1 else names


def stage_memory(
    operators: Sequence[PlanOperator], devices: int, stages: int, microbatches: int
) -> dict[str, dict[str, float]]:
    """Bytes of the devices of each stage by what they are for; empty where the costs were not known."""
    if not operators or any(operator.compute is None for operator in operators):
        return {}
    found = {}
    for stage in range(stages):
        own = [operator for operator in operators if operator.stage == stage]
        found[stage_label(stage, devices, stages)] = {
            "weights": math.fsum(operator.weights for operator in own),
            "gradients and states": math.fsum(operator.states for operator in own),
            "gathered at once": max((operator.gathered for operator in own), default=0.0),
            "activations": min(microbatches, stages - stage) * math.fsum(operator.activations for operator in own),
        }
    return found


def _names(operator: PlanOperator, group: LayerGroup) -> dict[str, str]:
    """The two lines of a node."""
    name = operator.module.removeprefix(group.modules[0]).removeprefix(".") if group.is_layer else operator.module
    parts = operator.target.split(".")
    return {
        "name": name or operator.name,
        "kind": parts[min(1, len(parts) - 1)] if operator.kind in COMMON else operator.kind,
    }


def _legend(operators: Sequence[PlanOperator], nodes: GraphNodes, labels: Sequence[str]) -> dict[str, int]:
    """How many nodes each label has: the batch alone first, whole last, and the others by their FLOPs."""
    flops: dict[str, list[float]] = {}
    for place in nodes.places:
        flops.setdefault(labels[place], []).append(operators[place].flops)
    order = sorted(flops, key=lambda own: (own == WHOLE, own[:6] != "batch/" or " " in own, -sum(flops[own]), own))
    return {label: len(flops[label]) for label in order}


def _shape(shape: Sequence[int]) -> str:
    return re.sub(r"[^\dx]", "", "x".join(map(str, shape))) or "scalar"


def _here(value: PlanTensor) -> str:
    return (_shape(value.local) if value.local != value.shape else "") + (", partial sums" if value.partial else "")
