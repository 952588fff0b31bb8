"""The searches of a run: a real one, the sample of what was scored, and the mixture of a gradient search."""

from __future__ import annotations

import json
import random
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import inside, weft
from hypothesis import given, settings
from hypothesis import strategies as st

from weft import accuracy, search_gradient, zoo
from weft.data import digits
from weft.errors import RunError
from weft.search.objectives import Constraint, Objective
from weft.serve.overview import is_gradient_search
from weft.serve.views import search as searches
from weft.serve.views.search_samples import (
    STEPS,
    MixtureHistory,
    Point,
    Sample,
    ScoredSubnets,
    best_first_order,
    option_frequencies,
    probabilities,
)

CONFIG = """
run = "small"
supernet = "digits-conv"
data = "digits"
[train]
steps = 1
batch_size = 8
[execution]
threads = 1
[search]
budget = 6
bn_batches = 1
[export]
formats = ["safetensors"]
"""


def paste(command: str, folder: Path) -> None:
    """Runs a command as a shell in the folder would."""
    done = weft(*shlex.split(command)[1:], cwd=folder)
    assert done.code == 0, done


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was searched twice, under two names; only to be read."""
    folder = tmp_path_factory.mktemp("searched")
    (folder / "c.toml").write_text(CONFIG)
    paste("weft train c.toml", folder)
    paste("weft search c.toml", folder)
    paste("weft search runs/small --search.name other --search.minimize loss --search.budget 3", folder)
    return folder


@pytest.fixture
def run(home: Path, tmp_path: Path) -> Path:
    """A copy of that run, to be damaged."""
    copy = tmp_path / "runs" / "small"
    shutil.copytree(home / "runs" / "small", copy, ignore=shutil.ignore_patterns("checkpoints"))
    return copy


def test_the_front_is_shown_as_it_was_saved_and_its_layers_add_up_to_its_costs(run: Path) -> None:
    found = searches.document(run)
    assert (found["searches"], found["name"], found["problem"]) == (["other", "search"], "search", None)
    assert found["objectives"] == [{"name": "accuracy", "maximize": True}, {"name": "flops", "maximize": False}]
    saved = json.loads((run / "results" / "search" / "front.json").read_text())
    assert [member["id"] for member in found["front"]] == [member["id"] for member in saved["members"]]
    for member in found["front"]:
        for name in ("parameters", "flops"):
            assert sum(layer[name] for layer in member["layers"]) == member["scores"][name]
        for layer in member["layers"]:
            assert layer["shared"] == (layer["block"] in ("stem", "reduce", "head"))
            assert layer["choice"] == member["values"].get(layer["block"])


def test_every_scored_subnet_and_every_option_of_the_space_is_shown(run: Path) -> None:
    found = searches.document(run)
    lines = [json.loads(line) for line in (run / "results" / "scores.jsonl").read_text().splitlines()]
    assert found["count"] == len(found["scored"]) == len({line["subnet"] for line in lines})
    whole = [one for one in found["scored"] if {"accuracy", "loss", "flops", "parameters"} <= one["scores"].keys()]
    assert len(whole) >= 6  # the other search asked for no costs
    scored = {one["id"]: one["scores"] for one in found["scored"]}
    assert all(scored[member["id"]]["flops"] == member["scores"]["flops"] for member in found["front"])
    assert [one["name"] for one in found["choices"]] == [f"block{at}" for at in range(6)]
    for one in found["choices"]:
        assert one["options"] == ["skip", "separable3", "conv3", "conv5"]
        assert [sum(one["best"]), sum(one["all"])] == pytest.approx([1, 1], abs=1e-6)


@pytest.mark.parametrize(("name", "options"), [(None, ""), ("other", "--search.name other ")])
def test_the_command_exports_the_subnet_when_it_is_pasted(home: Path, name: str | None, options: str) -> None:
    with inside(home):
        member = searches.document(Path("runs/small"), name=name)["front"][-1]
    assert member["command"] == f"weft export runs/small {options}--export.subnet {member['id']}"
    paste(member["command"], home)
    written = json.loads((home / "runs" / "small" / "results" / member["id"] / "model.json").read_text())
    assert written["subnet"]["values"] == member["values"]


def test_a_run_that_was_started_from_python_has_no_command(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "config": None}))
    assert {member["command"] for member in searches.document(run)["front"]} == {None}


def test_an_unknown_name_is_answered_with_the_nearest(run: Path) -> None:
    for name, words in (("serch", "did you mean 'search'"), ("../../small/results/search", "has no search")):
        with pytest.raises(RunError, match=words):
            searches.document(run, name=name)


def test_a_search_that_goes_on_shows_what_it_scored_before_there_is_a_front(run: Path) -> None:
    for name in ("search", "other"):
        shutil.rmtree(run / "results" / name)
    found = searches.document(run)
    assert (found["searches"], found["name"], found["front"]) == ([], "search", [])
    assert len(found["scored"]) >= 6
    assert found["objectives"] == [{"name": "accuracy", "maximize": True}, {"name": "flops", "maximize": False}]
    assert len(found["choices"]) == 6
    assert searches.present(run)


ODD: dict[str, Any] = {
    "members": [3, {"id": 4}, {"id": "a"}, {"id": "b", "subnet": 1, "scores": [2], "layers": 3}],
    "objectives": [1, {"name": 2}, {"name": "accuracy"}],
}
ODD |= {"constraints": ["flops <= many", 4], "choices": {"a": 1}, "context": 3}


@pytest.mark.parametrize("content", ['{"members": [{"id"', "[1, 2]", "", json.dumps(ODD)])
def test_a_damaged_front_is_named_and_the_rest_is_shown(run: Path, content: str) -> None:
    (run / "results" / "search" / "front.json").write_text(content)
    found = searches.document(run)
    assert len(found["scored"]) >= 6
    assert isinstance(found["problem"], str) == (content != json.dumps(ODD))
    json.dumps(found, allow_nan=False)


def test_damaged_scores_and_a_damaged_manifest_give_a_document(run: Path) -> None:
    (run / "results" / "scores.jsonl").write_bytes(b"\xff\n{\n[]\n{}\n" + b"x" * 100)
    (run / "manifest.json").write_bytes(b"{")
    found = searches.document(run)
    assert found["scored"] == []
    assert found["front"]
    empty = run.parent / "empty"
    assert not searches.present(empty)
    assert searches.document(empty)["front"] == []


def test_a_link_that_leads_out_of_the_run_is_no_front(run: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "front.json").write_text('{"members": []}')
    (run / "results" / "linked").symlink_to(tmp_path / "elsewhere")
    assert searches.document(run)["searches"] == ["other", "search"]


def test_however_large_a_front_is_its_document_is_not(run: Path) -> None:
    values = {f"block{at}": f"candidate{at}" for at in range(48)}
    layers = [{"block": name, "choice": one, "parameters": 1, "flops": 2} for name, one in values.items()]
    members = [
        {"id": f"{at:016x}", "subnet": {"values": values}, "scores": {"accuracy": at / 3000}, "layers": layers}
        for at in range(3000)
    ]
    front = {"format": 1, "members": members, "objectives": [{"name": "accuracy", "maximize": True}], "constraints": []}
    (run / "results" / "search" / "front.json").write_text(json.dumps(front))
    with open(run / "results" / "scores.jsonl", "a") as file:
        for at in range(3000):
            scored = {"accuracy": at / 3000, "loss": at / 7}
            row = {"subnet": f"{at:016x}", "context": "new", "scores": scored, "values": values}
            file.write(json.dumps(row) + "\n")
    found = searches.document(run)
    assert len(json.dumps(found)) < 700_000
    assert [found["front"][at]["id"] for at in (0, -1)] == [f"{0:016x}", f"{2999:016x}"]
    assert len(found["scored"]) == 2000


def test_a_gradient_search_is_shown_with_its_probabilities(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 3, "batch_size": 8, "bn_batches": 1, "folder": tmp_path, "name": "gradient"}
    build = zoo.find("digits-conv")
    found = search_gradient(build, digits(), method="darts", metrics={"accuracy": accuracy}, **options)
    shown = searches.document(tmp_path / "gradient")
    assert searches.present(tmp_path / "gradient")
    assert [member["id"] for member in shown["front"]] == [found.subnet.id]
    assert shown["probabilities"]["steps"] == [0, 1, 2]
    assert [one["name"] for one in shown["probabilities"]["choices"]] == [f"block{at}" for at in range(6)]
    assert [values[0] for values in shown["probabilities"]["choices"][0]["values"]] == [0.25] * 4  # all begin alike


ACCURACY, FLOPS = Objective("accuracy", True), Objective("flops", False)


def point(id: str, accuracy: float, flops: float = 0.0, **values: object) -> Point:
    return Point(id, {"accuracy": accuracy, "flops": flops}, values)


def test_shares_of_eleven_by_hand() -> None:
    best = [point("a", 0.9, op="conv", depth=2), point("b", 0.8, op="conv")]
    rest = [point(f"c{at}", 0.1, op="skip") for at in range(9)]
    found = option_frequencies([*best, *rest], [("op", ["skip", "conv", "pool"]), ("depth", [1, 2])])
    # A tenth of eleven, rounded up, is two; depth is switched off in all but one.
    assert found == [
        {"name": "op", "options": ["skip", "conv", "pool"], "best": [0, 1, 0], "all": [0.8181818, 0.1818182, 0]},
        {"name": "depth", "options": [1, 2], "best": [0, 0.5], "all": [0, 0.09090909]},
    ]


def test_options_that_are_equal_to_python_are_different_options() -> None:
    found = option_frequencies([point("a", 1, flag=True), point("b", 1, flag=1)])
    assert [type(option) for option in found[0]["options"]] == [bool, int]
    assert found == [{"name": "flag", "options": [True, 1], "best": [1, 0], "all": [0.5, 0.5]}]


def test_of_two_objectives_the_front_comes_first() -> None:
    points = [point("small", 0.5, 1), point("beaten", 0.5, 5), point("good", 0.9, 9), point("worst", 0.4, 9)]
    assert [one.id for one in best_first_order(points, [ACCURACY, FLOPS])] == ["good", "small", "beaten", "worst"]
    assert [one.id for one in best_first_order(points, [FLOPS])] == ["small", "beaten", "good", "worst"]
    unscored = [Point("a", {"accuracy": 0.1})]
    assert best_first_order(unscored, [FLOPS]) == unscored


def test_what_breaks_a_constraint_or_is_no_number_comes_last() -> None:
    points = [point("nan", float("nan"), 1), point("large", 0.9, 9), point("fine", 0.5, 1)]
    found = best_first_order(points, [ACCURACY, FLOPS], [Constraint("flops", "<=", 5)])
    assert [one.id for one in found] == ["fine", "large", "nan"]


ids = st.lists(st.integers(0, 40).map(str), max_size=120)


@given(ids, st.integers(1, 20), st.randoms(use_true_random=False))
def test_a_sample_does_not_depend_on_the_order_and_is_whole_where_there_is_room(
    ids: list[str], cap: int, rng: random.Random
) -> None:
    def sampled(several: list[str]) -> set[str]:
        sample = Sample(cap)
        for one in several:
            sample.add(point(one, 0.0))
        return {one.id for one in sample.points()}

    found = sampled(ids)
    shuffled = list(ids)
    rng.shuffle(shuffled)
    assert found == sampled(shuffled)
    assert found <= set(ids)
    assert len(found) == min(cap, len(set(ids)))


def test_every_subnet_is_as_likely_to_be_kept() -> None:
    sample = Sample(500)
    for at in range(5000):
        sample.add(point(f"{at:016x}", at))
    early = sum(one.scores["accuracy"] < 2500 for one in sample.points())
    assert 190 < early < 310  # six standard deviations
    assert sample.count == 5000
    again = sample.points()[0].id
    sample.add(point(again, -1.0))
    assert [one.scores["accuracy"] for one in sample.points() if one.id == again] == [-1.0]  # the newest count


def line(subnet: str, accuracy: float | str, context: str = "x", **more: object) -> bytes:
    row = {"subnet": subnet, "context": context, "scores": {"accuracy": accuracy}, "values": {}, **more}
    return json.dumps(row).encode()


def scores(*lines: bytes) -> ScoredSubnets:
    found = ScoredSubnets()
    for one in lines:
        found.add_line(one)
    return found


def test_scores_of_the_fronts_context_are_taken_and_no_others() -> None:
    found = scores(line("a", 0.5, "old"), line("b", 0.6, "new"), line("a", 0.7, "new"))
    assert [one.scores["accuracy"] for one in found.of("old").points()] == [0.5]
    assert [one.id for one in found.of(None).points()] == ["b", "a"]  # else the newest
    assert scores().of("x").points() == []
    costly = scores(line("a", 0.5, values={"op": "x"}, costs={"flops": 3})).of("x")
    assert (costly.points(), costly.count) == ([Point("a", {"accuracy": 0.5, "flops": 3}, {"op": "x"})], 1)


def test_damaged_lines_are_counted_and_change_nothing() -> None:
    odd = [b'{"subnet": 1, "context": "x", "scores": {}}', b'{"subnet": "a"}', line("c", 0.5, values=[1])]
    bad = [b"{", b"[]", *odd, b"\xff\xfe", b"x" * 99999]
    found = scores(*bad, b"", line("a", "nan"), line("b", 0.5))
    assert found.damaged == len(bad)
    assert [one.id for one in found.of("x").points()] == ["a", "b"]


CHOICES = [{"name": "a", "options": ["x", "y"]}, {"name": "b", "options": [1, 2, 3]}]


def step(at: int, *mixture: object) -> dict[str, Any]:
    return {"event": "step", "step": at, "loss": 1.0, "mixture": list(mixture)}


def started(choices: object = CHOICES) -> dict[str, Any]:
    return {"event": "started", "choices": choices}


def written(run: Path, *events: object) -> Path:
    lines = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in events]
    (run / "events.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return run


def test_each_option_has_its_line_over_the_steps(tmp_path: Path) -> None:
    run = written(tmp_path, started(), step(0, 0.4, 0.6, 0.1, 0.2, 0.7), step(1, 0.3, 0.7, 0.2, 0.2, 0.6))
    assert probabilities(run) == {
        "steps": [0, 1],
        "choices": [
            {"name": "a", "options": ["x", "y"], "values": [[0.4, 0.3], [0.6, 0.7]]},
            {"name": "b", "options": [1, 2, 3], "values": [[0.1, 0.2], [0.2, 0.2], [0.7, 0.6]]},
        ],
    }


def test_a_run_without_a_mixture_has_none(tmp_path: Path) -> None:
    assert probabilities(tmp_path) is None
    assert probabilities(written(tmp_path, started(), {"event": "step", "step": 0, "loss": 1.0})) is None
    unnamed = written(tmp_path, step(0, 0.4, 0.6))
    assert probabilities(unnamed) is None  # nobody knows what the numbers stand for
    assert not is_gradient_search({})
    for table, key in (("train_config", "architecture_search"), ("law", "bilevel")):  # the second of format 1
        assert not is_gradient_search({table: {key: None}})
        assert is_gradient_search({table: {key: {"every": 2}}})


def test_damaged_events_are_passed_over(tmp_path: Path) -> None:
    good = step(3, 0.4, 0.6, 0.1, 0.2, 0.7)
    mixtures = [[0.4, 0.6], ["nan", 0.6, 0.1, 0.2, 0.7], [{}, 0, 0, 0, 0], [[1], 0, 0, 0, 0]]
    bad = [step(at, *mixture) for at, mixture in enumerate(mixtures)]
    bad += [{**good, **wrong} for wrong in ({"step": "x"}, {"mixture": 3}, {"event": "other"})]
    bad += [started("x"), started([{"name": 3}, 4])]
    found = probabilities(written(tmp_path, started(), good, *bad, b'{"event": "step", "step": 4, "mixture": [0.1'))
    assert found is not None
    assert found["steps"] == [3]


def drawn(options: int, *mixtures: tuple[int, list[float]]) -> dict[str, Any]:
    history = MixtureHistory()
    history.add_line(json.dumps(started([{"name": "a", "options": list(range(options))}])).encode())
    for at, mixture in mixtures:
        history.add_line(json.dumps(step(at, *mixture)).encode())
    found = history.to_json()
    assert found is not None
    return found


@settings(max_examples=30)
@given(st.integers(1, 1500), st.integers(1, 2))
def test_there_are_at_most_five_hundred_steps_and_they_come_to_the_mean(steps: int, stride: int) -> None:
    found = drawn(2, *((at, [at / steps, 1 - at / steps]) for at in range(0, steps, stride)))
    assert len(found["steps"]) <= STEPS
    assert found["steps"] == sorted(set(found["steps"]))
    first, second = found["choices"][0]["values"]
    assert all(a + b == pytest.approx(1.0, abs=2e-4) for a, b in zip(first, second, strict=True))
    # A line stays one where it is averaged, but for its ends.
    inside = range(len(first) // 20, len(first) - len(first) // 20)
    assert all(first[i] == pytest.approx(found["steps"][i] / steps, abs=0.02) for i in inside)


def test_many_options_are_shown_at_fewer_steps() -> None:
    assert len(json.dumps(drawn(3456, *((at, [0.001] * 3456) for at in range(200))))) < 400_000
