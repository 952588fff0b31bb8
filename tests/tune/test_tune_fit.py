"""How a candidate fits a device: the first way that does, as a function of the candidate and of nominal memory."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from weft.data import Data, Tensors
from weft.errors import TuneError
from weft.tune.fit.fit import MARGIN, fit
from weft.tune.fit.peaks import StepMemory, step_memory
from weft.tune.jobs import Fit
from weft.tune.recipe import Recipe, TrialConfig, trial_config
from weft.tune.training.memory_limit import OutOfMemory
from weft.tune.training.trainer import TrialOptimizer, train

KIB, BATCH = 2**10, 64


def build(params: Mapping[str, Any]) -> nn.Module:
    width = int(params["width"])
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.GELU(), nn.GELU()) for _ in range(6)]
    return nn.Sequential(nn.Linear(8, width), *blocks, nn.Linear(width, 1))


def samples(*shape: int) -> Data:
    x = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape).sin()
    one = Tensors(x=x, y=x.flatten(1)[:, :1])
    return Data("samples", one, one)


DATA, PICTURES, MANY = samples(256, 8), samples(512, 16, 16), samples(4096, 1, 16, 16)


def heavy(params: Mapping[str, Any]) -> nn.Module:
    """Most of its memory is weights: two devices have room for it where one has none."""
    middle = params["middle"]() if "middle" in params else nn.Identity()
    blocks = [nn.Sequential(nn.Linear(192, 192), nn.GELU()) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 192), middle, *blocks, nn.Linear(192, 1))


def loss(outputs: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return (outputs - batch["y"]).square().mean()


def candidate(model: Any = build, params: Any = None, **fields: Any) -> TrialConfig:
    given: dict[str, Any] = {"data": DATA, "loss": loss, "steps": 3, "batch_size": BATCH}
    recipe = Recipe(model=model, **given | {"optimizer_options": {"lr": 1e-2}} | fields)
    return trial_config(recipe, {"width": 32} if params is None else params)


def heavy_candidate(middle: Any = nn.Identity) -> tuple[TrialConfig, int]:
    """A candidate, and memory of a device that does not suffice, but that of two does."""
    made = candidate(heavy, {"middle": middle})
    return made, int(needed(made) * 0.7)


def needed(made: TrialConfig) -> int:
    return fit(made, 1, 2**30, "cpu").memory


def peak(made: TrialConfig, found: Fit, folder: Path, memory: int | None = None) -> int:
    """Of a training under a limit of what was estimated."""
    limit = found.memory if memory is None else memory
    done = train(made, found, device="cpu", memory=limit, directory=folder, report=lambda step, values: False)
    assert done.peak is not None
    return done.peak


def test_a_batch_is_left_whole_or_cut_into_as_few_equal_parts_as_fit() -> None:
    whole = fit(candidate(), 1, 2**30, "cpu")
    assert (whole.strategy, whole.micro_batch, whole.microbatches, whole.devices) == ("whole", BATCH, 1, 1)
    found = fit(candidate(), 1, int(whole.memory * 0.8), "cpu")
    assert found.strategy == "accumulate"
    assert fit(candidate(params={"width": 32, "lr": 0.5, "seed": 3}), 1, int(whole.memory * 0.8), "cpu") == found
    assert found.micro_batch * found.microbatches >= BATCH > found.micro_batch * (found.microbatches - 1)
    assert found.memory <= whole.memory * 0.8 * (1 - MARGIN)
    assert "the whole batch, 64 samples, it takes" in found.explanation


def test_less_memory_never_gives_a_larger_micro_batch() -> None:
    made = candidate()
    fits = [fit(made, 1, int(needed(made) * share), "cpu") for share in (1.2, 0.9, 0.8, 0.7, 0.6)]
    sizes = [found.micro_batch for found in fits if found.strategy in ("whole", "accumulate")]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) > 2


def first(params: Mapping[str, Any]) -> nn.Module:
    return nn.Sequential(nn.AvgPool1d(512), nn.Flatten(), build(params))


@pytest.mark.parametrize("wide", [False, True])  # samples that take more than what the model makes of them
def test_the_estimate_is_what_the_training_takes(wide: bool, tmp_path: Path) -> None:
    """Trained under a limit of what was estimated it does not exceed it, and is within 3 %."""
    made = candidate(first, data=samples(256, 8, 512)) if wide else candidate()
    for share in (1.2,) if wide else (1.2, 0.75, 0.6):
        found = fit(made, 1, int(needed(made) * share), "cpu")
        assert 0.97 * found.memory <= peak(made, found, tmp_path / str(share)) <= found.memory
        with pytest.raises(OutOfMemory):
            peak(made, found, tmp_path / "no", int(found.memory * 0.96))


class Last(nn.Module):
    def __init__(self, cells: nn.Module, width: int) -> None:
        super().__init__()
        self.cells, self.head = cells, nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0][:, -1])


class Views(nn.Module):
    """Judged by the mean over views of each sample, and trained with one."""

    def __init__(self, many: int = 8) -> None:
        super().__init__()
        self.body, self.many = nn.Sequential(nn.Flatten(), nn.Linear(256, 4), nn.ReLU(), nn.Linear(4, 1)), many

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return self.body(x)
        return self.body(torch.cat([x] * self.many)).view(self.many, len(x), 1).mean(0)


MODELS = {
    "lstm": lambda params: Last(nn.LSTM(16, 48, 2, batch_first=True, bidirectional=True), 96),
    "wide layer": lambda params: nn.Sequential(nn.Flatten(), nn.Linear(256, 128), nn.Linear(128, 1)),
    "views": lambda params: Views(),
}


@pytest.mark.parametrize(
    ("model", "changed", "share"),
    [
        ("lstm", {}, 0.97),
        ("lstm", {"precision": "bf16"}, 0.9),
        ("wide layer", {"optimizer": "radam"}, 0.97),
        ("wide layer", {"optimizer": "adafactor"}, 0.97),
        ("wide layer", {"optimizer": "asgd"}, 0.8),  # as when it averages, which it does after a million steps
        ("wide layer", {"optimizer": "nadam"}, 0.97),
        ("views", {}, 0.97),
        ("views", {"report_every": 2}, 0.97),
    ],
)
def test_what_kernels_keep_what_later_steps_take_and_evaluations_are_estimated_too(
    model: str, changed: dict[str, Any], share: float, tmp_path: Path
) -> None:
    made = candidate(MODELS[model], {}, data=PICTURES, optimizer_options={}, **{"steps": 8} | changed)
    found = fit(made, 1, 2**30, "cpu")
    assert share * found.memory <= peak(made, found, tmp_path) <= found.memory


def on_a_gpu(model: Any, way: Any = "whole", accumulate: bool = False, **changed: Any) -> StepMemory:
    made = candidate(model, {}, **{"data": MANY, "batch_size": 4096, "steps": 8} | changed)
    return step_memory(made, way, "h200", accumulate=accumulate)


@pytest.mark.parametrize(("steps", "precision"), [(4, "bf16"), (8, "fp32")])  # without and with graphs
def test_an_evaluation_that_takes_more_than_a_step_counts_on_a_gpu(precision: str, steps: int) -> None:
    """Eight views of 4096 samples take 32 MiB at once beside the batch, and in bf16 half as much more while cast."""

    def at(views: int, samples: int = 4096, **changed: Any) -> int:
        found = on_a_gpu(lambda params: Views(views), steps=steps, precision=precision, **changed)
        return found.bytes_at(samples)

    mib, more = 2**20, 16 * 2**20 if precision == "bf16" else 0
    plain = at(1)
    assert plain + 28 * mib <= at(8) <= plain + 36 * mib + more  # segments are rounded
    assert at(8, 2048) < at(8) - 10 * mib
    assert at(8, report_every=2) == at(8) + 4096 * 257 * 4  # the batch that training goes on with


def test_no_micro_batch_is_larger_than_what_can_be_evaluated() -> None:
    found = on_a_gpu(MODELS["views"], accumulate=True)
    room = found.bytes_at(1000)
    largest = found.largest(room)
    assert 1000 <= largest < 4096
    assert found.fits(largest, room)
    assert not found.fits(largest + 1, room)


def test_a_candidate_is_traced_once_for_evaluation_however_many_strategies_are_tried() -> None:
    seen = []

    class Seen(Views):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training:
                seen.append(len(x))
            return super().forward(x)

    made = candidate(lambda params: Seen(), {}, data=MANY, steps=8, batch_size=4096)
    for way in ("whole", "recompute", "offload"):
        for accumulate in (False, True):
            step_memory(made, way, "h200", accumulate=accumulate).bytes_at(4096)  # type: ignore[arg-type]
    assert seen == [4096, 4096]  # two steps of one trace


class Masked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 1)
        self.mask = torch.ones(8, 8).tril()[3]
        self.share = float(self.mask.sum()) / 8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.mask) / self.share


class Asking(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if x.abs().mean().item() > 0 else 1)


@pytest.mark.parametrize(
    "parts",
    [
        lambda: [*(nn.Dropout(rate.item()) for rate in torch.linspace(0, 0.1, 3)), build({"width": 8})],
        lambda: [nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), build({"width": 8})],
        lambda: [nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(1)],
        lambda: [nn.utils.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 1)],
        lambda: [Masked()],
        lambda: [Asking(8, 1)],
    ],
)
def test_models_that_read_values_as_they_are_built_are_estimated(parts: Any, tmp_path: Path) -> None:
    made = candidate(lambda params: nn.Sequential(*parts()), {}, optimizer_options={})
    found = fit(made, 1, 2**30, "cpu")
    assert 0 <= found.memory - peak(made, found, tmp_path) <= 8 * KIB
    assert fit(made, 1, 2**30, "h200").strategy == "whole"


def test_complex_weights_have_an_optimizer_that_takes_them() -> None:
    def model(params: Mapping[str, Any]) -> nn.Module:
        found = nn.Linear(8, 1)
        found.turn = nn.Parameter(torch.ones(8, dtype=torch.cfloat))
        return found

    made = candidate(model, {})
    updater = TrialOptimizer(made.optimizer, dict(made.build().named_parameters()))
    assert not any(group.get("fused") for group in updater.optimizer(updater.parameters["turn"])[0].param_groups)
    assert [fit(made, 1, 2**30, kind).strategy for kind in ("cpu", "h200")] == ["whole", "whole"]


def test_batch_norms_forbid_micro_batches_unless_asked_for() -> None:
    made = candidate(lambda params: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), build(params)))
    memory = int(needed(made) * 0.8)
    with pytest.raises(TuneError, match=r"batch norm '1' forbids micro-batches"):
        fit(made, 1, memory // 2, "cpu")
    assert fit(replace(made, microbatch_batchnorm=True), 1, memory, "cpu").strategy == "accumulate"


def test_a_split_candidate_with_batch_norms_has_one_micro_batch_unless_asked_for() -> None:
    def normed(params: Mapping[str, Any]) -> nn.Module:
        head = [nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)]
        return nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.GELU(), *head)

    made = candidate(normed, {}, batch_size=256)
    split, memory = ("split", 1), int(needed(made) * 0.5)  # nothing before a split is tried
    found = fit(made, 2, int(memory * 1.2), "cpu", split)
    assert (found.strategy, found.microbatches, found.micro_batch) == ("split", 1, 256)
    with pytest.raises(TuneError, match=r"over 2 devices, where batch norm '1' forbids micro-batches: no plan fits"):
        fit(made, 2, memory, "cpu", split)
    found = fit(replace(made, microbatch_batchnorm=True), 2, memory, "cpu", split)
    assert (found.strategy, found.microbatches * found.micro_batch) == ("split", 256)
    assert found.microbatches > 1


class Counter(nn.Module):
    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x / self.count


class Extra(nn.Module):
    """Counts in its extra state alone."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = itertools.count()

    def get_extra_state(self) -> Any:
        return {"count": next(copy.copy(self.seen))}

    def set_extra_state(self, state: Any) -> None:
        self.seen = itertools.count(state["count"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        next(self.seen)
        return x


class Noisy(nn.Module):
    """Draws on the host, which a graph would do once and for all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 + random.random())


class Caching(nn.Module):
    """Makes a mask once, and remembers what it computed last."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: torch.Tensor | None = None
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones(x.shape[1])
        self.last = x * self.mask
        return self.last


@pytest.mark.parametrize("part", [Caching, nn.Identity])
def test_what_does_not_fit_one_device_is_split_over_two(part: Any) -> None:
    made, memory = heavy_candidate(part)
    found = fit(made, 2, memory, "cpu")
    assert (found.strategy, found.devices) == ("split", 2)
    assert found.plan is not None
    assert "split over 2 devices" in found.explanation


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (Counter, "'1.count' of its model changes as it trains"),
        (Extra, "'1._extra_state' of its model changes as it trains"),
        (Noisy, "its model draws from Python's or NumPy's generator"),
    ],
)
def test_a_model_that_does_what_no_graph_would_is_not_split_and_told_why(part: Any, why: str) -> None:
    made, memory = heavy_candidate(part)
    with pytest.raises(TuneError, match=f"it cannot be split: {why}") as refused:
        raise TuneError(fit(made, 2, memory, "cpu").explanation)  # whether it fits another way or nowhere
    assert "split over" not in str(refused.value)


