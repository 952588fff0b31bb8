"""Plans of several stages, against every cut of every pick."""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from weft.hardware.machine import Device, Level, Machine
from weft.plan.batches import microbatch
from weft.plan.candidate import Candidate, Shape, priced, solved
from weft.plan.capture import capture
from weft.plan.graph import PARAMETER, Dim, Graph, Operator, Read
from weft.plan.graph import Tensor as Laid
from weft.plan.layout import Mesh
from weft.plan.line import line
from weft.plan.proof import Proof
from weft.plan.refine import Refinement
from weft.plan.solve import OverLimit
from weft.plan.stretches import Stretches
from weft.plan.tables import Tables, Training, narrowed

DEVICE = Device({"float32": 1e13}, ((1e6, 0.1), (1e9, 0.8)), 1e12, 1e10, 0.0)
MACHINE = Machine("test", DEVICE, (Level("node", None, 1e10, 1e-6),))


def tied_chain(count: int) -> Graph:
    """Operators in a chain, each with a parameter; the last one reads the first one's."""
    laid = Laid((8,), 4, (0,))
    dims = (Dim.free("n", 8),)
    operators: list[Operator] = []
    for number in range(count):
        last = number == count - 1
        if not last:
            operators.append(Operator(f"p{number}", PARAMETER, "", dims, (), (laid,)))
        reads = [Read(0 if last else len(operators) - 1, 0, laid)]
        if number:
            reads.append(Read(len(operators) - (1 if last else 2), 0, laid))
        operators.append(Operator(f"x{number}", "elementwise", "add", dims, tuple(reads), (laid,), moved=1.0))
    return Graph("chain", tuple(operators))


def best_of_all(shape: Shape, found: Tables, limit: float, machine: Machine) -> float:
    """The step of the best cut of the best pick."""
    best = math.inf
    for pick in product(*(range(len(own)) for own in found.splits)):
        with suppress(OverLimit):
            best = min(best, priced(shape, machine, found, pick, limit).cost.step)
    return best


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(2, 3), st.integers(1, 6), st.sampled_from([1.0, 0.8, 0.6]), st.booleans())
def test_the_best_of_all_cuts_and_picks_is_found_and_proven(
    seed: int, stages: int, count: int, part: float, broken_off: bool
) -> None:
    rng = np.random.default_rng(seed)
    graph = tied_chain(4)
    sizes = [int(n) for n in rng.integers(1, 4, len(graph))]
    moves = {(read.source, place): None for place, o in enumerate(graph.operators) for read in o.reads}
    found = Tables(
        Mesh((2,)),
        tuple(tuple((k,) for k in range(size)) for size in sizes),
        tuple(rng.gamma(2.0, 1e-3, size) for size in sizes),
        {(i, j): rng.gamma(1.0, 1e-3, (sizes[i], sizes[j])) for i, j in moves},
        tuple(rng.gamma(2.0, 100.0, size) for size in sizes),
    )
    launch = float(rng.choice([0.0, 1e-3]))
    machine = Machine("test", Device({"float32": 1e13}, ((1e6, 1.0),), 1e12, 1e10, 0.0, launch), MACHINE.levels)
    shape = Shape(graph, Mesh((2,)), stages, Training(microbatches=count))
    light = tuple(int(memory.argmin()) for memory in found.memory)
    least = priced(shape, machine, found, light, math.inf).cost
    limit = least.memory / part if part < 1 else math.inf
    start = priced(shape, machine, found, light, limit, 0.0)
    refinement = Refinement(start, machine, limit, 0.0)
    for seconds in [1e-4] * 20 * broken_off:
        refinement.go_on(seconds)
    made = refinement.go_on(60.0)
    best = best_of_all(shape, found, limit, machine)
    assert made.cost.bound <= best * (1 + 1e-9)
    assert made.cost.memory <= limit
    if count > 1:  # else what is cut evenly may send more than it must
        assert made.cost.step == pytest.approx(best, rel=1e-9)
        assert made.cost.bound == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("width", [1, 3, 7, 16])
