"""What each stage of a plan computes, in which order, and which part of a batch it takes; nothing runs here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from weft.errors import PlanError
from weft.plan.capture import capture
from weft.plan.graph import INPUT, PARAMETER, Dim, Graph, Operator, Read
from weft.plan.graph import Tensor as Shape
from weft.plan.planner import plan_captured
from weft.plan.runtime.apply import transfer_splits
from weft.plan.runtime.module import StageOp, one_forward_one_backward
from weft.plan.runtime.program import ValueRef, split_batch
from weft.plan.runtime.stages import StageEdge, StageSection, stage_sections
from weft.plan.sharding import Mesh


def test_a_plan_that_cannot_be_run_says_why() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plan = plan_captured(capture(model, torch.randn(8, 8)), "cpu", devices=2, stages=2, microbatches=2, compare=False)
    assert plan.unsupported()[0].startswith("'Sequential' returns no loss, which micro-batches and stages need")
    with pytest.raises(PlanError, match="'Sequential' returns no loss"):
        plan.apply(model)


def test_a_batch_is_cut_where_it_has_rows_and_given_whole_elsewhere() -> None:
    rows, table = torch.arange(6).view(6, 1), torch.arange(4)
    parts = split_batch({"rows": rows, "table": table, "flag": True}, 6, 3)
    assert [part["rows"].flatten().tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]  # type: ignore[index, call-overload]
    assert all(part["table"] is table and part["flag"] is True for part in parts)  # type: ignore[index, call-overload]
    assert [part.flatten().tolist() for part in split_batch(rows, 6, 2)] == [[0, 1, 2], [3, 4, 5]]  # type: ignore[union-attr]
    assert [len(part) for part in split_batch((rows, None), 6, 2)] == [2, 2]


@given(st.integers(1, 6), st.integers(1, 9))
def test_a_schedule_never_stops_holds_no_more_than_it_may_and_is_as_short_as_can_be(stages: int, count: int) -> None:
    orders = [list(one_forward_one_backward(stage, stages, count)) for stage in range(stages)]
    for stage, ops in enumerate(orders):
        assert sorted(ops) == sorted(StageOp(stage, kind, number) for kind in "FB" for number in range(count))  # type: ignore[arg-type]
        flying = most = 0
        for op in ops:
            flying += 1 if op.kind == "F" else -1
            most = max(most, flying)
        assert most == min(count, stages - stage)
    done: set[StageOp] = set()
    ticks = 0
    while any(orders):
        ready = [ops[0] for ops in orders if ops and _needs(ops[0], stages) <= done]
        assert ready
        for op in ready:
            orders[op.stage].pop(0)
        done.update(ready)
        ticks += 1
    assert ticks == 2 * (count + stages - 1)


def _needs(op: StageOp, stages: int) -> set[StageOp]:
    if op.kind == "F":
        return {StageOp(op.stage - 1, "F", op.microbatch)} if op.stage else set()
    own = StageOp(op.stage, "F", op.microbatch)
    return {own, StageOp(op.stage + 1, "B", op.microbatch)} if op.stage + 1 < stages else {own}


def node(name: str, *sources: int, gradient: bool = True, kind: str = "x") -> Operator:
    reads = tuple(Read(source, 0, Shape((2,), 4, (0,))) for source in sources)
    return Operator(name, kind, name, (Dim.free("n", 2),), reads, (Shape((2,), 4, (0,), gradient),))


def drawn() -> tuple[Graph, tuple[int | None, ...]]:
    """A weight that the first and the last of three stages read, a mask that all read, a value that skips a stage, and
    a sign of what has a gradient, which two stages read."""
    operators = (
        node("weight", kind=PARAMETER),
        node("input", kind=INPUT, gradient=False),
        node("mask", 1, gradient=False),
        node("first", 0, 2),
        node("sign", 3, gradient=False),
        node("second", 3, 2, 4),
        node("idle", 5),
        node("last", 0, 5, 3, 2, 4),
    )
    return Graph("drawn", operators), (0, 0, 0, 0, 2, 1, 1, 2)


def test_sections_drawn_by_hand() -> None:
    graph, stage = drawn()
    found = stage_sections(graph, stage, range(2, 8), [ValueRef(7, 0)], {})
    first, second = ValueRef(3, 0), ValueRef(5, 0)
    sign = StageEdge(ValueRef(4, 0), 1, 2, False)  # computed where it is first read, and not where the plan has it
    up = [StageEdge(first, 0, 1, True), StageEdge(first, 0, 2, True), StageEdge(second, 1, 2, True)]
    assert found == (
        StageSection(frozenset({2, 3}), frozenset({0, 1}), (), (), tuple(up[:2])),
        StageSection(frozenset({2, 4, 5}), frozenset({1}), (), (up[0],), (sign, up[2])),
        StageSection(frozenset({2, 7}), frozenset({0, 1}), (ValueRef(7, 0),), (up[1], sign, up[2]), ()),
    )
    at_random = stage_sections(graph, stage, range(2, 8), [ValueRef(7, 0)], {}, random={2})
    assert [2 in each.operators for each in at_random] == [True, False, False]
    with pytest.raises(PlanError, match="operator 'sign' of stage 0 reads 'first' of stage 1, which comes later"):
        stage_sections(graph, (0, 0, 0, 1, 1, 0, 1, 2), range(2, 8), [ValueRef(7, 0)], {})


def test_a_buffer_changes_in_the_one_stage_that_reads_it() -> None:
    operators = (
        node("count", kind="constant", gradient=False),
        node("weight", kind=PARAMETER),
        node("next", 0, gradient=False),
        node("first", 0, 1),
        node("last", 3),
    )
    graph = Graph("counting", operators)
    found = stage_sections(graph, (0, 0, 1, 0, 1), range(2, 5), [ValueRef(4, 0)], {})
    assert [each.leaves for each in found] == [{0, 1}, set()]
    one = stage_sections(graph, (0, 0, 0, 0, 1), range(2, 5), [ValueRef(4, 0)], {0: ValueRef(2, 0)})
    assert [each.ends for each in one] == [(ValueRef(2, 0),), (ValueRef(4, 0),)]
    with pytest.raises(PlanError, match="buffer 'count' changes in stage 1 and is read in stage 0"):
        stage_sections(graph, (0, 0, 1, 0, 1), range(2, 5), [ValueRef(4, 0)], {0: ValueRef(2, 0)})


@given(st.data())
def test_every_stage_has_what_it_reads_and_nothing_with_a_gradient_is_computed_twice(data: st.DataObject) -> None:
    leaves = data.draw(st.integers(1, 4))
    count = data.draw(st.integers(leaves + 1, 16))
    learns = [data.draw(st.booleans()) for _ in range(count)]
    operators = []
    for op in range(count):
        sources = data.draw(st.lists(st.integers(0, op - 1), min_size=1, max_size=3)) if op >= leaves else []
        operators.append(node(f"n{op}", *sources, gradient=learns[op] or op == count - 1))
    last = data.draw(st.integers(0, 3))
    cuts = sorted(data.draw(st.lists(st.integers(0, last), min_size=count - leaves, max_size=count - leaves)))
    stage = [0] * leaves + cuts
    stage[-1] = last
    graph = Graph("any", tuple(operators))
    found = stage_sections(graph, stage, range(leaves, count), [ValueRef(count - 1, 0)], {})
    assert len(found) == last + 1
    for number, section in enumerate(found):
        came = {each.value.source for each in section.receives}
        for op in section.operators:
            for read in operators[op].reads:
                assert read.source in section.operators | section.leaves | came
        for each in section.receives:
            assert each.source < each.target == number
            assert each.value.source in found[each.source].operators
            assert each in found[each.source].sends
    computed = [op for section in found for op in section.operators if operators[op].outputs[0].gradient]
    assert len(computed) == len(set(computed))
    assert count - 1 in found[last].operators


def test_splits_follow_the_axes_of_a_program_with_other_dimensions() -> None:
    def reshape(dims: tuple[str, ...], of: tuple[int | None, ...], shape: tuple[int, ...]) -> Graph:
        made = tuple(Dim.free(name, 4) for name in dims)
        read = Read(0, 0, Shape(shape, 4, of))
        out = Shape(shape, 4, of)
        return Graph("g", (node("p", kind=PARAMETER), Operator("v", "view", "reshape", made, (read,), (out,))))

    before, after = reshape(("a", "b", "c"), (0, 1, 2), (4, 4, 4)), reshape(("b", "c"), (None, 0, 1), (1, 4, 4))
    mesh = Mesh((2, 2))
    assert transfer_splits(before, [(0, -1), (2, 1)], (0, 1), after, mesh) == (((0, -1), (1, 0)), (0, 1))
    assert transfer_splits(before, [(-1, -1), (0, 2)], (0, 1), after, mesh) == (((-1, -1), (-1, 1)), (0, 1))
    other = Graph("g", (before.operators[0], replace(before.operators[1], target="permute")))
    with pytest.raises(PlanError, match=r"a micro-batch runs 'v' \(reshape\) where the plan has 'v' \(permute\)"):
        transfer_splits(other, [(-1, -1)] * 2, (0, 1), before, mesh)
