"""How a candidate fits a device: the first way that does, as a function of the candidate and of nominal memory."""

from __future__ import annotations

import copy
import itertools
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


def heavy(params: Mapping[str, Any]) -> nn.Module:
    """Most of its memory is weights: two devices have room for it where one has none."""
    middle = params["middle"]() if "middle" in params else nn.Identity()
    blocks = [nn.Sequential(nn.Linear(192, 192), nn.GELU()) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 192), middle, *blocks, nn.Linear(192, 1))


def data() -> Data:
    numbers = torch.arange(256 * 8, dtype=torch.float32).reshape(256, 8).sin()
    one = Tensors(x=numbers, y=numbers.sum(1, keepdim=True))
    return Data("numbers", one, one)


def loss(outputs: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return (outputs - batch["y"]).square().mean()


def candidate(model: Any = build, params: Any = None, **fields: Any) -> TrialConfig:
    given: dict[str, Any] = {"data": data, "loss": loss, "steps": 3, "batch_size": BATCH}
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
    assert found.micro_batch * found.microbatches >= BATCH > found.micro_batch * (found.microbatches - 1)
    assert found.memory <= whole.memory * 0.8 * (1 - MARGIN)
    assert "the whole batch, 64 samples, it takes" in found.explanation


def test_less_memory_never_gives_a_larger_micro_batch() -> None:
    made = candidate()
    fits = [fit(made, 1, int(needed(made) * share), "cpu") for share in (1.2, 0.9, 0.8, 0.7, 0.6)]
    sizes = [found.micro_batch for found in fits if found.strategy in ("whole", "accumulate")]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) > 2


def wide() -> Data:
    """Samples that take more than what the model makes of them."""
    one = Tensors(x=torch.zeros(256, 8, 512), y=torch.zeros(256, 1))
    return Data("wide", one, one)


def first(params: Mapping[str, Any]) -> nn.Module:
    return nn.Sequential(nn.AvgPool1d(512), nn.Flatten(), build(params))


@pytest.mark.parametrize(("model", "source"), [(build, data), (first, wide)])
def test_the_estimate_is_what_the_training_takes(model: Any, source: Any, tmp_path: Path) -> None:
    """Trained under a limit of what was estimated it does not exceed it, and is within 3 %."""
    made = candidate(model, data=source)
    for share in (1.2, 0.75, 0.6) if model is build else (1.2,):
        found = fit(made, 1, int(needed(made) * share), "cpu")
        assert 0.97 * found.memory <= peak(made, found, tmp_path / str(share)) <= found.memory
        with pytest.raises(OutOfMemory):
            peak(made, found, tmp_path / "no", int(found.memory * 0.96))


def numbers() -> Data:
    made = torch.arange(512 * 256, dtype=torch.float32).reshape(512, 16, 16).sin()
    return Data("numbers", Tensors(x=made, y=made[:, 0, :1]), Tensors(x=made, y=made[:, 0, :1]))


class Last(nn.Module):
    def __init__(self, cells: nn.Module, width: int) -> None:
        super().__init__()
        self.cells, self.head = cells, nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0][:, -1])


def lstm(params: Mapping[str, Any]) -> nn.Module:
    return Last(nn.LSTM(16, 48, 2, batch_first=True, bidirectional=True), 96)


def wide_layer(params: Mapping[str, Any]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 128), nn.Linear(128, 1))


