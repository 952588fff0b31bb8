"""A trial that is split over two real processes learns what one device would, and goes on after it was killed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import Idle
from safetensors.torch import load_file, save_file
from torch import nn
from torch.multiprocessing import start_processes
from trials import config_of, fit_of, run

from weft.plan.planner import plan
from weft.tune.executors.worker import open_rendezvous
from weft.tune.fit.fit import uncounted_gradients
from weft.tune.fit.peaks import LossModule, example_batch
from weft.tune.jobs import Fit
from weft.tune.recipe import TrialConfig
from weft.tune.training.distributed import train_split
from weft.tune.training.trainer import Pruned, Result

BATCH = 32


def plain(params: Mapping[str, Any]) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1)) for _ in range(3)]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), *layers, nn.Linear(64, 10))


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


def hiding(params: Mapping[str, Any], end: Any = None) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(64, 64), Hidden(), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 10) if end is None else end)


def idle(params: Mapping[str, Any]) -> nn.Module:
    """No forward reads some of its parameters."""
    return hiding(params, Idle())


def frozen(params: Mapping[str, Any]) -> nn.Module:
    """The first of two stages trains nothing."""
    model = plain(params)
    model[:4].requires_grad_(False)  # type: ignore[index]
    return model


MODELS = {"plain": plain, "hiding": hiding, "idle": idle, "frozen": frozen}
CUT = [("staged", 2, "plain"), ("hiding", 1, "hiding"), ("idle", 2, "idle"), ("frozen", 2, "frozen")]
"""Cases that are stopped and go on: a name, the stages and the model."""


def trial(model: str = "plain", precision: str = "fp32") -> TrialConfig:
    return config_of(
        MODELS[model], steps=4, batch_size=BATCH, report_every=2, precision=precision, objectives=("loss", "accuracy")
    )


@cache
def split(stages: int, precision: str = "fp32", model: str = "plain") -> Fit:
    """A plan for two devices, with as many micro-batches as stages."""
    made = trial(model, precision)
    batch = example_batch(made, BATCH, "cpu")
    whole = LossModule(made, made.bare(), tuple(batch))
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[precision]
    given: dict[str, Any] = {"devices": 2, "stages": stages, "microbatches": stages, "compare": False, "dtype": dtype}
    found = plan(whole, whole.tensors(batch), "cpu", **given)
    assert not found.unsupported()
    return Fit("split", BATCH // stages, stages, 2, 0, None, "for the test", found.to_json())


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

        def report(step: int, values: Any, reports: list[int] = reports, stop: int | None = case.stop_at) -> bool:
            reports.append(step)
            return step == stop

        made = trial(case.model, case.precision)
        given: Any = {"device": "cpu", "directory": Path(case.folder), "report": report, "memory": case.memory}
        try:
            result: Any = train_split(made, case.fit, **given)
        except Pruned as problem:
            result = problem.result
        assert bool(reports) == (rank == 0)
        told |= {f"{name}.values": torch.tensor(result.values), f"{name}.losses": torch.tensor(result.losses)}
        told[f"{name}.peak"] = torch.tensor(result.peak or 0)
    save_file(told, f"{out}/{rank}.safetensors")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    """What both processes came to in each case; they are started once, since that takes longest."""
    out = tmp_path_factory.mktemp("split")
    cases: dict[str, Case] = {}
    stores = []

    def add(name: str, fit: Fit, folder: str = "", **more: Any) -> None:
        variables, store = open_rendezvous(2)
        stores.append(store)
        cases[name] = Case(fit, str(out / (folder or name)), variables, **more)

    for name, stages in (("meshed", 1), ("staged", 2)):
        add(name, split(stages), memory=2**40)
        add(f"{name}16", split(stages, "bf16"), precision="bf16")
    for name, stages, model in CUT:
        fit = split(stages, model=model)
        if name not in cases:
            add(name, fit, model=model)
        add(f"{name}.stopped", fit, f"{name}.cut", stop_at=2, model=model)
        add(f"{name}.resumed", fit, f"{name}.cut", model=model)
    start_processes(process, (cases, str(out)), nprocs=2, start_method="spawn")
    return [load_file(out / f"{rank}.safetensors") for rank in range(2)]


def check_near(ran: list[dict[str, torch.Tensor]], name: str, wanted: Result, **tolerance: float) -> None:
    for one in ran:
        torch.testing.assert_close(one[f"{name}.losses"], torch.tensor(wanted.losses), **tolerance)
        torch.testing.assert_close(one[f"{name}.values"], torch.tensor(wanted.values), **tolerance)


@pytest.mark.parametrize(("name", "stages", "model"), [("meshed", 1, "plain"), *CUT])
def test_two_processes_reach_the_losses_of_one_device_also_where_one_was_killed(
    ran: list[dict[str, torch.Tensor]], tmp_path: Path, name: str, stages: int, model: str
) -> None:
    alone, _ = run(trial(model), tmp_path, fit_of(BATCH // stages, batch=BATCH))
    check_near(ran, name, alone, rtol=1e-5, atol=1e-6)
    for one in ran if name != "meshed" else ():
        assert len(one[f"{name}.stopped.losses"]) == 2
        assert torch.equal(one[f"{name}.resumed.losses"], one[f"{name}.losses"])
        assert torch.equal(one[f"{name}.resumed.values"], one[f"{name}.values"])


@pytest.mark.parametrize(("name", "stages", "tolerance"), [("meshed16", 1, 2e-2), ("staged16", 2, 0.0)])
def test_in_bf16_two_processes_compute_what_one_device_does(
    ran: list[dict[str, torch.Tensor]], tmp_path: Path, name: str, stages: int, tolerance: float
) -> None:
    """To the last bit in stages, where each operator computes as it does alone; where operators are cut, their parts
    are rounded before they are added."""
    fit = fit_of(BATCH // stages, batch=BATCH)
    alone, full = (run(trial(precision=one), tmp_path / one, fit)[0] for one in ("bf16", "fp32"))
    assert alone.losses != full.losses
    check_near(ran, name, alone, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "stages"), [("meshed", 1), ("staged", 2)])
def test_a_split_takes_no_more_than_its_fit_says(ran: list[dict[str, torch.Tensor]], name: str, stages: int) -> None:
    """That is the planner's figure, with what is gathered at once, and the gradients that it does not count."""
    planned = split(stages).plan
    assert planned is not None
    needed = planned["cost"]["memory"] + uncounted_gradients(trial().bare(), 2, stages)
    most = max(int(one[f"{name}.peak"]) for one in ran)
    assert most <= needed <= 1.2 * most
