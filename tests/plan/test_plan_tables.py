"""Tables of a small network, against what each strategy costs by definition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product as every
from typing import Any

import numpy as np
import pytest
import torch
from plan_models import Model
from torch import Tensor, nn
from torch.nn import functional as F

from weft.hardware import collectives
from weft.hardware.machine import DeviceSpec, Link, Machine
from weft.plan.capture import CapturedModel, capture
from weft.plan.configurations import ParallelConfig, solve_config
from weft.plan.costs import Tables, TrainingSpec, tables
from weft.plan.graph import INPUT, Graph, batch_dims, microbatch
from weft.plan.redistribution import gathered_bytes
from weft.plan.sharding import REPLICATED, Mesh, splits
from weft.plan.solver import OverLimit

DEVICE = DeviceSpec({"float32": 1e13, "bfloat16": 1e14}, ((1e6, 0.1), (1e9, 0.8)), 1e12, 1e10, 0.0)
MACHINE = Machine("test", DEVICE, (Link("node", None, 1e10, 1e-6),))
BATCH, WIDTH = 32, 64


class Two(nn.Module):
    """Two products without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.second = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))


def two(batch: int = BATCH) -> CapturedModel:
    return capture(Two(), torch.zeros(batch, WIDTH))


def cost(graph: Graph, made: Tables, chosen: dict[str, str]) -> tuple[float, float]:
    """(computing, moving) when the named operators have the named dimensions split, and others nothing."""
    assignment = []
    for op, operator in enumerate(graph.operators):
        names = [dim.name for dim in operator.dims]
        word = chosen.get(operator.name, "-")
        assignment.append(made.splits[op].index((names.index(word) if word != "-" else REPLICATED,)))
    compute = math.fsum(float(costs[k]) for costs, k in zip(made.compute, assignment, strict=True))
    return compute, made.problem().cost(assignment) - compute


def weight_of(made: Tables, assignment: Sequence[int]) -> float:
    return math.fsum(float(memory[k]) for memory, k in zip(made.memory, assignment, strict=True))


def names(graph: Graph) -> dict[str, str]:
    """Parameters and operators by what they are here."""
    found = {"w1": "p_first_weight", "w2": "p_second_weight"}
    found |= dict(zip(("fc1", "relu", "fc2"), [o.name for o in graph.operators if o.reads], strict=True))
    return found


def test_strategies_cost_the_collectives_that_they_are_known_for() -> None:
    graph = two().graph
    made = tables(graph, Mesh((4,)), MACHINE)
    n = names(graph)
    link = MACHINE.axis_link((4,), 0)
    weights = 4.0 * 4 * WIDTH * WIDTH
    rows = {n["fc1"]: "m0", n["relu"]: "a0", n["fc2"]: "m0"}
    whole = cost(graph, made, {})[0]

    compute, moving = cost(graph, made, rows)
    # Data parallelism: one all-reduce for the gradient of each weight.
    assert moving == pytest.approx(2 * float(collectives.all_reduce(weights, 4, *link)))
    assert compute < whole

    # Stored in parts: gathered for the forward, and the gradient is scattered. The second weight is gathered again for
    # the backward, where the gradient of its input depends on it; the first one's input has none.
    stored = {**rows, n["w1"]: "a0", n["w2"]: "a0"}
    gather, scatter = (float(f(weights, 4, *link)) for f in (collectives.all_gather, collectives.reduce_scatter))
    assert cost(graph, made, stored)[1] == pytest.approx(3 * gather + 2 * scatter)
    # Each micro-batch gathers for itself, and gives its gradients back; what is stored whole sums them first.
    parted = tables(graph, Mesh((4,)), MACHINE, TrainingSpec(microbatches=2))
    assert cost(graph, parted, stored)[1] == pytest.approx(2 * (3 * gather + 2 * scatter))
    assert cost(graph, parted, rows)[1] == pytest.approx(moving)

    # Columns, then rows: nothing moves between the two. The input needs no gradient; the result stays a sum.
    parts = {n["fc1"]: "n", n["relu"]: "a1", n["fc2"]: "k", n["w1"]: "a0", n["w2"]: "a1"}
    assert cost(graph, made, parts)[1] == 0.0


