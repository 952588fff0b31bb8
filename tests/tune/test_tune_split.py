"""A trial that is split over two real processes learns what one device would, and goes on after it was killed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.multiprocessing import start_processes

import weft
from weft.data import Data, digits
from weft.errors import TuneError
from weft.plan.planner import plan
from weft.tune.executors.processes import open_rendezvous
from weft.tune.fit.fit import WHOLE_GRADIENTS
from weft.tune.fit.loss_model import LossModule, example_batch
from weft.tune.jobs import Fit
from weft.tune.recipe import Recipe, TrialConfig, trial_config
from weft.tune.training.distributed import train_split
from weft.tune.training.trainer import Pruned, Result, train

STEPS, BATCH = 6, 32


def build(params: Mapping[str, Any]) -> nn.Module:
    width = int(params["width"])
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1)) for _ in range(3)]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), *layers, nn.Linear(width, 10))


class Hidden(nn.Module):
    """A running mean that the state_dict does not have, and an extra state that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(64), persistent=False)

    def get_extra_state(self) -> Any:
        return {"since": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"since": 3}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.5).add_(x.detach().mean(0))
        return x - self.mean


def hiding(params: Mapping[str, Any]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), Hidden(), nn.ReLU(), nn.Linear(64, 64), Hidden(), MLP())


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Idle(nn.Linear):
    """A layer with a parameter that no forward reads."""

    def __init__(self) -> None:
        super().__init__(64, 64)
        self.idle = nn.Parameter(torch.zeros(3))


def idle(params: Mapping[str, Any]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), Idle(), nn.ReLU(), MLP())


def frozen(params: Mapping[str, Any]) -> nn.Module:
    """The first of two stages trains nothing."""
    model = build(params)
    for parameter in list(model.parameters())[:6]:
        parameter.requires_grad_(False)
    return model


MODELS = {"plain": build, "hiding": hiding, "idle": idle, "frozen": frozen}
ODD = [("hiding", 1), ("hiding", 2), ("idle", 2), ("frozen", 2)]


def data() -> Data:
    return digits()


def trial(model: str = "plain", **options: Any) -> TrialConfig:
    recipe = Recipe(
        model=MODELS[model],
        data=data,
        metrics={"accuracy": weft.accuracy},
        objectives=("loss", "accuracy"),
        steps=STEPS,
        batch_size=BATCH,
        report_every=2,
        optimizer_options={"lr": 1e-2},
        **options,
    )
    return trial_config(recipe, {"width": 64})