def test_what_took_more_than_its_fit_goes_on_down_the_list_and_ends_with_the_figures() -> None:
    made, memory = heavy_candidate()
    ways: list[tuple[Any, int]] = []
    refused = ""
    while not refused:
        try:
            found = fit(made, 4, memory, "cpu", ways[-1] if ways else None)
            ways.append((found.strategy, found.devices))
        except TuneError as problem:
            refused = str(problem)
    assert "fits nowhere, with 4 devices" in refused
    assert "it took more than" in refused
    order = ["whole", "accumulate", "recompute", "split", "offload"]
    assert [(order.index(way), degree) for way, degree in ways] == sorted({(order.index(w), d) for w, d in ways})
    assert ways[:2] == [("split", 2), ("split", 4)]


def convolutions(params: Mapping[str, Any]) -> nn.Module:
    layers = [nn.Sequential(nn.Conv2d(*pair, 3, padding=1), nn.GELU()) for pair in pairwise((3, 64, 128, 64))]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1))


IMAGES: dict[str, Any] = {"data": samples(1024, 3, 32, 32), "batch_size": 1024}


def test_on_a_gpu_large_trials_of_many_steps_get_the_micro_batch_of_those_of_few() -> None:
    # Captures, which cannot give back what is cached, are for trials below 1 GiB alone.
    room = 3 * 2**30
    few, many = (on_a_gpu(convolutions, accumulate=True, steps=steps, **IMAGES) for steps in (3, 300))
    most = few.largest(room)
    assert many.largest(room) == most
    assert few.bytes_at(most) > room  # by giving back
    assert many.fits(most, room)
    assert not many.fits(round(1.02 * most), room)
    small = 2**29
    assert many.bytes_at(many.largest(small)) <= small < few.bytes_at(few.largest(small))


def test_on_a_gpu_a_batch_that_fits_by_giving_back_is_left_whole() -> None:
    made, found = candidate(convolutions, {}, steps=300, **IMAGES), on_a_gpu(convolutions, steps=300, **IMAGES)
    memory = int((found.bytes_at(1024) - 2**20 + found.context) / (1 - MARGIN))
    fitted = fit(made, 1, memory, "h200")
    assert (fitted.strategy, fitted.micro_batch) == ("whole", 1024)
    assert fitted.memory <= memory * (1 - MARGIN) - found.context < found.bytes_at(1024)