def test_stages_of_any_length_are_weighed_and_none_takes_less_than_is_proven(width: int) -> None:
    graph = tied_chain(20)
    rng = np.random.default_rng(0)
    found = Tables(
        Mesh((2,)),
        tuple(((0,), (1,)) for _ in graph.operators),
        tuple(rng.gamma(2.0, 1e-3, 2) for _ in graph.operators),
        {(read.source, at): rng.gamma(1.0, 1e-3, (2, 2)) for at, o in enumerate(graph.operators) for read in o.reads},
        tuple(np.ones(2) for _ in graph.operators),
    )
    stretches = Stretches(graph, line(graph), found, math.inf, 0.0, 1.0, Stretches.Kept())
    given = {"stages": 3, "microbatches": 8, "send": 0.0, "total": 0.0}
    proof = Proof(stretches, [0.0] * len(graph), **given)
    before, proof._width = proof.best(), width
    for first in range(len(proof.low) - 1):
        for last in range(first + 1, len(proof.low)):
            proof._weighed(1, first, last)
    start = priced(Shape(graph, Mesh((2,)), 3, Training(microbatches=8)), MACHINE, found, (0,) * len(graph), math.inf)
    assert before <= proof.best() <= Refinement(start, MACHINE, math.inf, 0.0).go_on(5.0).cost.step * (1 + 1e-9)


class Tied(nn.Module):
    """The head is the embedding, and something lies between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.middle = nn.Linear(32, 32, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.middle(self.embed(ids)), self.embed.weight)


@pytest.mark.parametrize("part", [1.0, 0.8, 0.6])
def test_a_model_with_a_tied_parameter_is_planned_best_over_its_stages(part: float) -> None:
    with torch.device("meta"):
        graph = microbatch(capture(Tied(), torch.zeros(8, 4, dtype=torch.long)).graph, 4)
    shape = Shape(graph, Mesh((2,)), 2, Training(microbatches=4))
    free = solved(shape, MACHINE, math.inf)
    limit = part * free.cost.memory if part < 1 else math.inf
    try:
        start = solved(shape, MACHINE, limit)
    except OverLimit:
        assert math.isinf(best_of_all(shape, free.tables, limit, MACHINE))
        return
    made = Refinement(start, MACHINE, limit, 0.0).go_on(60.0)
    assert made.cost.step == pytest.approx(best_of_all(shape, free.tables, limit, MACHINE))
    assert made.cost.bound == pytest.approx(made.cost.step)


def test_what_cannot_beat_another_is_left_soon() -> None:
    graph = microbatch(capture(Tied(), torch.zeros(8, 4, dtype=torch.long)).graph, 4)
    start: Candidate = solved(Shape(graph, Mesh((2,)), 2, Training(microbatches=4)), MACHINE, math.inf)
    left = Refinement(start, MACHINE, math.inf, 0.0).go_on(60.0, beat=start.cost.step / 1e6)
    assert left.pick == start.pick
    assert start.cost.step / 1e6 < left.cost.bound <= left.cost.step


def test_an_operator_is_narrowed_to_some_splits_in_every_table() -> None:
    graph = capture(Tied(), torch.zeros(8, 4, dtype=torch.long)).graph
    found = solved(Shape(graph, Mesh((2,)), 1, Training()), MACHINE, math.inf).tables
    place = max(range(len(graph)), key=lambda each: len(found.splits[each]))
    made = narrowed(found, place, [1, 2])
    assert made.splits[place] == found.splits[place][1:3]
    for k in (0, 1):
        pick, whole = ([at if each == place else 0 for each in range(len(graph))] for at in (k, k + 1))
        assert made.problem().cost(pick) == found.problem().cost(whole)
        assert made.weight(pick) == found.weight(whole)