class Views(nn.Module):
    """Judged by the mean over views of each sample, and trained with one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(256, 4), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return self.body(x)
        return self.body(torch.cat([x] * 8)).view(8, len(x), 1).mean(0)


def views(params: Mapping[str, Any]) -> nn.Module:
    return Views()


@pytest.mark.parametrize(
    ("model", "changed", "share"),
    [
        (lstm, {}, 0.97),
        (lstm, {"precision": "bf16"}, 0.9),
        (wide_layer, {"optimizer": "radam"}, 0.97),
        (wide_layer, {"optimizer": "adafactor"}, 0.97),
        (wide_layer, {"optimizer": "asgd"}, 0.8),  # as when it averages, which it does after a million steps
        (wide_layer, {"optimizer": "nadam"}, 0.97),
        (views, {}, 0.97),
        (views, {"report_every": 2}, 0.97),
    ],
)
def test_what_kernels_keep_what_later_steps_take_and_evaluations_are_estimated_too(
    model: Any, changed: dict[str, Any], share: float, tmp_path: Path
) -> None:
    made = candidate(model, {}, data=numbers, optimizer_options={}, **{"steps": 8} | changed)
    found = fit(made, 1, 2**30, "cpu")
    assert share * found.memory <= peak(made, found, tmp_path) <= found.memory


class PlainViews(Views):
    """The same training, and nothing special in the evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@pytest.mark.parametrize(("steps", "precision"), [(4, "bf16"), (8, "fp32")])  # without and with graphs
def test_an_evaluation_that_takes_more_than_a_step_counts_on_a_gpu(precision: str, steps: int) -> None:
    """Eight views of 4096 samples take 32 MiB at once beside the batch, and in bf16 half as much more while cast."""

    def at(model: Any, samples: int = 4096, **changed: Any) -> int:
        made = candidate(model, {}, data=many, batch_size=4096, steps=steps, precision=precision, **changed)
        return step_memory(made, "whole", "h200", accumulate=False).bytes_at(samples)

    mib, more = 2**20, 16 * 2**20 if precision == "bf16" else 0
    plain = at(lambda params: PlainViews())
    assert plain + 28 * mib <= at(views) <= plain + 36 * mib + more  # segments are rounded
    assert at(views, 2048) < at(views) - 10 * mib
    assert at(views, report_every=2) == at(views) + 4096 * 257 * 4  # the batch that training goes on with


def test_no_micro_batch_is_larger_than_what_can_be_evaluated() -> None:
    found = step_memory(candidate(views, {}, data=many, steps=8, batch_size=4096), "whole", "h200", accumulate=True)
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

    made = candidate(lambda params: Seen(), {}, data=many, steps=8, batch_size=4096)
    for way in ("whole", "recompute", "offload"):
        for accumulate in (False, True):
            step_memory(made, way, "h200", accumulate=accumulate).bytes_at(4096)
    assert seen == [4096, 4096]  # two steps of one trace


def many() -> Data:
    one = Tensors(x=torch.zeros(4096, 1, 16, 16), y=torch.zeros(4096, 1))
    return Data("many", one, one)


def rates(params: Mapping[str, Any]) -> nn.Module:
    return nn.Sequential(*(nn.Dropout(rate.item()) for rate in torch.linspace(0, 0.1, 3)), build({"width": 8}))


def orthogonal(params: Mapping[str, Any]) -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), build({"width": 8}))


def lazy(params: Mapping[str, Any]) -> nn.Module:
    return nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(1))


def weight_norm(params: Mapping[str, Any]) -> nn.Module:
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 1))


class Masked(nn.Linear):
    def __init__(self, params: Any) -> None:
        super().__init__(8, 1)
        self.mask = torch.ones(8, 8).tril()[3]
        self.share = float(self.mask.sum()) / 8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.mask) / self.share


class Asking(nn.Linear):
    def __init__(self, params: Any) -> None:
        super().__init__(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if x.abs().mean().item() > 0 else 1)


@pytest.mark.parametrize("model", [rates, orthogonal, lazy, weight_norm, Masked, Asking])
def test_models_that_read_values_as_they_are_built_are_estimated(model: Any, tmp_path: Path) -> None:
    made = candidate(model, {}, optimizer_options={})
    found = fit(made, 1, 2**30, "cpu")
    assert 0 <= found.memory - peak(made, found, tmp_path) <= 8 * KIB
    assert fit(made, 1, 2**30, "h200").strategy == "whole"


