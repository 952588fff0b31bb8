"""Gradient search: methods as values, every method on every kind of space, targets, and the law of its results."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_supernets import layered

import weft
from weft import zoo
from weft.data import Data, Tensors, open_data
from weft.search.gradient import (
    GRADIENT_METHODS,
    GradientMethod,
    make_gradient_method,
    search_gradient,
)
from weft.search.gradient.methods import GDAS, DrNAS, default_optimizer, default_warmup
from weft.supernet import Chain

RELAXED = [name for name in GRADIENT_METHODS if isinstance(make_gradient_method(name), GradientMethod)]
SAMPLED = [name for name in GRADIENT_METHODS if name not in RELAXED]


def images(channels: int, size: int) -> Data:
    rng = torch.Generator().manual_seed(0)
    part = Tensors(image=torch.randn(8, channels, size, size, generator=rng), label=torch.arange(8))
    return Data("images", part, part)


def tokens() -> Data:
    row = torch.randint(0, 128, (8, 9), generator=torch.Generator().manual_seed(0))
    part = Tensors(tokens=row[:, :-1].clone(), targets=row[:, 1:].clone())
    return Data("tokens", part, part)


SPACES: dict[str, tuple[Callable[[], Chain], Callable[[], Data]]] = {
    "toy-cell": (partial(zoo.toy_cell, channels=4, size=8), partial(images, 1, 8)),
    "nas-bench-201": (partial(zoo.nas_bench_201, cells=1, channels=4), partial(images, 3, 8)),
    "darts-partial": (partial(zoo.darts, cells=3, channels=8, partial=4), partial(images, 3, 8)),
    "ofa": (partial(zoo.ofa_mobilenet_v3, 10, 0.25, (3, 5), (3, 4), (1, 2)), partial(images, 3, 32)),
    "vit": (zoo.vit_test, partial(images, 1, 8)),
    "gpt": (zoo.gpt_test, tokens),
}


def search(folder: Path, method: str = "drnas", steps: int = 6, **options: Any) -> Any:
    given = {"batch_size": 32, "metrics": {"accuracy": weft.accuracy}, "folder": folder, **options}
    return search_gradient(layered, open_data("digits"), method=method, steps=steps, **given)


@pytest.mark.parametrize("method", RELAXED)
def test_probabilities_come_to_one_and_have_gradients(method: str) -> None:
    relax = make_gradient_method(method)
    assert isinstance(relax, GradientMethod)
    alpha = torch.randn(5, requires_grad=True)
    for training in (True, False):
        p = relax(alpha, training, torch.tensor(0.5))
        assert bool((p >= 0).all())
        assert float(p.detach().sum()) == pytest.approx(1.0)
    (gradient,) = torch.autograd.grad((relax(alpha, True, torch.tensor(0.5)) * torch.arange(5)).sum(), [alpha])
    assert bool(gradient.any())
    assert pickle.loads(pickle.dumps(relax)) == relax


def test_gdas_draws_one_option_as_often_as_it_is_likely() -> None:
    torch.manual_seed(0)
    alpha = torch.log(torch.tensor([0.6, 0.3, 0.1]))
    drawn = torch.stack([GDAS()(alpha, True, torch.tensor(1.0)).round() for _ in range(4000)])
    assert bool((drawn.sum(1) == 1).all())
    torch.testing.assert_close(drawn.mean(0), torch.tensor([0.6, 0.3, 0.1]), rtol=0, atol=0.03)


def test_drnas_draws_from_the_dirichlet_whose_mean_it_gives_without_training() -> None:
    torch.manual_seed(0)
    alpha = torch.tensor([1.5, 0.0, -0.5])
    drawn = torch.stack([DrNAS()(alpha, True, None) for _ in range(8000)])
    mean = DrNAS()(alpha, False, None)
    torch.testing.assert_close(drawn.mean(0), mean, rtol=0, atol=0.01)
    total = (torch.nn.functional.elu(alpha) + 1).sum()
    torch.testing.assert_close(drawn.var(0), mean * (1 - mean) / (total + 1), rtol=0.1, atol=0.0)


LONG = ("darts-partial", "ofa", "gpt", "toy-cell")  # have the layers of others


@pytest.mark.parametrize("space", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in SPACES])
def test_every_method_searches_every_space(tmp_path: Path, space: str) -> None:
    build, data = SPACES[space]
    for method in GRADIENT_METHODS:
        if method == "pc-darts" and space != "darts-partial":
            continue
        options: dict[str, Any] = {"batch_size": 4, "steps": 2, "folder": tmp_path, "budget": 2, "bn_batches": 1}
        found = search_gradient(build, data(), method=method, **options)
        assert (found.mixture is None) == (method in SAMPLED)
        assert found.trained.chain.space.contains(found.subnet)
        assert found.scores["parameters"] == sum(p.numel() for p in found.extract().parameters())
        saved = json.loads((found.trained.run.path / "results" / "search" / "front.json").read_text())
        for member in saved["members"]:
            for name in ("parameters", "flops"):
                assert sum(layer[name] for layer in member["layers"]) == member["scores"][name]


def test_the_pick_meets_its_targets_within_two_percent(tmp_path: Path) -> None:
    for wanted in (2_282, 4_426):
        found = search(tmp_path, targets=f"parameters={wanted}")
        assert abs(found.scores["parameters"] / wanted - 1) <= 0.02


def test_a_target_moves_the_mixture_there(tmp_path: Path) -> None:
    def width(targets: str | tuple[str, ...]) -> float:
        fast = weft.Optimizer("adam", lr=0.05)
        return float(search(tmp_path, "darts", 60, targets=targets, architecture=fast).mixture["width"][1])

    assert width("parameters=890") < 0.4 < 0.6 < width("parameters=6802")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A short search, which validates its mixture."""
    return search(tmp_path_factory.mktemp("runs"), "darts", steps=4, validation=2)