def split(stages: int, microbatches: int, precision: str = "fp32", model: str = "plain") -> Fit:
    made = trial(model, precision=precision)
    batch = example_batch(made, BATCH, "cpu")
    whole = LossModule(made, made.bare(), tuple(batch))
    found = plan(
        whole, whole.tensors(batch), "cpu", devices=2, stages=stages, microbatches=microbatches, compare=False,
        dtype={"fp32": "float32", "bf16": "bfloat16"}[precision],
    )  # fmt: skip
    assert not found.unsupported()
    return Fit("split", BATCH // microbatches, microbatches, 2, 0, None, "for the test", found.to_json())


@dataclass(frozen=True)
class Case:
    fit: Fit
    folder: str
    meeting: dict[str, str]
    stop_at: int | None = None
    precision: str = "fp32"
    memory: int | None = None
    model: str = "plain"


def process(rank: int, cases: dict[str, Case], out: str) -> None:
    torch.set_num_threads(1)
    told: dict[str, torch.Tensor] = {}
    for name, case in cases.items():
        os.environ |= {**case.meeting, "RANK": str(rank)}
        reports: list[int] = []

        def report(
            step: int, values: tuple[float, ...], reports: list[int] = reports, stop: int | None = case.stop_at
        ) -> bool:
            reports.append(step)
            return step == stop

        result: Result | None
        try:
            made = trial(case.model, precision=case.precision)
            given: Any = {"device": "cpu", "directory": Path(case.folder), "report": report, "memory": case.memory}
            result = train_split(made, case.fit, **given)
        except Pruned as problem:
            result = problem.result
        assert result is not None
        assert bool(reports) == (rank == 0)
        told |= {f"{name}.values": torch.tensor(result.values), f"{name}.losses": torch.tensor(result.losses)}
        told[f"{name}.peak"] = torch.tensor(result.peak or 0)
    save_file(told, f"{out}/{rank}.safetensors")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    """What both processes came to in each case; they are started once, since that takes longest."""
    out = tmp_path_factory.mktemp("split")
    stores = []

    def rendezvous() -> dict[str, str]:
        variables, store = open_rendezvous(2)
        stores.append(store)
        return variables

    meshed, staged = split(1, 1), split(2, 2)
    cases = {
        "meshed": Case(meshed, str(out / "meshed"), rendezvous()),
        "staged": Case(staged, str(out / "staged"), rendezvous()),
        "stopped": Case(staged, str(out / "stopped"), rendezvous(), stop_at=4),
        "resumed": Case(staged, str(out / "stopped"), rendezvous()),
        "counted": Case(meshed, str(out / "counted"), rendezvous(), memory=2**40),
        "meshed16": Case(split(1, 1, "bf16"), str(out / "meshed16"), rendezvous(), precision="bf16"),
        "staged16": Case(split(2, 2, "bf16"), str(out / "staged16"), rendezvous(), precision="bf16"),
    }
    for model, count in ODD:
        name, fit = f"{model}{count}", split(count, count, model=model)
        cases[name] = Case(fit, str(out / name), rendezvous(), model=model)
        cases[f"{name}.stopped"] = Case(fit, str(out / f"{name}.cut"), rendezvous(), stop_at=4, model=model)
        cases[f"{name}.resumed"] = Case(fit, str(out / f"{name}.cut"), rendezvous(), model=model)
    start_processes(process, (cases, str(out)), nprocs=2, start_method="spawn")
    return [load_file(out / f"{rank}.safetensors") for rank in range(2)]


@pytest.mark.parametrize(("name", "microbatches"), [("meshed", 1), ("staged", 2)])
def test_two_processes_reach_the_losses_of_one_device(
    ran: list[dict[str, torch.Tensor]], tmp_path: Path, name: str, microbatches: int
) -> None:
    fit = Fit("whole", BATCH // microbatches, microbatches, 1, 0, None, "")
    alone = train(trial(), fit, device="cpu", directory=tmp_path, report=lambda step, values: False)
    for one in ran:
        torch.testing.assert_close(one[f"{name}.losses"], torch.tensor(alone.losses), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(one[f"{name}.values"], torch.tensor(alone.values), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "microbatches"), [("meshed16", 1), ("staged16", 2)])
def test_in_bf16_two_processes_compute_what_one_device_does(
    ran: list[dict[str, torch.Tensor]], tmp_path: Path, name: str, microbatches: int
) -> None:
    """To the last bit in stages, where each operator computes as it does alone; where operators are cut, their parts
    are rounded before they are added."""
    fit = Fit("whole", BATCH // microbatches, microbatches, 1, 0, None, "")
    alone, full = (
        train(trial(precision=one), fit, device="cpu", directory=tmp_path / one, report=lambda step, values: False)
        for one in ("bf16", "fp32")
    )
    tolerance = 0.0 if name == "staged16" else 2e-2
    assert alone.losses != full.losses
    for one in ran:
        for key, wanted in (("losses", alone.losses), ("values", alone.values)):
            torch.testing.assert_close(one[f"{name}.{key}"], torch.tensor(wanted), rtol=tolerance, atol=tolerance)


def test_a_mesh_takes_no_more_than_its_fit_says(ran: list[dict[str, torch.Tensor]]) -> None:
    """That is the planner's figure, with what is gathered at once, and two gradients of the largest parameter."""
    planned = split(1, 1).plan
    assert planned is not None
    largest = max(parameter.nbytes for parameter in trial().bare().parameters())
    needed = planned["cost"]["memory"] + WHOLE_GRADIENTS * largest
    most = max(int(one["counted.peak"]) for one in ran)
    assert most <= needed <= 1.25 * most


def test_a_split_trial_that_ended_early_goes_on_from_its_checkpoint(ran: list[dict[str, torch.Tensor]]) -> None:
    for one in ran:
        assert len(one["stopped.losses"]) == 4
        assert torch.equal(one["resumed.losses"], one["staged.losses"])
        assert torch.equal(one["resumed.values"], one["staged.values"])


@pytest.mark.parametrize(("model", "count"), ODD)
def test_a_split_trial_is_evaluated_with_hidden_buffers_and_goes_on_where_some_parameters_do_not_learn(
    ran: list[dict[str, torch.Tensor]], tmp_path: Path, model: str, count: int
) -> None:
    name, fit = f"{model}{count}", Fit("whole", BATCH // count, count, 1, 0, None, "")
    alone = train(trial(model), fit, device="cpu", directory=tmp_path, report=lambda step, values: False)
    for one in ran:
        assert len(one[f"{name}.stopped.losses"]) == 4
        for key, wanted in (("losses", alone.losses), ("values", alone.values)):
            assert torch.equal(one[f"{name}.resumed.{key}"], one[f"{name}.{key}"])
            torch.testing.assert_close(one[f"{name}.{key}"], torch.tensor(wanted), rtol=1e-5, atol=1e-6)


def test_batch_norms_are_not_cut_into_micro_batches_unless_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables, _store = open_rendezvous(1)
    for name, value in {**variables, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    recipe = Recipe(model=lambda params: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64)), data=data, batch_size=BATCH)
    fit = Fit("split", BATCH // 2, 2, 2, 0, None, "for the test", {})
    with pytest.raises(TuneError, match=f"batch norm '1' would see {BATCH // 2} samples at a time"):
        train_split(trial_config(recipe, {}), fit, device="cpu", directory=tmp_path, report=lambda step, values: False)
