"""PaSE's cost tables for its networks: a vector for each vertex, a matrix for each two vertices that a tensor joins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pase.configurations import Configs, configurations
from pase.corrections import AS_PUBLISHED, CORRECTED, Corrections
from pase.cost import Costs, vertex_costs, words_missing
from pase.images import alexnet, inception3
from pase.network import Edge, Network, Operand, Vertex
from pase.sequences import rnnlm, transformer
from weft.errors import PlanError, nearest

NETWORKS: dict[str, tuple[Callable[[int], Network], int]] = {
    "alexnet": (alexnet, 128),
    "inception3": (inception3, 128),
    "rnnlm": (rnnlm, 64),
    "transformer": (transformer, 64),
    "transformer-large": (lambda batch: transformer(batch, large=True), 64),
}
"""What builds each network, and the batch of the paper."""

Array = TypeVar("Array", bound=NDArray[np.generic])


@dataclass(frozen=True, slots=True)
class Configured:
    """What the tables are of: row k of ``configs[i]`` is configuration k of vertex i."""

    network: Network
    p: int
    configs: tuple[Configs, ...]

    def serial(self) -> tuple[int, ...]:
        """The pick that splits nothing."""
        return (0,) * len(self.configs)

    def data_parallel(self) -> tuple[int, ...]:
        """The pick that splits the batch alone, as often as each vertex may."""
        return tuple(
            int(np.argmax(np.where(rows.prod(axis=1) == rows[:, vertex.batch], rows[:, vertex.batch], 0)))
            for vertex, rows in zip(self.network.vertices, self.configs, strict=True)
        )


def network(name: str, batch: int | None = None) -> Network:
    """One of PaSE's networks, for the paper's batch unless told otherwise."""
    if name not in NETWORKS:
        raise PlanError(f"unknown network '{name}'{nearest(name, NETWORKS)}")
    build, usual = NETWORKS[name]
    if batch is not None and batch < 1:
        raise PlanError(f"a batch has at least 1 example, not {batch}")
    return build(usual if batch is None else batch)


def tables(
    graph: str | Network,
    p: int,
    batch: int | None = None,
    *,
    corrected: bool | Corrections = False,
    flops: float = 10e12,
    bandwidth: float = 16e9,
    cutoff: int | None = None,
) -> tuple[list[Costs], dict[tuple[int, int], Costs], Configured]:
    """(cost of each vertex by its configuration, cost of each edge by those of its ends, what they are of), in FLOP.

    ``flops`` a second and ``bandwidth`` in bytes a second weigh computing against sending: nothing else is known of the
    machine. Equal layers share their tables, which are read-only. ``cutoff`` replaces the network's own.
    """
    if p < 1:
        raise PlanError(f"a plan is for at least 1 device, not {p}")
    net = graph if isinstance(graph, Network) else network(graph, batch)
    fix = corrected if isinstance(corrected, Corrections) else CORRECTED if corrected else AS_PUBLISHED
    word = flops / bandwidth * (4 if fix.units else 8)
    configs: dict[Vertex, Configs] = {}
    costs: dict[Vertex, Costs] = {}
    for vertex in net.vertices:
        if vertex not in configs:
            configs[vertex] = _fixed(configurations(vertex, p, cutoff or net.cutoff))
            costs[vertex] = _fixed(vertex_costs(vertex, configs[vertex], word, fix))
    made: dict[tuple[object, ...], Costs] = {}
    pairs: dict[tuple[int, int], Costs] = {}
    for pair, edges in net.pairs(parallel=fix.edges).items():
        source, target = (net.vertices[place] for place in pair)
        key = source, target, tuple((edge.output, edge.input) for edge in edges)
        if key not in made:
            rows, columns = (configs[vertex].astype(np.float64) for vertex in (source, target))
            words = [_words(edge, source, target, rows, columns, fix) for edge in edges]
            made[key] = _fixed(word * np.sum(words, axis=0))
        pairs[pair] = made[key]
    of = Configured(net, p, tuple(configs[vertex] for vertex in net.vertices))
    return [costs[vertex] for vertex in net.vertices], pairs, of


def _words(edge: Edge, source: Vertex, target: Vertex, rows: Costs, columns: Costs, fix: Corrections) -> Costs:
    """Words that a device receives, forward and backward, for each two configurations."""
    made, read = source.outputs[edge.output], target.inputs[edge.input]
    held, wanted = _splits(made, rows), _splits(read, columns)
    # What counts is the devices that an operator uses, some of which may hold copies; as published, the tensor's parts.
    holders, wanters = (rows, columns) if fix.slices else (held, wanted)
    # Many configurations differ only in dimensions that the tensor lacks.
    held, row = np.unique(np.column_stack([held, holders.prod(axis=1)]), axis=0, return_inverse=True)
    wanted, column = np.unique(np.column_stack([wanted, wanters.prod(axis=1)]), axis=0, return_inverse=True)
    shape = np.array(made.shape, dtype=np.float64)
    source_side = (shape / held[:, :-1])[:, None], held[:, None, -1]
    target_side = (shape / wanted[:, :-1])[None], wanted[None, :, -1]
    words = _missing(source_side, target_side)
    words += _missing(target_side, source_side) if fix.slices else words
    return words[np.ix_(row.ravel(), column.ravel())]


def _missing(holding: tuple[Costs, Costs], wanting: tuple[Costs, Costs]) -> Costs:
    return words_missing(holding[0], wanting[0], holding[1], wanting[1])


def _splits(operand: Operand, configs: Costs) -> Costs:
    return np.stack([configs[:, list(dims)].prod(axis=1) for dims in operand.dims], axis=1)


def _fixed(array: Array) -> Array:
    array.flags.writeable = False
    return array
