"""Capture of a model: the graph that the planner sees, and the program that can be run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from weft.plan.capture.build import build
from weft.plan.capture.export import Batch, Loss, NamedBatch, export_program
from weft.plan.graph import Graph


@dataclass(frozen=True, slots=True)
class CapturedModel:
    """A graph and its program. Operators have the names of the program's nodes, and their reads are in the order in
    which a node's arguments name tensors.

    ``op_index``: node -> operator. ``values``: node that holds a tensor -> (operator, which of its outputs); a
    ``getitem`` is here only. ``parameters``, ``buffers``: placeholder -> name in the model; ``tied``: placeholder that
    is not used -> the one that is, for a parameter with two names; ``inputs``: placeholder -> position or key in the
    batch; ``constants``: placeholder -> tensor. ``results``: nodes that the model returns; ``mutated``: node -> the
    buffer whose next value it is. ``model``, ``batch`` and ``loss`` are what was captured. The program names the device
    it was captured on in operators that make tensors."""

    graph: Graph
    program: torch.export.ExportedProgram
    method: str
    op_index: Mapping[str, int]
    values: Mapping[str, tuple[int, int]]
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    constants: Mapping[str, Tensor]
    inputs: Mapping[str, int | str]
    results: tuple[str, ...]
    mutated: Mapping[str, str]
    tied: Mapping[str, str]
    seconds: float
    model: nn.Module = field(repr=False)
    batch: Batch = field(repr=False)
    loss: Loss | None = field(repr=False)


def capture(model: nn.Module, batch: Batch, *, loss: Loss | None = None, name: str | None = None) -> CapturedModel:
    """The graph of a model's forward for this batch, in the mode (training or evaluation) that it is in.

    ``batch`` is a tensor, a tuple of positional arguments or a mapping of keyword arguments; ``loss(output, batch)``
    makes the loss part of the graph. Nothing is computed: parameters may be on the meta device. Where ``torch.export``
    fails, another method is tried, as ``graph.notes`` then say; where that fails too, PlanError gives the reason."""
    start = time.perf_counter()
    named = NamedBatch.of(batch, model)
    found = export_program(model, named, loss)
    graph, values, tied = build(name or type(model).__name__, model, found)
    op_index = {entry.name: op for op, entry in enumerate(graph.operators)}
    return CapturedModel(
        graph,
        found.program,
        found.method,
        op_index,
        values,
        found.parameters,
        found.buffers,
        found.constants,
        found.inputs,
        found.results,
        found.mutated,
        tied,
        time.perf_counter() - start,
        model,
        batch,
        loss,
    )