def test_what_was_found_lies_in_the_run(found: Any) -> None:
    folder = found.trained.run.path / "results" / "search"
    told = json.loads((folder / "mixture.json").read_text())
    assert told["subnet"] == found.subnet.to_json()
    assert set(told["probabilities"]) == set(found.trained.chain.space.choices)
    front = json.loads((folder / "front.json").read_text())
    (member,) = front["members"]
    assert member["id"] == found.subnet.id
    values = found.subnet.values
    blocks = [f"block{at}" for at in range(int(values["depth"]))]
    assert [layer["block"] for layer in member["layers"]] == ["stem", *blocks, "head"]
    width = f"width={values['width']}"
    told = [width, *(f"{width} ratio{at}={values[f'ratio{at}']}" for at in range(len(blocks))), width]
    assert [layer["choice"] for layer in member["layers"]] == told
    assert not any(layer["shared"] for layer in member["layers"])
    assert [one["name"] for one in front["choices"]] == list(found.trained.chain.space.choices)


def test_what_was_found_can_be_trained_again_and_searched_further(found: Any) -> None:
    again = weft.retrain(found.front.best(), steps=3)
    assert again.step.steps == 3
    more = weft.search(found.trained, maximize="accuracy", minimize="parameters", budget=5)
    assert len(more) >= 1


def test_the_mixture_is_validated_and_is_no_score_itself(found: Any) -> None:
    told = [event for event in found.trained.run.events.read() if event["event"] == "validation"]
    assert [(event["step"], event["pick"]) for event in told] == [(1, "mixture"), (3, "mixture")]
    assert all(set(event["scores"]) == {"loss", "accuracy"} for event in told)
    assert all(0 <= event["scores"]["accuracy"] <= 1 for event in told)


def test_a_search_tells_at_its_start_what_the_numbers_of_its_mixture_stand_for(found: Any) -> None:
    events = list(found.trained.run.events.read())
    told = {one["name"]: one["options"] for one in events[0]["choices"]}
    assert told == {"width": [8, 16], "depth": [1, 2, 3], **{f"ratio{at}": [2, 3.5] for at in range(3)}}
    steps = [event["mixture"] for event in events if event["event"] == "step"]
    start = 0
    for options in told.values():  # in the order of the numbers: those of each choice come to 1
        assert all(sum(one[start : start + len(options)]) == pytest.approx(1.0, abs=1e-4) for one in steps)
        start += len(options)
    assert all(len(one) == start for one in steps)