def twice(between: nn.Module | None = None) -> Graph:
    """The head is the embedding."""
    parts = {"embed": nn.Embedding(WIDTH, WIDTH), "between": between or nn.Identity()}
    model = Model(lambda model, ids: F.linear(model.between(model.embed(ids)), model.embed.weight), **parts)
    return capture(model, torch.zeros(BATCH, 4, dtype=torch.long)).graph


def test_a_parameter_that_is_read_twice_sends_its_gradient_once_where_both_read_it_alike() -> None:
    graph = twice()
    link = MACHINE.axis_link((4,), 0)
    (weight,) = (operator.name for operator in graph.operators if operator.kind == "parameter")
    lookup, head = (operator.name for operator in graph.operators if operator.reads)
    once = float(collectives.all_reduce(4.0 * WIDTH * WIDTH, 4, *link))
    batch = [operator.dims[dim or 0].name for operator, dim in zip(graph.operators, batch_dims(graph), strict=True)]
    rows = {o.name: name for o, name in zip(graph.operators, batch, strict=True) if o.name in (lookup, head)}

    def moved(chosen: dict[str, str], stages: int) -> float:
        return cost(graph, tables(graph, Mesh((4,)), MACHINE, stages=stages), chosen)[1]

    assert moved(rows, 1) == pytest.approx(once)
    assert moved(rows, 2) == pytest.approx(2 * once)  # each stage for itself
    # Read otherwise, each pays for itself; and what is spared is never more than what a reader pays.
    other = {head: rows[head]}
    assert moved(other, 1) == pytest.approx(moved(other, 2))
    stored = {**rows, weight: "a0"}
    assert once <= moved(stored, 1) <= moved(stored, 2)


def test_what_is_spared_is_at_most_what_a_reader_pays() -> None:
    graph = twice()
    for mesh in (Mesh((4,)), Mesh((2, 2))):
        one, more = (tables(graph, mesh, MACHINE, stages=stages) for stages in (1, 2))
        for pick in every(*(range(len(own)) for own in one.splits)):
            less = more.problem().cost(pick) - one.problem().cost(pick)
            (source,) = (p for p, o in enumerate(graph.operators) if o.kind == "parameter")
            paid = min(float(table[pick[i], pick[j]]) for (i, j), table in more.moves.items() if i == source)
            assert -1e-15 <= less <= paid + 1e-15


def test_memory_is_weights_gradients_states_and_what_the_backward_keeps() -> None:
    graph = two().graph
    made = tables(graph, Mesh((4,)), MACHINE, TrainingSpec(optimizer_bytes=8.0))
    index = {operator.name: number for number, operator in enumerate(graph.operators)}
    n = names(graph)
    weight = made.memory[index[n["w1"]]]
    elements = 4 * WIDTH * WIDTH
    assert weight[made.splits[index[n["w1"]]].index((REPLICATED,))] == elements * 16
    assert weight[made.splits[index[n["w1"]]].index((0,))] == elements * 16 / 4
    kept = sum(operator.saved for operator in graph.operators)
    assert kept > 0
    whole = [own.index((REPLICATED,)) for own in made.splits]
    assert weight_of(made, whole) == pytest.approx(2 * elements * 16 + kept)


