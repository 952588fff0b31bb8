"""Plans as the dashboard shows them: all that was saved, nothing that a foreign file brings, and why a graph lacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Done, weft
from torch import Tensor, nn

from weft.cli import plan as planning
from weft.errors import PlanError, WeftError
from weft.hardware.machine import machine
from weft.plan.capture import CapturedModel, capture
from weft.plan.plan import Plan
from weft.plan.planner import plan_captured
from weft.serve.views.plan import DAMAGED, EDITED, NO_OPERATORS, document, list_plans
from weft.utils.files import write_json

MODEL = """
import torch
from torch import nn

def build():
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    return net, torch.zeros(32, 64), lambda y, batch: y.square().mean()
"""


@pytest.fixture(scope="module")
def captured() -> CapturedModel:
    def loss(output: Tensor, batch: Tensor) -> Tensor:
        return output.square().mean()

    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 512))
        return capture(net, torch.zeros(256, 1024), loss=loss)


@pytest.fixture(scope="module")
def made(captured: CapturedModel) -> Plan:
    return plan_captured(captured, "a100", devices=4, stages=1)


@pytest.fixture
def saved(tmp_path: Path, made: Plan) -> Path:
    path = tmp_path / "plans" / "net.json"
    made.save(path)
    return path


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    return path


def test_a_saved_plan_is_shown_whole(saved: Path, made: Plan) -> None:
    found = document(saved)
    assert (found["name"], found["mesh"], found["note"]) == ("net", str(made.mesh), None)
    for name in ("model", "machine", "devices", "stages", "microbatches"):
        assert found[name] == getattr(made, name)
    assert all(found["seconds"][part] == pytest.approx(max(getattr(made.cost, part), 0.0)) for part in found["seconds"])
    assert found["gap"] == pytest.approx(made.gap)
    labels = [own["label"] for own in found["graph"]["splits"]]
    assert len(labels) == len(set(labels)) > 0
    (memory,) = found["memory"]
    assert memory["device"] == "devices 0 to 3"
    assert sum(memory["parts"].values()) == pytest.approx(made.cost.memory)
    assert memory["limit"] == made.memory_limit
    own, *others = found["comparisons"]
    assert (own["name"], own["step"], own["plan_is_faster"]) == ("this plan", made.cost.step_time, None)
    assert [row["name"] for row in others] == [row.name for row in made.comparisons]
    assert [row["plan_is_faster"] for row in others] == [
        pytest.approx(row.cost.step_time / made.cost.step_time) if row.cost else None for row in made.comparisons
    ]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_a_plan_that_was_saved_without_its_operators_has_no_graph(tmp_path: Path, made: Plan) -> None:
    write_json(tmp_path / "bare.json", made.to_json())
    found = document(tmp_path / "bare.json")
    assert (found["graph"], found["note"]) == (None, NO_OPERATORS)
    assert sum(found["memory"][0]["parts"].values()) == pytest.approx(made.cost.memory)


def test_a_plan_whose_splits_were_edited_is_not_drawn_as_it_was(saved: Path) -> None:
    def change(plan: dict[str, Any]) -> None:
        name = next(iter(plan["splits"]))
        plan["splits"][name] = ["other"]

    assert document(edit(saved, change))["note"] == EDITED


def test_a_machine_that_is_no_preset_is_priced_as_it_was_planned(tmp_path: Path, captured: CapturedModel) -> None:
    plan = plan_captured(captured, replace(machine("a100"), name="here"), devices=4, stages=1)
    plan.save(tmp_path / "own.json")
    columns = document(tmp_path / "own.json")["graph"]["columns"]
    seconds = [own["copies"] * own["costs"]["compute"] for column in columns for own in column["nodes"]]
    assert 0 < sum(seconds) <= plan.cost.compute * (1 + 1e-9)


FOREIGN: dict[str, Any] = {
    "empty": "",
    "torn": '{"format": 1, "model',
    "other": '{"a": 1}',
    "deep": "[" * 100_000,
    "binary": "\x00\x01",
    "newer": {"format": 99},
    "no cost": {"cost": None},
    "a cost without its step": {"cost": {"compute": 1.0}},
    "a huge name": {"model": "x" * 5000},
    "no mesh": {"mesh": []},
}
"""Files, and changes of the plan."""


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_file_is_passed_over_in_the_list_and_refused_by_itself(saved: Path, name: str) -> None:
    path, change = saved.with_name("foreign.json"), FOREIGN[name]
    path.write_text(change if isinstance(change, str) else json.dumps({**json.loads(saved.read_text()), **change}))
    assert [plan["name"] for plan in list_plans(saved.parent)] == ["net"]
    with pytest.raises(WeftError) as problem:
        document(path)
    assert "\n" not in str(problem.value)


def test_numbers_that_json_lacks_are_none(saved: Path) -> None:
    edit(saved, lambda plan: plan["cost"].update(compute=float("nan"), memory=float("inf")))
    found = document(saved)
    assert found["seconds"]["compute"] is None
    assert found["comparisons"][0]["memory"] is None
    json.dumps(found, allow_nan=False)


def test_a_link_that_leads_out_of_the_folder_is_not_followed(saved: Path, tmp_path: Path) -> None:
    assert list_plans(tmp_path / "nowhere") == []
    saved.rename(tmp_path / "secret.json")
    saved.symlink_to(tmp_path / "secret.json")
    assert list_plans(saved.parent) == []
    with pytest.raises(PlanError, match="no plan"):
        document(saved)


def test_hostile_names_are_given_as_they_are(tmp_path: Path, made: Plan) -> None:
    bad = '</text><script>alert("1")</script><img src=x onerror=alert(2)>'
    operators = tuple(replace(own, module=bad, name=f"{bad}{n}") for n, own in enumerate(made.graph.operators))
    plan = replace(made, model=bad, graph=replace(made.graph, operators=operators))
    plan.save(tmp_path / "bad.json")
    found = document(tmp_path / "bad.json")
    assert (found["model"], found["note"]) == (bad, None), "the page makes text of it"
    assert all(node["module"] == bad for column in found["graph"]["columns"] for node in column["nodes"])


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no list": lambda plan: plan.update(operators={"a": 1}),
    "no name": lambda plan: plan["operators"][0].pop("name"),
    "a later source": lambda plan: plan["operators"][0].update(reads=[{"source": 0, "shape": [1], "local": [1]}]),
    "a split of other axes": lambda plan: plan["operators"][0].update(split=["-"] * 9),
    "an unknown dimension": lambda plan: plan["operators"][0].update(split=["zz"] * len(plan["mesh"])),
    "no such stage": lambda plan: plan["operators"][0].update(stage=5),
    "no cost": lambda plan: plan["operators"][0].update(compute="much"),
}


@pytest.mark.parametrize("name", WRONG)
def test_damaged_operators_are_not_drawn_and_the_rest_is_shown(saved: Path, name: str) -> None:
    found = document(edit(saved, WRONG[name]))
    assert (found["graph"], found["note"]) == (None, DAMAGED)
    assert found["comparisons"]


def test_a_bare_name_is_a_plan_among_the_runs_and_a_path_is_itself(tmp_path: Path) -> None:
    assert planning.path_of("gpt2", tmp_path) == tmp_path / "runs" / "plans" / "gpt2.json"
    assert planning.path_of("here/gpt2", tmp_path) == Path("here/gpt2")
    assert planning.path_of("gpt2.json", tmp_path) == Path("gpt2.json")
    for name in ("..", "", "a b", "-x"):
        with pytest.raises(PlanError, match="cannot be called"):
            planning.path_of(name, tmp_path)


def test_weft_plan_saves_by_name_where_the_dashboard_looks(tmp_path: Path) -> None:
    def plan(*words: str) -> Done:
        return weft("plan", "own:build", "--devices", "4", "--machine", "a100", *words, cwd=tmp_path)

    (tmp_path / "own.py").write_text(MODEL)
    assert "runs/plans/tiny.json" in plan("--save", "tiny").out
    assert list_plans(tmp_path / "runs" / "plans") == [{"name": "tiny", "model": "Sequential", "devices": 4}]
    assert document(tmp_path / "runs" / "plans" / "tiny.json")["graph"]
    assert plan("--from-plan", "tiny").code == 0
    assert "written to plan.html" in plan("--html", "plan.html").out
    assert '"/api/plans/plan"' in (tmp_path / "plan.html").read_text()
    assert "other" in plan("--from-plan", "other").error
