"""Capture of a model: the graph that the planner sees, and the program that can be run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from torch import nn

from weft.plan.capture.build import build
from weft.plan.capture.export import Batch, ExportResult, Loss, NamedBatch, export_program
from weft.plan.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedModel(ExportResult):
    """A graph and its program. Operators have the names of the program's nodes, and their reads are in the order in
    which a node's arguments name tensors.

    ``op_index``: node -> operator. ``values``: node that holds a tensor -> (operator, which of its outputs); a
    ``getitem`` is here only. ``tied``: placeholder that is not used -> the one that is, for a parameter with two names.
    ``model``, ``batch`` and ``loss`` are what was captured. The program names the device it was captured on in
    operators that make tensors."""

    graph: Graph
    op_index: Mapping[str, int]
    values: Mapping[str, tuple[int, int]]
    tied: Mapping[str, str]
    model: nn.Module = field(repr=False)
    batch: Batch = field(repr=False)
    loss: Loss | None = field(repr=False)


def capture(model: nn.Module, batch: Batch, *, loss: Loss | None = None, name: str | None = None) -> CapturedModel:
    """The graph of a model's forward for this batch, in the mode (training or evaluation) that it is in.

    ``batch`` is a tensor, a tuple of positional arguments or a mapping of keyword arguments; ``loss(output, batch)``
    makes the loss part of the graph. Nothing is computed: parameters may be on the meta device. Where ``torch.export``
    fails, another method is tried, as ``graph.notes`` then say; where that fails too, PlanError gives the reason."""
    found = export_program(model, NamedBatch.of(batch, model), loss)
    graph, values, tied = build(name or type(model).__name__, model, found)
    return CapturedModel(
        **{each.name: getattr(found, each.name) for each in fields(found)},
        graph=graph,
        op_index={entry.name: op for op, entry in enumerate(graph.operators)},
        values=values,
        tied=tied,
        model=model,
        batch=batch,
        loss=loss,
    )
