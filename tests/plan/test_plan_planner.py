"""Plans of small models: the best that fits, what is kept, saved, edited and refused."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from weft.cli.plan import show_plan
from weft.errors import PlanError
from weft.hardware.machine import machine
from weft.plan.capture import CapturedModel, capture
from weft.plan.configurations import parallel_configs, solve_config
from weft.plan.costs import TrainingSpec
from weft.plan.options import PlanOptions, PlanRequest
from weft.plan.planner import load_captured, plan_captured
from weft.plan.solver import OverLimit
from weft.utils.units import parse_bytes

WIDTH, LENGTH, HEADS, BATCH = 512, 128, 4, 48


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.head = nn.Linear(WIDTH, 100, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(output: Tensor, batch: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch.flatten())


@pytest.fixture(scope="module")
def captured() -> CapturedModel:
    with torch.device("meta"):
        return capture(Net(), torch.zeros(BATCH, LENGTH, dtype=torch.long), loss=loss)


@pytest.fixture(scope="module")
def flat(captured: CapturedModel) -> dict[str, Any]:
    """A plan on a mesh of one axis, as it is saved."""
    return plan_captured(captured, "2080ti", devices=4, stages=1, mesh=(4,), compare=False).to_json()


@pytest.mark.parametrize("devices", [1, 6, 8])
def test_a_plan_is_no_slower_than_what_it_is_compared_with(captured: CapturedModel, devices: int) -> None:
    made = plan_captured(captured, "2080ti", devices=devices, stages=1)
    assert made.mesh.devices == devices
    assert made.cost.lower_bound <= made.cost.step_time
    assert made.gap < 1e-9
    assert {row.name for row in made.comparisons} == {"data parallel", "fully sharded", "expert"}
    for row in made.comparisons:
        assert row.cost is None or row.cost.step_time >= made.cost.step_time * (1 - 1e-12)


def test_more_devices_are_never_slower(captured: CapturedModel) -> None:
    steps = [plan_captured(captured, "a100", devices=n, compare=False).cost.step_time for n in (1, 4, 7, 13)]
    assert steps == sorted(steps, reverse=True)
    assert steps[2] < 0.9 * steps[1]  # a batch of 48 is not divided among 7


def test_devices_that_nothing_can_be_divided_among_are_reported_as_unused(
    captured: CapturedModel, tmp_path: Path
) -> None:
    made = plan_captured(captured, "a100", devices=7)
    assert (made.devices, made.unused_devices, made.mesh.devices * made.stages) == (6, 1, 6)
    assert made.cost.step_time <= min(row.cost.step_time for row in made.comparisons if row.cost is not None)
    show_plan(made, console := Console(width=120, record=True, file=StringIO()))
    assert "a device is idle: 6 are faster than 7" in console.export_text()
    made.save(tmp_path / "plan.json")
    again = load_captured(tmp_path / "plan.json", captured, compare=False)
    assert (again.devices, again.unused_devices, again.splits, again.mesh) == (6, 1, made.splits, made.mesh)
    assert again.cost.step_time == pytest.approx(made.cost.step_time)


def test_stages_need_not_divide_the_batch(captured: CapturedModel) -> None:
    made = plan_captured(captured, "a100", devices=5, stages=5, compare=False)
    assert (made.stages, made.unused_devices, BATCH % made.microbatches) == (5, 0, 0)
    alone = plan_captured(captured, "a100", devices=1, compare=False)
    assert made.cost.step_time < 0.6 * alone.cost.step_time


@pytest.mark.parametrize("memory", ["900MiB", "250MiB"])
def test_no_configuration_that_was_left_out_is_faster(captured: CapturedModel, memory: str) -> None:
    made = plan_captured(captured, "2080ti", devices=4, memory=memory, compare=False)
    found, limit = machine("2080ti"), parse_bytes(memory)
    steps = []
    for _, config in parallel_configs(captured.graph, PlanRequest(found, 4, limit, TrainingSpec(), PlanOptions())):
        with suppress(OverLimit):
            steps.append(solve_config(config, found, limit).cost.step_time)
    assert made.untried_configs == 0
    assert made.cost.step_time <= min(steps)


def test_weft_plan_takes_a_model_as_it_is() -> None:
    made = weft.plan(nn.Linear(8, 8), torch.zeros(8, 8), "cpu", devices=2)
    assert (made.model, made.devices, made.unsupported()) == ("Linear", 2, [])


def test_less_memory_gives_a_plan_that_keeps_it(captured: CapturedModel) -> None:
    free = plan_captured(captured, "a100", devices=4, compare=False)
    steps = [free.cost.step_time]
    for part in (0.8, 0.6):
        limit = part * free.cost.memory
        made = plan_captured(captured, "a100", devices=4, memory=limit, compare=False)
        assert made.cost.memory <= limit
        assert made.cost.memory == pytest.approx(made.cost.parameters + made.cost.activations)
        steps.append(made.cost.step_time)
    assert steps == sorted(steps)


def test_too_little_memory_is_refused_with_what_is_missing_and_what_would_do(captured: CapturedModel) -> None:
    with pytest.raises(PlanError, match=r"no plan fits on 2 devices of 32.0 MiB: each needs at least") as told:
        plan_captured(captured, "a100", devices=2, memory="32MiB")
    devices = int(re.search(r"On (\d+) devices .* would do", str(told.value))[1])  # type: ignore[index]
    assert (
        plan_captured(captured, "a100", devices=devices, memory="32MiB", stages=1, compare=False).cost.memory <= 2**25
    )
    with pytest.raises(PlanError, match="More devices will not help"):
        weft.plan(nn.Linear(4, 4), torch.zeros(4, 4), "a100", devices=1, memory=10)


@pytest.mark.parametrize(("stages", "part"), [(2, 0.7), (4, 1.0)])
def test_a_plan_of_several_stages_keeps_the_memory_and_is_above_its_bound(
    captured: CapturedModel, stages: int, part: float
) -> None:
    given = {"devices": 4, "stages": stages, "microbatches": 8, "compare": False}
    free = plan_captured(captured, "2080ti", **given)
    made = plan_captured(captured, "2080ti", **given, memory=part * free.cost.memory)
    assert made.cost.memory <= part * free.cost.memory
    assert made.cost.step_time >= made.cost.lower_bound
    assert free.cost.lower_bound * (1 - 1e-9) <= made.cost.step_time
    assert made.cost.bubble > 0
    order = [made.stage[op] for op, o in enumerate(made.graph.operators) if o.reads and o.outputs[0].gradient]
    assert (made.stages, made.mesh.devices * stages, order) == (stages, 4, sorted(order))


def test_constraints_are_kept(captured: CapturedModel) -> None:
    made = plan_captured(
        captured, "2080ti", devices=4, stages=1, constraints={"head": "replicated", "layers.*.up": "n"}, compare=False
    )
    for op, operator in enumerate(made.graph.operators):
        if operator.module == "head":
            assert set(made.names(op)) == {"-"}
        if operator.module.endswith(".up"):
            assert set(made.names(op)) <= {"-", "n"}


def test_a_plan_that_is_edited_is_priced_anew(captured: CapturedModel, flat: dict[str, Any]) -> None:
    name = next(o.name for o in captured.graph.operators if o.module == "head" and o.reads)
    edited = load_captured({**flat, "splits": {**flat["splits"], name: ["-"]}}, captured, compare=False)
    assert edited.cost.step_time > flat["cost"]["step"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"mesh": "two"}, r"is no plan: Expected `array`, got `str` - at `\$.mesh`"),
        ({"mesh": [3]}, r"4 devices are not stages of the mesh \[3\]"),
        ({"microbatches": 0}, r"is no plan: Expected `int` >= 1 - at `\$.microbatches`"),
        ({"format": 0}, "has format 0, and format 1 is read here"),
        ({"splits": {"p_embed_weight": ["-", "-"]}}, "the mesh 4 takes 1, one for each axis"),
        ({"splits": {"p_embed_weight": ["nonsense"]}}, "'p_embed_weight' has no dimension 'nonsense'"),
        ({"splits": {}}, "says nothing of 'p_embed_weight'"),
        ({"splits": {"other": ["-"]}}, "the plan splits 'other', which the model has not"),
    ],
)
def test_an_edited_plan_that_is_none_is_refused_with_what_is_wrong(
    captured: CapturedModel, flat: dict[str, Any], edit: dict[str, object], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        load_captured({**flat, **edit}, captured)


def test_what_no_cut_divides_is_what_each_device_needs_at_least() -> None:
    with torch.device("meta"):
        found = capture(nn.LSTM(64, 512, batch_first=True), torch.zeros(6, 8, 64), loss=lambda y, _: y[0].mean())
    weights = sum(o.outputs[0].bytes for o in found.graph.operators if o.kind == "parameter")
    with pytest.raises(PlanError, match="each needs at least") as refused:
        plan_captured(found, devices=3, stages=3, microbatches=3, memory=weights)
    told = parse_bytes("".join(re.findall(r"at least ([\d.]+) (\w+)", str(refused.value))[0]), PlanError)
    assert told > 3.9 * weights  # weight, gradient and two states, whole in one stage; not a third of them


SMALL = replace(machine("h100"), levels=(replace(machine("h100").levels[0], devices=2),))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 4, "machine": SMALL}, "has 2 devices, and 4 are asked for"),
        ({"devices": 0}, "at least 1 device, not 0"),
        ({"devices": 4, "stages": 3}, "4 devices cannot be 3 equal stages"),
        ({"devices": 4, "microbatches": 7}, "a batch of 48 is not 7 equal micro-batches"),
        ({"devices": 4, "mesh": (3,)}, "a mesh of 3 in 1 stages is not 4 devices"),
        ({"devices": 4, "memory": "lots"}, "'lots' is"),
        ({"devices": 4, "memory": "80"}, r"a memory of '80' is 80 B: say 80GiB\?"),
        ({"devices": 4, "optimizer": "adamm"}, "unknown optimizer 'adamm'; did you mean 'adam'"),
        ({"devices": 4, "overlap": 2.0}, "no option 'overlap'"),
        ({"devices": 4, "keep": {}}, "is now 'constraints'"),
        ({"devices": 4, "constraints": {"heat": "replicated"}}, "no module or operator is called 'heat'; did you mean"),
        ({"devices": 4, "constraints": {"head": "n,z"}}, r"'head' has no dimension 'z': it has .*n"),
        ({"devices": 4, "machine": "h1000"}, "h1000"),
        ({"devices": 4, "dtype": "float8"}, "no peak for 'float8'"),
    ],
)
def test_what_cannot_be_is_refused(captured: CapturedModel, options: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_captured(captured, **options)  # type: ignore[arg-type]
