"""A plan as a page: it shows what the plan says, nothing lies on anything else, and no name gets out of hand."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from weft.plan.capture import Captured, capture
from weft.plan.graph import Dim, Graph, Operator, Read
from weft.plan.graph import Tensor as Value
from weft.plan.layout import Mesh
from weft.plan.machine import Machine, machine
from weft.plan.page import page
from weft.plan.page.boxes import boxes
from weft.plan.page.colours import WHOLE, colours, labels
from weft.plan.page.columns import picture
from weft.plan.page.figures import layer_costs
from weft.plan.page.groups import Group, groups
from weft.plan.page.lanes import Lanes
from weft.plan.page.prices import prices
from weft.plan.page.routes import HEIGHT, WIDTH, routes
from weft.plan.page.style import BACKGROUNDS, INKS
from weft.plan.plan import Cost, Plan, Row
from weft.plan.planner import plan_captured

LAYERS, WIDE = 3, 2048
VOID = {"meta"}


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


class Page(HTMLParser):
    """What a browser would see: every tag closed in turn, and what belongs to each box."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.boxes: dict[int, str] = {}
        self.titles: dict[int, str] = {}
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.lines: list[tuple[int, ...]] = []
        self.text = ""
        self._box: int | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.attributes += attrs
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "g" and (found.get("class") or "").startswith("box "):
            self._box = int(str(found["id"])[1:])
            self.boxes[self._box] = str(found["class"]).split()[1]
        if tag == "path" and "data-ends" in found:
            self.lines.append(tuple(map(int, str(found["data-ends"]).split())))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data
        if self.open[-2:] == ["g", "title"] and self._box is not None:
            self.titles[self._box] = self.titles.get(self._box, "") + data

    def close(self) -> None:
        super().close()
        assert self.open == []


@pytest.fixture(scope="module")
def captured() -> Captured:
    def loss(output: Tensor, batch: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), batch.flatten())

    with torch.device("meta"):
        return capture(Net(), torch.zeros(16, 256, dtype=torch.long), loss=loss)


@pytest.fixture(scope="module")
def made(captured: Captured) -> Plan:
    return plan_captured(captured, "2080ti", devices=4, stages=1, mesh=(2, 2), keep={"layers.*.up": "n"})


def seen(plan: Plan) -> tuple[Page, list[Group]]:
    return Page(page(plan)), groups(plan, boxes(plan.graph))


def apart(plan: Plan) -> Plan:
    """The plan with another split in the second layer."""
    place, operator = next(
        (p, o) for p, o in enumerate(plan.graph.operators) if o.module == "layers.1.up" and o.kind == "matmul"
    )
    names = [dim.name for dim in operator.dims if dim.parts > 1]
    others = [[name, name] for name in names if (name, name) != plan.names(place)]
    return plan.with_splits({operator.name: tuple(others[-1])})


def test_every_operator_that_computes_is_in_the_page(made: Plan) -> None:
    for plan in (made, apart(made)):
        shown, found = seen(plan)
        drawn = {place for group in found for copy in group.copies for place in copy}
        assert {p for p, o in enumerate(plan.graph.operators) if o.flops > 0} <= drawn
        assert sum(len(copy) for group in found for copy in group.copies) == len(drawn)
        assert set(shown.boxes) == {place for group in found for place in group.places}
        for place, told in shown.titles.items():
            operator = plan.graph.operators[place]
            assert told.startswith(operator.name)
            for words in (operator.module, operator.target, *(f"{dim.name} {dim.size}" for dim in operator.dims)):
                assert words in told


def test_equal_layers_are_folded_and_others_are_drawn_apart(made: Plan) -> None:
    shown, found = seen(made)
    (folded,) = [group for group in found if group.times > 1]
    assert (folded.title, folded.times) == (f"layers.0-{LAYERS - 1}", LAYERS)
    assert f"layers.0-{LAYERS - 1} x {LAYERS}" in shown.text
    assert all(f"and {LAYERS - 1} alike" in shown.titles[place] for place in folded.places)
    for copy in folded.copies:
        assert [made.splits[place] for place in copy] == [made.splits[place] for place in folded.places]

    _, other = seen(apart(made))
    assert [group.title for group in other if group.layer] == [f"layers.{number}" for number in range(LAYERS)]