def complex_weights(params: Mapping[str, Any]) -> nn.Module:
    model = Masked(params)
    model.turn = nn.Parameter(torch.ones(8, dtype=torch.cfloat))
    return model


def test_complex_weights_have_an_optimizer_that_takes_them() -> None:
    made = candidate(complex_weights, {})
    updater = TrialOptimizer(made.optimizer, dict(made.build().named_parameters()))
    assert not any(group.get("fused") for group in updater.optimizer(updater.parameters["turn"])[0].param_groups)
    assert [fit(made, 1, 2**30, kind).strategy for kind in ("cpu", "h200")] == ["whole", "whole"]


def test_batch_norms_forbid_micro_batches_unless_asked_for() -> None:
    made = candidate(lambda params: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), build(params)))
    memory = int(needed(made) * 0.8)
    with pytest.raises(TuneError, match=r"batch norm '1' forbids micro-batches"):
        fit(made, 1, memory // 2, "cpu")
    assert fit(replace(made, microbatch_batchnorm=True), 1, memory, "cpu").strategy == "accumulate"


def test_a_split_candidate_with_batch_norms_has_one_micro_batch() -> None:
    made, memory = heavy_candidate(lambda: nn.BatchNorm1d(192))
    found = fit(made, 4, int(memory * 0.85), "cpu")
    assert (found.strategy, found.microbatches, found.micro_batch) == ("split", 1, BATCH)
    with pytest.raises(TuneError, match=r"over 2 devices, where batch norm '1' forbids micro-batches: no plan fits"):
        fit(made, 2, int(memory * 0.75), "cpu")


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x / self.count


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


class Extra(nn.Module):
    """Counts in its extra state alone."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = itertools.count()

    def get_extra_state(self) -> Any:
        return {"count": copy.copy(self.seen).__next__()}

    def set_extra_state(self, state: Any) -> None:
        self.seen = itertools.count(state["count"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        next(self.seen)
        return x


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


def test_the_same_candidate_and_memory_give_the_same_fit() -> None:
    memory = int(needed(candidate()) * 0.7)
    other = candidate(params={"width": 32, "lr": 0.5, "seed": 3})
    assert fit(candidate(), 1, memory, "cpu") == fit(other, 1, memory, "cpu")


def images() -> Data:
    one = Tensors(x=torch.zeros(1024, 3, 32, 32), y=torch.zeros(1024, 1))
    return Data("images", one, one)


def convolutions(params: Mapping[str, Any]) -> nn.Module:
    layers = [nn.Sequential(nn.Conv2d(*pair, 3, padding=1), nn.GELU()) for pair in pairwise((3, 64, 128, 64))]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1))


def on_a_gpu(steps: int, accumulate: bool) -> tuple[TrialConfig, StepMemory]:
    made = candidate(convolutions, {}, data=images, steps=steps, batch_size=1024)
    return made, step_memory(made, "whole", "h200", accumulate=accumulate)


def test_on_a_gpu_large_trials_of_many_steps_get_the_micro_batch_of_those_of_few() -> None:
    # Captures, which cannot give back what is cached, are for trials below 1 GiB alone.
    room = 3 * 2**30
    few, many = (on_a_gpu(steps, True)[1] for steps in (3, 300))
    most = few.largest(room)
    assert many.largest(room) == most
    assert few.bytes_at(most) > room  # by giving back
    assert many.fits(most, room)
    assert not many.fits(round(1.02 * most), room)
    small = 2**29
    assert many.bytes_at(many.largest(small)) <= small < few.bytes_at(few.largest(small))


def test_on_a_gpu_a_batch_that_fits_by_giving_back_is_left_whole() -> None:
    made, found = on_a_gpu(300, False)
    memory = int((found.bytes_at(1024) - 2**20 + found.context) / (1 - MARGIN))
    fitted = fit(made, 1, memory, "h200")
    assert (fitted.strategy, fitted.micro_batch) == ("whole", 1024)
    assert fitted.memory <= memory * (1 - MARGIN) - found.context < found.bytes_at(1024)