def in_parts(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Weights stored in parts on four devices, and the batch divided among them."""
    n = names(graph)
    words = {n["fc1"]: "m0", n["relu"]: "a0", n["fc2"]: "m0", n["w1"]: "a0", n["w2"]: "a0"}
    dims = [[dim.name for dim in operator.dims] for operator in graph.operators]
    return tuple(
        (own.index(words[o.name]) if o.name in words else REPLICATED,)
        for o, own in zip(graph.operators, dims, strict=True)
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_gathered_at_once_is_part_of_the_memory_that_a_limit_sees(recompute: bool) -> None:
    graph, mesh, weight = two().graph, Mesh((4,)), 4.0 * 4 * WIDTH * WIDTH
    training = TrainingSpec(optimizer_bytes=0.0, recompute=recompute)
    splits = in_parts(graph)
    found = gathered_bytes(graph, mesh, splits, recompute)
    index = {operator.name: number for number, operator in enumerate(graph.operators)}
    n = names(graph)
    # In the backward the second weight is there with its gradient; of the first, whose input needs none, the gradient.
    assert found[index[n["fc2"]]] == 2 * weight
    assert found[index[n["fc1"]]] == weight
    assert max(gathered_bytes(graph, mesh, [(REPLICATED,)] * len(graph), recompute)) == 0.0

    def only(op: int, split: tuple[int, ...]) -> bool:
        return split == splits[op]

    # The limit counts it: the shards alone would fit.
    config = ParallelConfig(graph, mesh, 1, training)
    shards = weight_of(tables(graph, mesh, MACHINE, training, only), [0] * len(graph))
    solved = solve_config(config, MACHINE, shards + 2 * weight, only)
    assert solved.cost.memory == pytest.approx(shards + 2 * weight)
    with pytest.raises(OverLimit):
        solve_config(config, MACHINE, shards + 1.9 * weight, only)


def test_the_gradients_of_several_readers_of_a_gathered_weight_are_summed_whole() -> None:
    graph = twice(nn.Tanh())
    weight = 4.0 * WIDTH * WIDTH
    stored = [((0,) if o.kind == "parameter" else (REPLICATED,)) for o in graph.operators]
    found = dict(zip([o.kind for o in graph.operators], gathered_bytes(graph, Mesh((4,)), stored, False), strict=True))
    # The head's is there until that of the embedding is added; the head reads the weight again in its backward.
    assert (found["matmul"], found["elementwise"], found["embedding"]) == (2 * weight, weight, 2 * weight)


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_a_plan_of_one_stage_keeps_a_limit_with_what_it_gathers(share: float) -> None:
    graph, mesh, training = two().graph, Mesh((4,)), TrainingSpec(optimizer_bytes=0.0)
    config = ParallelConfig(graph, mesh, 1, training)
    free = solve_config(config, MACHINE, math.inf)
    every_split = [list(splits(operator, mesh)) for operator in graph.operators]
    fits = [
        weight_of(made, [own.index(split) for own, split in zip(made.splits, chosen, strict=True)])
        + max(gathered_bytes(graph, mesh, chosen, recompute=False))
        for made in [tables(graph, mesh, MACHINE, training)]
        for chosen in every(*every_split)
    ]
    limit = min(fits) + share * max(0.0, free.cost.memory - min(fits))
    solved = solve_config(config, MACHINE, limit * (1 + 1e-9))
    assert solved.cost.memory <= limit * (1 + 1e-9)


def test_a_micro_batch_of_a_graph_is_the_graph_of_a_micro_batch() -> None:
    whole, part = two(BATCH).graph, two(BATCH // 4).graph
    made = microbatch(whole, 4)
    assert len(made) == len(part)
    for one, other in zip(made.operators, part.operators, strict=True):
        assert (one.dims, one.reads, one.outputs, one.flops) == (other.dims, other.reads, other.outputs, other.flops)


def test_the_batch_is_followed_through_merged_axes() -> None:
    model = Model(lambda model, x: model.linear(x.reshape(-1, 8)).reshape(x.shape).sum(1), linear=nn.Linear(8, 8))
    graph = capture(model, torch.zeros(6, 4, 8)).graph
    found = batch_dims(graph)
    for operator, dim in zip(graph.operators, found, strict=True):
        if operator.reads:
            assert dim is not None, operator.name
            assert operator.dims[dim].size % 6 == 0
    assert microbatch(graph, 3).operators[-1].outputs[0].shape == (2, 8)
    assert [o.outputs[0].shape for o in microbatch(graph, 2).operators if o.kind == INPUT] == [(3, 4, 8)]


def test_recomputing_keeps_less_and_computes_more() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        for layer in model.layers:
            x = x + layer(x)
        return x

    model = Model(run, layers=nn.ModuleList([Two() for _ in range(4)]))
    graph = capture(model, torch.zeros(BATCH, WIDTH)).graph
    kept, again = (
        tables(graph, Mesh((1,)), MACHINE, TrainingSpec(optimizer_bytes=0, recompute=r)) for r in (False, True)
    )
    one = [0] * len(graph)
    parameters = sum(2 * o.outputs[0].bytes for o in graph.operators if o.kind == "parameter")
    saved = sum(o.saved for o in graph.operators)
    assert weight_of(kept, one) == pytest.approx(parameters + saved)
    assert weight_of(again, one) - parameters < 0.55 * saved
    assert sum(map(np.sum, again.compute)) > sum(map(np.sum, kept.compute))