def test_layers_that_alternate_are_folded_in_pairs() -> None:
    steps = [step(0, "in", None)]
    for number in range(6):
        steps.append(step(number + 1, f"layers.{number}", number, target="even" if number % 2 == 0 else "odd"))
    found = groups(plan := by_hand(steps), boxes(plan.graph))
    assert [(group.title, group.copies) for group in found] == [
        ("in", ((0,),)),
        ("layers.0-4", ((1,), (3,), (5,))),
        ("layers.1-5", ((2,), (4,), (6,))),
    ]
    assert set(picture(boxes(plan.graph), found).edges) == {(0, 1), (1, 2)}


def test_a_layer_that_is_applied_to_an_earlier_one_is_no_copy_that_feeds_itself() -> None:
    """Of folded layers the edges from one to the next are left out, and an edge within each is drawn once."""
    steps = [step(0, "in", None)]
    for number in range(3):
        steps += [step(1 + 2 * number, f"l.{number}", 2 * number), step(2 + 2 * number, f"l.{number}", 1 + 2 * number)]
    plan = by_hand([*steps, step(7, "out", 6)])
    found = groups(plan, boxes(plan.graph))
    assert [group.copies for group in found] == [((0,),), ((1, 2), (3, 4), (5, 6)), ((7,),)]
    assert set(picture(boxes(plan.graph), found).edges) == {(0, 1), (1, 2), (2, 7)}


def test_layers_within_a_tall_layer_are_folded() -> None:
    steps = [step(0, "in", None)]
    for number in range(40):
        steps.append(step(number + 1, f"stages.0.blocks.{number // 4}.part{number % 4}", number))
    found = groups(plan := by_hand(steps), boxes(plan.graph))
    assert [(group.title, group.times, len(group.places)) for group in found] == [
        ("in", 1, 1),
        ("stages.0.blocks.0-9", 10, 4),
    ]


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
    found = boxes(graph, {(3, 4)})
    assert found.places == (1, 3, 5, 8)  # what computes has a box, whatever its kind
    assert found.owner == (3, 1, 3, 3, 5, 5, 5, None, 8)
    assert found.edges == {(1, 3), (3, 5), (1, 5)}
    assert found.moved == {(3, 5)}


def test_equal_splits_have_equal_colours_and_others_different_ones(made: Plan) -> None:
    for plan in (made, apart(made)):
        shown, _ = seen(plan)
        split = labels(plan)
        assert len({split[place] for place in shown.boxes}) > 1
        for a, b in combinations(shown.boxes, 2):
            assert (shown.boxes[a] == shown.boxes[b]) == (split[a] == split[b])


def test_the_batch_has_one_name_whatever_an_operator_calls_it(made: Plan) -> None:
    data = plan_all_batch(made)
    assert {label for place, label in enumerate(labels(data)) if data.graph.operators[place].kind == "matmul"} == {
        "batch/4"
    }


def plan_all_batch(plan: Plan) -> Plan:
    wanted = {
        o.name: (o.dims[0].name,) * 2 for o in plan.graph.operators if o.kind == "matmul" and o.dims[0].parts % 4 == 0
    }
    return plan.with_splits(wanted)


@given(st.integers(1, 150))
def test_colours_are_all_different_and_can_be_told_from_the_page(count: int) -> None:
    found = colours([WHOLE, *(f"n/{number}" for number in range(count))])
    assert len(found) == count + 1
    for theme in (0, 1):
        used = [pair[theme] for pair in found.values()]
        assert len(set(used)) == len(used)
        for colour in used:
            assert all(contrast(colour, behind) >= 3 for behind in BACKGROUNDS[theme])
            inside = mixed(colour, BACKGROUNDS[theme][1], 0.17)
            assert contrast(INKS[theme][0], inside) >= 7
            assert contrast(INKS[theme][1], inside) >= 4.5


