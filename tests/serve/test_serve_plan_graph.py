"""The graph of a plan as nodes and edges: all of it, repeated layers once, and costs that add up."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from weft.plan.capture import CapturedModel, capture
from weft.plan.costs import PlanCost
from weft.plan.graph import Dim, Graph, Operator, Read
from weft.plan.graph import Tensor as Value
from weft.plan.plan import Plan
from weft.plan.planner import plan_captured
from weft.plan.saved import op_costs, operators, read_splits
from weft.plan.sharding import Mesh
from weft.serve.views import plan_layers as layers
from weft.serve.views.plan import MOST, TOO_LARGE, plan_document
from weft.serve.views.plan_graph import WHOLE, columns, split_label, stage_memory
from weft.serve.views.plan_layers import LayerGroup, groups, nodes_of, shown_edges

LAYERS, WIDE = 3, 2048


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDE), nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDE)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDE, 100, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def rows(plan: Plan) -> list[layers.PlanOperator]:
    return msgspec.convert(operators(plan), list[layers.PlanOperator])


def grouped(plan: Plan) -> list[LayerGroup]:
    found = rows(plan)
    return groups(found, nodes_of(found))


def drawn(plan: Plan) -> dict[str, Any]:
    """The graph of the document."""
    found = plan_document(plan.to_saved(), "plan")
    assert found["note"] is None
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    return dict(found["graph"])


def nodes(graph: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {node["id"]: node for column in graph["columns"] for node in column["nodes"]}


@pytest.fixture(scope="module")
def captured() -> CapturedModel:
    def loss(output: Tensor, batch: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), batch.flatten())

    with torch.device("meta"):
        return capture(Net(), torch.zeros(16, 256, dtype=torch.long), loss=loss)


@pytest.fixture(scope="module")
def made(captured: CapturedModel) -> Plan:
    return plan_captured(captured, "2080ti", devices=4, stages=1, mesh=(2, 2), constraints={"layers.*.up": "n"})


def with_splits(plan: Plan, given: dict[str, tuple[str, ...]]) -> Plan:
    """The plan with other splits of some operators, by their names."""
    names = {operator.name: plan.names(place) for place, operator in enumerate(plan.graph.operators)}
    return replace(plan, splits=read_splits(plan.graph, plan.mesh, names | given))


def apart(plan: Plan) -> Plan:
    """The plan with another split in the second layer."""
    place, operator = next(
        (p, o) for p, o in enumerate(plan.graph.operators) if o.module == "layers.1.up" and o.kind == "matmul"
    )
    names = [dim.name for dim in operator.dims if dim.parts > 1]
    others = [[name, name] for name in names if (name, name) != plan.names(place)]
    return with_splits(plan, {operator.name: tuple(others[-1])})


def test_every_operator_that_computes_is_in_the_graph(made: Plan) -> None:
    for plan in (made, apart(made)):
        found, graph = grouped(plan), drawn(plan)
        places = [place for group in found for copy in group.copies for place in copy]
        assert len(places) == len(set(places))
        assert {p for p, o in enumerate(plan.graph.operators) if o.flops > 0} <= set(places)
        assert set(nodes(graph)) == {place for group in found for place in group.places}
        for place, node in nodes(graph).items():
            operator = plan.graph.operators[place]
            assert (node["operator"], node["module"]) == (operator.name, operator.module)
            assert node["target"].startswith(operator.target)
            assert node["space"] == ", ".join(f"{dim.name} {dim.size}" for dim in operator.dims)


def test_equal_layers_are_shown_once_and_others_apart(made: Plan) -> None:
    (folded,) = [group for group in grouped(made) if group.times > 1]
    assert folded.times == LAYERS
    graph = drawn(made)
    assert [c["title"] for c in graph["columns"] if c["times"] == LAYERS] == [f"layers.0-{LAYERS - 1}"]
    assert all(nodes(graph)[place]["copies"] == LAYERS for place in folded.places)
    for copy in folded.copies:
        assert [made.splits[place] for place in copy] == [made.splits[place] for place in folded.places]
    assert [group.title for group in grouped(apart(made)) if group.is_layer] == [f"layers.{n}" for n in range(LAYERS)]


def test_the_costs_of_a_node_are_means_of_all_that_it_stands_for(made: Plan) -> None:
    known, found = nodes(drawn(made)), rows(made)
    priced = op_costs(made)
    assert priced is not None
    costs, _ = priced
    owners = nodes_of(found).owner
    rest = math.fsum(seconds for seconds, owner in zip(costs["compute"], owners, strict=True) if owner is None)
    total = math.fsum(node["costs"]["compute"] * node["copies"] for node in known.values())
    assert total + rest == pytest.approx(math.fsum(costs["compute"]))
    parameters = math.fsum(node["costs"]["parameters"] * node["copies"] for node in known.values())
    assert parameters + max(costs["gathered"]) == pytest.approx(made.cost.parameters)


def step(place: int, module: str, *reads: int | None, target: str = "aten.add.Tensor") -> Operator:
    one = Value((8,), 4, (0,))
    known = tuple(Read(source, 0, one) for source in reads if source is not None)
    return Operator(f"o{place}", "elementwise", target, (Dim.free("a0", 8),), known, (one,), 1.0, module=module)


def by_hand(operators: list[Operator], stages: tuple[int, ...] | None = None) -> Plan:
    cost = PlanCost(1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0)
    count = len(operators)
    stage = stages or (0,) * count
    return Plan(
        "g", "m", 1, Graph("g", tuple(operators)), Mesh((1,)), ((-1,),) * count, stage, 1, False, cost, math.inf
    )


ALTERNATE = [step(n + 1, f"l.{n}", n, target="even" if n % 2 == 0 else "odd") for n in range(6)]
EARLIER = [step(n + 1, f"l.{n // 2}", n // 2 * 2 + n % 2) for n in range(6)]
TALL = [step(n + 1, f"stages.0.blocks.{n // 4}.part{n % 4}", n) for n in range(40)]
FOLDED: dict[str, tuple[list[Operator], list[tuple[str, int, tuple[int, ...]]], set[tuple[int, int]]]] = {
    "layers that alternate": (ALTERNATE, [("l.0-4", 3, (1,)), ("l.1-5", 3, (2,))], {(0, 1), (1, 2)}),
    "layers of two": (EARLIER, [("l.0-2", 3, (1, 2))], {(0, 1), (1, 2)}),
    "layers within a tall layer": (
        TALL,
        [("stages.0.blocks.0-9", 10, (1, 2, 3, 4))],
        {(at, at + 1) for at in range(4)},
    ),
}
"""Operators behind the first, the groups that they are shown as, and the edges that are drawn."""


@pytest.mark.parametrize("case", FOLDED)
def test_layers_that_repeat_are_folded_without_the_edges_from_one_to_the_next(case: str) -> None:
    steps, expected, edges = FOLDED[case]
    plan = by_hand([step(0, "in", None), *steps])
    first, *found = grouped(plan)
    assert first.copies == ((0,),)
    assert [(group.title, group.times, group.places) for group in found] == expected
    assert set(shown_edges(nodes_of(rows(plan)), [first, *found])[0]) == edges


def test_views_constants_and_parameters_are_folded_into_their_neighbours() -> None:
    one = Value((8,), 4, (0,))
    dims = (Dim.free("a0", 8),)

    def node(name: str, kind: str, *reads: int, flops: float = 0.0) -> Operator:
        return Operator(name, kind, name, dims, tuple(Read(r, 0, one) for r in reads), (one,), flops=flops)

    graph = Graph(
        "g",
        (
            node("w", "parameter"),
            node("x", "input"),
            node("turned", "view", 0),
            node("mm", "matmul", 1, 2, flops=1),
            node("flat", "view", 3),
            node("add", "elementwise", 4, 1, flops=1),
            node("last", "view", 5),
            node("lost", "parameter"),
            node("counted", "constant", flops=1),
        ),
    )
    change = msgspec.structs.replace
    known = rows(by_hand(list(graph.operators)))
    moving = [change(row, reads=tuple(change(read, moved=read.source == 3) for read in row.reads)) for row in known]
    found = nodes_of(moving)
    assert found.places == (1, 3, 5, 8)  # what computes has a box, whatever its kind
    assert found.owner == (3, 1, 3, 3, 5, 5, 5, None, 8)
    assert found.edges == {(1, 3), (3, 5), (1, 5)}
    assert found.moved == {(3, 5)}


def test_a_counter_that_nothing_reads_is_folded_into_its_module() -> None:
    """Such as the number of batches that a batch norm has seen."""
    scalar = Value((), 8, ())
    counter = Operator("count", "elementwise", "aten.add.Tensor", (), (), (scalar,), 1.0, module="norm")
    found = nodes_of(rows(by_hand([step(0, "in", None), counter, step(2, "norm", 0)])))
    assert (found.places, found.owner) == ((0, 2), (0, 2, 2))
    alone = nodes_of(rows(by_hand([replace(counter, module="")])))
    assert alone.places == (0,), "where there is nothing else, it is shown"


def test_equal_splits_have_equal_colours_and_others_different_ones(made: Plan) -> None:
    for plan in (made, apart(made)):
        graph, found = drawn(plan), rows(plan)
        labels = {place: split_label(found[place], plan.mesh.sizes) for place in nodes(graph)}
        assert len({own["label"] for own in graph["splits"]}) == len(graph["splits"]) == len(set(labels.values())) > 1
        assert all(graph["splits"][node["split"]]["label"] == labels[at] for at, node in nodes(graph).items())
        assert sum(own["count"] for own in graph["splits"]) == len(nodes_of(found).places)


def test_the_batch_has_one_name_whatever_an_operator_calls_it(made: Plan) -> None:
    data = plan_all_batch(made)
    found = {split_label(row, data.mesh.sizes) for row in rows(data) if row.kind == "matmul"}
    assert found == {"batch/4"}
    words = {node["words"] for node in nodes(drawn(data)).values() if node["kind"] == "matmul"}
    assert all(own.startswith("the batch (") and own.endswith(") in 4 parts") for own in words)


def plan_all_batch(plan: Plan) -> Plan:
    wanted = {
        o.name: (o.dims[0].name,) * 2 for o in plan.graph.operators if o.kind == "matmul" and o.dims[0].parts % 4 == 0
    }
    return with_splits(plan, wanted)


def test_what_is_not_proven_is_shown(made: Plan) -> None:
    found = plan_document(made.to_saved(), "plan")
    assert (found["untried"], found["gap"]) == (0, pytest.approx(0.0, abs=1e-12))
    short = replace(made, untried_configs=7, cost=replace(made.cost, lower_bound=made.cost.step_time / 1.05))
    found = plan_document(short.to_saved(), "plan")
    assert (found["untried"], found["gap"]) == (7, pytest.approx(0.05))


def test_a_graph_that_is_too_large_is_not_drawn() -> None:
    steps = [step(0, "in", None), *(step(n, f"m{n}", n - 1) for n in range(1, MOST + 1))]
    found = plan_document(by_hand(steps).to_saved(), "plan")
    assert (found["graph"], found["note"]) == (None, TOO_LARGE.format(count=MOST))


def test_a_plan_of_one_device_is_drawn(captured: CapturedModel) -> None:
    plan = plan_captured(captured, "h100", devices=1)
    found = plan_document(plan.to_saved(), "one")
    assert [own["label"] for own in found["graph"]["splits"]] == [WHOLE]
    assert found["seconds"]["communication"] == 0.0
    assert not any(moved for _, _, moved in found["graph"]["edges"])
    assert any(row["reason"].startswith("needs at least 4 devices") for row in found["comparisons"])


def test_a_plan_of_stages_is_drawn_with_the_memory_of_each(captured: CapturedModel) -> None:
    plan = plan_captured(captured, "a100", devices=4, stages=2, mesh=(2,), microbatches=4, compare=False)
    found = grouped(plan)
    assert {group.stage for group in found} == {0, 1}
    for group in found:
        assert {plan.stage[place] for copy in group.copies for place in copy} == {group.stage}
    graph = drawn(plan)
    assert {column["stage"] for column in graph["columns"]} == {"stage 1: devices 0 to 1", "stage 2: devices 2 to 3"}
    stage = {place: plan.stage[place] for place in nodes(graph)}
    across = [(source, reader, moved) for source, reader, moved in graph["edges"] if stage[source] != stage[reader]]
    assert any(moved for _, _, moved in across)
    memory = stage_memory(rows(plan), 4, 2, 4)
    assert list(memory) == ["stage 1: devices 0 to 1", "stage 2: devices 2 to 3"]
    assert max(sum(own.values()) for own in memory.values()) == pytest.approx(plan.cost.memory)


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"optimizer": "sgd"}, {"recompute": True, "microbatches": 2}]
)
def test_the_costs_of_operators_add_up_to_those_of_the_plan(
    captured: CapturedModel, options: dict[str, object]
) -> None:
    plan = plan_captured(captured, "v100", devices=4, stages=1, compare=False, **options)  # type: ignore[arg-type]
    priced = op_costs(plan)
    assert priced is not None
    found, _ = priced
    assert math.fsum(found["compute"]) <= plan.cost.compute * (1 + 1e-9)
    assert math.fsum(found["communication"]) == pytest.approx(plan.cost.communication, abs=1e-15)
    (memory,) = stage_memory(rows(plan), 4, 1, plan.microbatches).values()
    own = memory["weights"] + memory["gradients and states"] + memory["gathered at once"]
    assert own == pytest.approx(plan.cost.parameters)
    assert memory["activations"] == pytest.approx(plan.cost.activations)


def test_costs_that_are_not_known_are_left_out(captured: CapturedModel, made: Plan) -> None:
    mine = replace(made, machine="mine", machine_spec=None)
    for plan in (mine, apart(made)):
        assert op_costs(plan) is None
        found = plan_document(plan.to_saved(), "plan")
        assert all(node["costs"] is None for node in nodes(found["graph"]).values())
        (memory,) = found["memory"]
        assert sum(memory["parts"].values()) == pytest.approx(made.cost.memory)


# Graphs of any form.


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    count = draw(st.integers(1, 40))
    places = st.sampled_from(["", "in", "out", *(f"l.{n}.{part}" for n in range(6) for part in ("a", "b"))])
    operators = []
    for place in range(count):
        reads = draw(st.lists(st.integers(0, place - 1), max_size=3, unique=True)) if place else []
        operators.append(step(place, draw(places), *reads))
    cut = draw(st.integers(0, count))
    return by_hand(operators, tuple(int(place >= cut > 0) for place in range(count)))


@settings(max_examples=120, deadline=None)
@given(plans())
def test_every_node_is_in_one_column_and_every_edge_is_there_once(plan: Plan) -> None:
    found = rows(plan)
    known = groups(found, nodes_of(found))
    copy = {
        place: (group.run, number, first)
        for group in known
        for number, own in enumerate(group.copies)
        for place, first in zip(own, group.places, strict=True)
    }
    assert set(copy) == set(nodes_of(found).places)
    in_columns: Sequence[int] = [place for _, _, places in columns(known) for place in places]
    assert sorted(in_columns) == sorted(place for group in known for place in group.places)
    expected = {
        (copy[a][2], copy[b][2])
        for a, b in nodes_of(found).edges
        if copy[a][0] != copy[b][0] or copy[a][1] == copy[b][1]
    }
    edges = [(source, reader) for source, reader, _ in drawn(plan)["edges"]]
    assert (set(edges), len(edges)) == (expected, len(expected))
