"""Dry runs: what they tell of a run is what the run would be, and they change and write nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from weft import zoo
from weft.cli.train import activations, describe, kept_bytes, state_ratio
from weft.data import Data, Tensors, as_data
from weft.engine.losses import mean_squared_error
from weft.engine.optimizer import Optimizer
from weft.errors import DataError, SupernetError, WeftError
from weft.space import Space
from weft.supernet import Chain, Choice, Shared, build_on_meta, initialise
from weft.trainer.config import Execution, TrainConfig, resolve
from weft.trainer.trainer import DeviceEngine

CHOICES: dict[str, Callable[[], nn.Module]] = {"big": partial(nn.Linear, 4, 4), "none": nn.Identity}


def build() -> Chain:
    space = Space()
    blocks = [Choice(space, f"b{i}", CHOICES) for i in range(2)]
    return Chain(Shared(partial(nn.Linear, 3, 4), "stem"), *blocks, Shared(partial(nn.Linear, 4, 2), "head"))


def data(samples: int = 32) -> Data:
    return Data("numbers", Tensors(x=torch.ones(samples, 3), y=torch.zeros(samples, 2)))


def described(net: Any = build, source: Data | None = None, **options: Any) -> dict[str, Any]:
    return describe(net, source or data(), train_config(**options), "cpu", Path("runs/name"))


def train_config(**options: Any) -> TrainConfig:
    return TrainConfig(**{"steps": 10, "batch_size": 8, "stream": "iid", "loss": mean_squared_error, **options})


def test_a_small_run_is_told_as_counted_by_hand() -> None:
    stem, big, head = 3 * 4 + 4, 4 * 4 + 4, 4 * 2 + 2
    most = stem + 2 * big + head
    found = described(optimizer=Optimizer("sgd", lr=0.1, momentum=0.9), microbatches=2)
    assert found.pop("stream").startswith("iid: every step draws every choice anew")
    # A micro-batch of 4: the stem and both choices keep their inputs (3, 4, 4), the head its input (4), and the error
    # its outputs and targets (2, 2); the weights of a layer are no activations.
    run = {"run": "runs/name", "device": "cpu", "steps": 10, "batch_size": 8, "microbatches": 2, "epochs": 2.5}
    size = {"subnets": 4, "blocks": 4, "layers": 6, "parameters": most, "parameters_largest": most}
    size |= {"parameters_smallest": stem + head, "memory_versions": 0}
    size |= dict.fromkeys(("memory_weights", "memory_optimizer", "memory_gradients"), 4 * most)
    assert found == {**run, **size, "memory_activations": 4 * 4 * (3 + 4 + 4 + 4 + 2 + 2)}


@pytest.mark.parametrize("make", [zoo.digits_conv, zoo.digits_mlp, zoo.nas_bench_macro])
def test_parameters_without_data_are_those_of_the_real_supernet(make: Callable[[], Chain]) -> None:
    flat, real = build_on_meta(make), initialise(make)
    assert all(tensor.is_meta for tensor in flat.state_dict().values())
    assert {name: tensor.shape for name, tensor in flat.state_dict().items()} == {
        name: tensor.shape for name, tensor in real.state_dict().items()
    }
    assert flat.largest() == real.largest()
    assert flat.smallest() == real.smallest()


@pytest.mark.parametrize("m", [1, 2, 4])
def test_activations_without_data_are_those_of_a_real_forward(m: int) -> None:
    real = initialise(zoo.digits_conv)
    step = resolve(TrainConfig(steps=1, batch_size=8, microbatches=m), real)
    batch = {"image": torch.rand(8, 1, 8, 8), "label": torch.arange(8)}
    flat = {name: tensor.to("meta") for name, tensor in batch.items()}
    seen = activations(build_on_meta(zoo.digits_conv), real.largest(), flat, step)
    assert isinstance(seen, int)
    assert activations(real, real.largest(), batch, step) == seen
    if m == 1:
        half = replace(step, microbatches=2)
        halves = activations(build_on_meta(zoo.digits_conv), real.largest(), flat, half)
        assert isinstance(halves, int)
        assert abs(halves * 2 - seen) < seen / 20


@pytest.mark.parametrize(
    ("optimizer", "ratio"),
    [
        (Optimizer("sgd", lr=0.1), 0),
        (Optimizer("sgd", lr=0.1, momentum=0.9), 1),
        (Optimizer("adamw", lr=0.1), 2),
        (Optimizer("adam", lr=0.1, amsgrad=True), 3),
    ],
)
def test_the_state_of_an_optimizer_is_seen_by_using_it(optimizer: Optimizer, ratio: int) -> None:
    assert state_ratio(optimizer) == ratio
    assert described(optimizer=optimizer)["memory_optimizer"] == ratio * described()["memory_weights"]


@pytest.mark.parametrize("consistency", ["exact", "delayed(3)", "lagged(2)", "bounded(2,4)", "bounded(4,3)"])
@pytest.mark.parametrize("m", [1, 2])
def test_kept_versions_are_the_most_that_a_real_run_keeps(consistency: str, m: int) -> None:
    chain = initialise(build)
    config = train_config(steps=16, batch_size=4, stream=chain.largest(), consistency=consistency, microbatches=m)
    step = resolve(config, chain)
    engine = DeviceEngine(chain, data(), step, Execution())
    engine.begin(0)
    weights = {
        name: sum(p.numel() * p.element_size() for p in chain.module(name).parameters()) for name in chain.layers
    }
    most = dict.fromkeys(weights, 0)
    engine.layers.train_mode()
    for _ in engine.train(16, 16, lambda: False):
        for name, kept in engine.layers.weights.items():
            most[name] = max(most[name], len(kept.kept))
    engine.close()
    assert engine.reached == 16
    assert kept_bytes(build_on_meta(build), step) == sum(most[name] * weights[name] for name in weights)


def test_a_supernet_larger_than_any_memory_can_be_described() -> None:
    def huge() -> Chain:
        return Chain(Choice(Space(), "b", {name: partial(nn.Linear, 3, 10**9) for name in ("p", "q")}))

    wide = Data("wide", Tensors(x=torch.ones(8, 3), y=torch.zeros(8, 1)))
    found = described(huge, wide, loss=lambda outputs, batch: outputs.mean())
    assert found["parameters"] == 2 * 4 * 10**9
    assert found["memory_weights"] == 32 * 10**9


def test_nothing_is_written_and_nothing_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chain = initialise(build)
    before = {name: tensor.clone() for name, tensor in chain.state_dict().items()}
    state, training = torch.get_rng_state(), chain.training
    for net in (build, chain):
        described(net)
    assert torch.equal(torch.get_rng_state(), state)
    assert chain.training == training
    assert list(chain.state_dict()) == list(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in chain.state_dict().items())
    assert os.listdir(tmp_path) == []


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :2] * (1.0 if bool(x.sum() > 0) else 2.0)


def test_activations_that_cannot_be_followed_say_why() -> None:
    def reading() -> Chain:
        return Chain(Choice(Space(), "b", {"p": Reads()}))

    assert described(reading)["memory_activations"].startswith("unknown: ")

    def misfit() -> Chain:
        return Chain(Choice(Space(), "b", {"p": partial(nn.Linear, 5, 2)}))

    assert "unknown: RuntimeError without data: " in described(misfit)["memory_activations"]


def test_a_space_with_real_choices_is_too_large_to_count() -> None:
    def real() -> Chain:
        space = Space()
        space.real("rate", 0.0, 1.0)
        return Chain(Choice(space, "b", {"p": partial(nn.Linear, 3, 2), "q": partial(nn.Linear, 3, 2)}))

    assert described(real)["subnets"] == "too many to count"


def test_a_foreign_loader_is_described_by_its_own_batches() -> None:
    loader = DataLoader(TensorDataset(torch.ones(12, 3), torch.zeros(12, 2)), batch_size=4)
    found = described(source=as_data(loader))
    assert found["epochs"] == round(10 / 3, 2)
    assert found["memory_activations"] == 4 * 4 * (3 + 4 + 4 + 4 + 2 + 2)


def test_a_mistake_is_told_as_training_would_tell_it() -> None:
    def fails() -> Chain:
        raise LookupError("nothing here")

    for begun, error, words in (
        (lambda: described(batch_size=64), DataError, "a batch of 64 is larger than the data"),
        (lambda: described(lambda: 3), SupernetError, "returned int, not a weft"),
        (lambda: described(fails), LookupError, "nothing here"),
        (lambda: described(stream="spaced:9"), WeftError, "spacing 9 is impossible"),
        (lambda: described(microbatches=3), WeftError, "3 micro-batches"),
    ):
        with pytest.raises(error, match=words):
            begun()