def light(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((light(a), light(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def mixed(a: str, b: str, part: float) -> str:
    values = [round(part * int(a[at : at + 2], 16) + (1 - part) * int(b[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{value:02x}" for value in values)


HOSTILE = "</title></svg><script>alert('x')</script>\"onload=\"a&b<!--"


def test_hostile_names_are_text_and_nothing_else(made: Plan) -> None:
    plain = page(replace(made, machine="other", captured=None))
    operators = tuple(
        replace(
            o,
            name=f"{HOSTILE}{place}",
            module=f"layers.{place % 5}.{HOSTILE}",
            target=HOSTILE,
            dims=tuple(replace(dim, name=HOSTILE + dim.name) for dim in o.dims),
            known=False,
        )
        for place, o in enumerate(made.graph.operators)
    )
    bad = replace(
        made,
        model=HOSTILE,
        machine=HOSTILE,
        graph=replace(made.graph, operators=operators),
        rows=(Row(HOSTILE, made.cost, HOSTILE), Row(HOSTILE, None, "", HOSTILE)),
        captured=None,
    )
    text = page(bad)
    shown = Page(text)
    assert text.count("<script") == plain.count("<script") == 1
    assert shown.tags <= Page(plain).tags
    assert not {name for name, _ in shown.attributes} & {"onload", "onclick", "onerror", "src", "href"}
    assert HOSTILE in shown.text
    assert all(told.startswith(f"{HOSTILE}{place}") for place, told in shown.titles.items())


def test_nothing_is_fetched(made: Plan) -> None:
    text = page(made)
    assert "default-src 'none'" in text
    assert not re.search(r"https?:|@import|<link|<img|<iframe|\bfetch\(|\bimport\(", text)
    assert set(re.findall(r"url\(([^)]*)\)", text)) <= {"#still", "#moved", "#inside"}


def test_what_is_not_proven_is_told(made: Plan) -> None:
    assert "the best with this mesh" in page(made)
    short = replace(made, untried=7, cost=replace(made.cost, bound=made.cost.step / 1.05))
    assert "within 5.0% of the best so cut" in page(short)
    assert "7 other ways to use the devices might be faster" in page(short)
    assert "might be faster" not in page(made)
    assert "no other way to use the devices is faster by more than 1%" in page(made)
    assert "no other way" not in page(short)


def test_a_page_is_the_same_each_time(made: Plan) -> None:
    assert page(made) == page(made)


def test_a_plan_of_one_device_is_a_page(captured: Captured) -> None:
    plan = plan_captured(captured, "h100", devices=1)
    shown, _ = seen(plan)
    assert len(set(shown.boxes.values())) == 1
    assert WHOLE in shown.text
    assert "communicating 0 s" in shown.text
    assert "bubble" not in shown.text
    assert "needs at least 4 devices" in shown.text
    assert "can be runyes" in shown.text


def test_a_plan_of_stages_is_a_page_with_the_memory_of_each(captured: Captured) -> None:
    plan = plan_captured(captured, "a100", devices=4, stages=2, mesh=(2,), microbatches=4, compare=False)
    shown, found = seen(plan)
    assert {group.stage for group in found} == {0, 1}
    for group in found:
        assert {plan.stage[place] for copy in group.copies for place in copy} == {group.stage}
    for words in ("stage 1: devices 0 to 1", "stage 2: devices 2 to 3", "bubble", *plan.reasons()):
        assert words in shown.text
    known = prices(plan)
    assert known is not None
    memory = [sum(known.stage_memory(plan, stage)) for stage in range(2)]
    assert max(memory) == pytest.approx(plan.cost.memory)
    rows = layer_costs(plan, boxes(plan.graph), found, known)
    assert math.fsum(row.total for row in rows) == pytest.approx(2 * (plan.cost.compute + plan.cost.communication))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16"},
        {"optimizer": "sgd"},
        {"optimizer": "momentum", "overlap": 0.75},
        {"recompute": True, "microbatches": 2},
    ],
)
def test_the_prices_of_operators_add_up_to_the_costs_of_the_plan(
    captured: Captured, options: dict[str, object]
) -> None:
    plan = plan_captured(captured, "v100", devices=4, stages=1, compare=False, **options)  # type: ignore[arg-type]
    found = prices(plan)
    assert found is not None
    assert math.fsum(found.compute) <= plan.cost.compute * (1 + 1e-9)
    assert math.fsum(found.communication) == pytest.approx(plan.cost.communication, abs=1e-15)
    weights, states, activations = found.stage_memory(plan, 0)
    assert weights + states == pytest.approx(plan.cost.parameters)
    assert activations == pytest.approx(plan.cost.activations)
    rows = layer_costs(plan, boxes(plan.graph), groups(plan, boxes(plan.graph)), found)
    assert math.fsum(row.compute for row in rows) == pytest.approx(plan.cost.compute)
    assert math.fsum(row.communication for row in rows) == pytest.approx(plan.cost.communication, abs=1e-15)


def test_prices_that_cannot_be_told_are_left_out(captured: Captured, made: Plan) -> None:
    mine: Machine = replace(machine("v100"), name="mine")
    known = plan_captured(captured, mine, devices=2, stages=1, compare=False)
    assert page(known) == page(known, mine)
    plan = replace(known, computer=None)
    assert prices(plan) is None
    assert "are not told" in page(plan)
    assert "communicating" in page(plan, mine)
    assert "are not told" not in page(plan, mine)
    assert prices(apart(made)) is None
    assert "a step:" not in page(apart(made))


# The drawing, on graphs of any form.


def step(place: int, module: str, *reads: int | None, target: str = "aten.add.Tensor") -> Operator:
    one = Value((8,), 4, (0,))
    known = tuple(Read(source, 0, one) for source in reads if source is not None)
    return Operator(f"o{place}", "elementwise", target, (Dim.free("a0", 8),), known, (one,), 1.0, module=module)


def by_hand(operators: list[Operator], stages: tuple[int, ...] | None = None) -> Plan:
    cost = Cost(1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0)
    count = len(operators)
    stage = stages or (0,) * count
    return Plan(
        "g", "m", 1, Graph("g", tuple(operators)), Mesh((1,)), ((-1,),) * count, stage, 1, False, cost, math.inf
    )


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
def test_no_line_runs_through_a_box_and_no_box_lies_on_another(plan: Plan) -> None:
    found = boxes(plan.graph)
    drawn = picture(found, groups(plan, found))
    laid = routes(drawn)
    for (ax, ay), (bx, by) in combinations(laid.boxes.values(), 2):
        assert abs(ax - bx) >= WIDTH or abs(ay - by) >= HEIGHT
    for x, y in laid.boxes.values():
        assert 0 <= x <= laid.width - WIDTH
        assert 0 <= y <= laid.height - HEIGHT
    for (source, reader), corners in laid.lines.items():
        (x, y), (u, v) = laid.boxes[source], laid.boxes[reader]
        assert corners[0] == (x + WIDTH / 2, y + HEIGHT)
        assert corners[-1] == (u + WIDTH / 2, v)
        for (ax, ay), (bx, by) in pairwise(corners):
            # A curve from one row to the next stays between them; all else goes straight across or down.
            assert len(corners) == 2 or ax == bx or ay == by
            for left, top in laid.boxes.values():
                beside = max(ax, bx) <= left or min(ax, bx) >= left + WIDTH
                assert beside or max(ay, by) <= top or min(ay, by) >= top + HEIGHT


@settings(max_examples=120, deadline=None)
@given(plans())
def test_a_box_lies_below_what_it_reads_in_its_column_and_every_edge_is_drawn(plan: Plan) -> None:
    found = boxes(plan.graph)
    known = groups(plan, found)
    drawn = picture(found, known)
    copy = {
        place: (group.run, number, first)
        for group in known
        for number, own in enumerate(group.copies)
        for place, first in zip(own, group.places, strict=True)
    }
    assert set(copy) == set(found.places)
    for column in drawn.columns:
        for source, reader in drawn.edges:
            if source in column.at and reader in column.at:
                assert column.at[source][1] < column.at[reader][1]
    expected = {
        (copy[a][2], copy[b][2]) for a, b in found.edges if copy[a][0] != copy[b][0] or copy[a][1] == copy[b][1]
    }
    assert set(drawn.edges) == expected
    shown = Page(page(plan))
    assert set(shown.lines) == expected
    assert len(shown.lines) == len(expected)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=20))
def test_lanes_keep_what_touches_apart_and_are_no_more_than_needed(spans: list[tuple[int, int]]) -> None:
    lanes = Lanes()
    for key, ends in enumerate(spans):
        lanes.add(key, *ends)
    found = lanes.assigned()
    for a, b in combinations(range(len(spans)), 2):
        if max(min(spans[a]), min(spans[b])) <= min(max(spans[a]), max(spans[b])):
            assert found[a] != found[b]
    deepest = max((sum(min(s) <= at <= max(s) for s in spans) for at in range(21)), default=0)
    assert len(set(found.values())) == deepest