def test_a_search_on_two_stages_finds_what_one_finds(tmp_path: Path) -> None:
    one, two = (search(tmp_path, "drnas", microbatches=2, stages=n, validation=6) for n in (1, 2))
    for kind, field in (("validation", "scores"), ("started", "choices")):
        first, second = ([e[field] for e in f.trained.run.events.read() if e["event"] == kind] for f in (one, two))
        assert first == second
        assert first
    assert one.trained.fingerprint == two.trained.fingerprint
    assert (one.subnet, one.scores) == (two.subnet, two.scores)
    for name in one.mixture.names:
        assert torch.equal(one.mixture[name], two.mixture[name])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"method": 3}, "method is a name such as 'drnas', or a method itself, not 3"),
        ({"steps": "20"}, "steps='20': a whole number, 1 or more"),
        ({"weight_warmup_steps": "5"}, "weight_warmup_steps is a whole number of 0 or more"),
        ({"weight_warmup_steps": 30}, "of 20 steps, 30 of which train the weights alone, none trains the architecture"),
        ({"target": "parameters=5"}, "unknown option 'target'; did you mean 'targets'"),
        ({"recalibrate": 1}, "the option 'recalibrate' is called 'bn_batches' now"),
        ({"warmup_weights": 1}, "the option 'warmup_weights' is called 'weight_warmup_steps' now"),
        ({"step": 3}, "unknown option 'step'; did you mean 'steps'"),
        ({"method": "sandwich", "microbatches": 2}, "a step of 'sandwich' is 4 micro-batches"),
    ],
)
def test_wrong_arguments_have_their_line(wrong: dict[str, Any], said: str, tmp_path: Path) -> None:
    given = {"method": "drnas", "steps": 20, "folder": tmp_path, **wrong}
    with pytest.raises(weft.WeftError, match=re.escape(said)):
        search_gradient(layered, weft.data.digits(), **given)
    assert not any(tmp_path.iterdir())


def test_methods_that_decide_quickly_warm_up_and_learn_at_a_rate_that_suits_the_run() -> None:
    darts, drnas = make_gradient_method("darts"), make_gradient_method("drnas")
    assert (default_warmup(darts, 500), default_warmup(drnas, 500)) == (0, 150)
    rates = [default_optimizer(drnas, steps).options["lr"] for steps in (100, 500, 1500, 50_000)]
    assert rates == [0.03, 0.03, 0.01, 0.003]
    assert default_optimizer(darts, 500).options["lr"] == 0.003


def test_a_loss_of_ones_own_teaches_in_a_sandwich(tmp_path: Path) -> None:
    seen: list[int] = []

    def taught(outputs: torch.Tensor, lesson: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append(len(outputs))
        return weft.cross_entropy(outputs, batch)

    search_gradient(layered, weft.data.digits(), method="sandwich", steps=2, distill=taught, budget=2, folder=tmp_path)
    assert len(seen) == 2 * 3


def test_what_a_mixture_gets_wrong_is_told_before_it_trains(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "weft.search"):
        search_gradient(chunked, weft.data.digits(), method="darts", steps=2, folder=tmp_path, run="wrong")
        assert "block 'cut' under a mixture that is certain of 'width=4'" in caplog.text
        caplog.clear()
        search_gradient(layered, weft.data.digits(), method="darts", steps=2, folder=tmp_path, run="right")
        assert not caplog.text


class Chunked(weft.elastic.Module):
    """Cuts features whose number varies into halves."""

    def __init__(self, space: weft.Space, width: Any) -> None:
        super().__init__()
        self.up = weft.elastic.Linear(space, 64, 2 * width)
        self.down = weft.elastic.Linear(space, width, 10)

    def forward(self, x: torch.Tensor, pick: Any) -> torch.Tensor:
        first, second = self.up(x.flatten(1), pick).chunk(2, -1)
        return self.down(first * torch.sigmoid(second), pick)


def chunked() -> Chain:
    space = weft.Space()
    return weft.Chain(weft.Elastic(space, "cut", partial(Chunked, space, space.integer("width", [4, 8]))))
