"""Two levels in one run: each learns from its own data, to the same bits on any number of stages."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stages
import torch
from small_supernets import layered
from stages import Task, in_stages, sequentially
from torch import Tensor, nn

import weft
from weft.data import Data, Tensors, open_data
from weft.engine.bilevel import Bilevel, BilevelLoader, check_unrolled, with_progress
from weft.errors import TrainError
from weft.search.gradient.methods import GDAS, Darts, DrNAS
from weft.supernet.mixed_chain import PROGRESS, make_mixed_chain, mixed_factory
from weft.trainer.config import TrainConfig, resolve

METHODS = {"darts": (Darts(), ()), "drnas": (DrNAS(), ()), "gdas": (GDAS(), (PROGRESS,))}


def loss(seen: tuple[Tensor, ...], batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(seen[0], batch["label"])


def train(folder: Path, method: str = "darts", steps: int = 12, **changes: Any) -> weft.TrainedRun:
    relax, side = METHODS[method]
    net = mixed_factory(layered, relax, side)
    options: dict[str, Any] = {
        "batch_size": 32,
        "architecture_search": Bilevel(),
        "folder": folder,
        "stream": net().space.first(),
    }
    return weft.train(net, open_data("digits"), steps=steps, loss=loss, **{**options, **changes})


def alphas(trained: weft.TrainedRun) -> dict[str, Tensor]:
    return {n: p for n, p in trained.chain.state_dict().items() if n.startswith("arch-")}


def weights(trained: weft.TrainedRun) -> dict[str, Tensor]:
    return {n: p for n, p in trained.chain.state_dict().items() if not n.startswith("arch-")}


def test_the_levels_take_turns_after_the_warm_up() -> None:
    turns = Bilevel(warmup=3, every=3)
    assert [turns.architecture(i) for i in range(10)] == [False] * 5 + [True, False, False, True, False]
    assert [turns.counts_before(i) for i in range(7)] == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (5, 1)]
    for i in range(40):
        seen = [turns.architecture(k) for k in range(i)]
        assert turns.counts_before(i) == (seen.count(False), seen.count(True))


def test_weights_learn_from_training_data_and_the_architecture_from_validation_data() -> None:
    data = Data("x", Tensors(x=torch.arange(10.0)), Tensors(x=-1 - torch.arange(10.0)))
    chain = make_mixed_chain(layered, Darts())
    config = TrainConfig(steps=8, loss=loss, batch_size=2, architecture_search=Bilevel(), stream=chain.space.first())
    loader = resolve(config, chain).loader(data, torch.device("cpu"))
    assert isinstance(loader, BilevelLoader)
    for i in range(8):
        assert bool((loader.batch(i)["x"] < 0).all()) == bool(i % 2)
        assert loader.batch(i)[PROGRESS].tolist() == [i / 8] * 2
    for start in (0, 3):
        ahead = list(loader.iterate(start, 8))
        assert len(ahead) == 8 - start
        for i, batch in enumerate(ahead, start):
            assert all(torch.equal(batch[name], loader.batch(i)[name]) for name in batch)


def test_a_step_changes_its_own_level_and_no_other(tmp_path: Path) -> None:
    # The rate of step 0 depends on the length of the run under the cosine, so it is held constant here.
    constant = weft.Optimizer(schedule="constant")
    one, two, three = (train(tmp_path, steps=steps, optimizer=constant) for steps in (1, 2, 3))
    assert all(not p.any() for p in alphas(one).values())
    assert all(bool(p.any()) for p in alphas(two).values())
    assert all(torch.equal(p, weights(two)[name]) for name, p in weights(one).items())
    assert not all(torch.equal(p, weights(three)[name]) for name, p in weights(two).items())
    phases = [event["phase"] for event in two.run.events.read() if event["event"] == "step"]
    assert phases == ["weights", "architecture"]


def digits_at(step: int) -> dict[str, Tensor]:
    part = open_data("digits").train.take(np.arange(8 * step, 8 * step + 8))  # type: ignore[union-attr]
    return with_progress(part, step / 8)


@pytest.mark.parametrize("consistency", ["exact", "bounded(2, 3)"])
@pytest.mark.parametrize("method", METHODS)
def test_a_search_repeats_to_the_bit_on_any_number_of_stages(
    monkeypatch: pytest.MonkeyPatch, method: str, consistency: str
) -> None:
    relax, side = METHODS[method]
    net = mixed_factory(layered, relax, side)
    monkeypatch.setitem(stages.KINDS, "mixed", (net, digits_at))
    config = TrainConfig(
        steps=8,
        microbatches=2,
        batch_size=8,
        loss=loss,
        architecture_search=Bilevel(),
        stream=net().space.first(),
        consistency=consistency,
    )
    task = Task("mixed", resolve(config, net()))
    alone = sequentially(task)
    for cut, seed in (((2,), 0), ((1, 3), 1)):
        found, _ = in_stages(task, cut, 4, seed)
        assert (found.layers, found.losses) == (alone.layers, alone.losses)


def test_a_window_of_both_levels_is_averaged_over_the_steps_of_each_level(tmp_path: Path) -> None:
    # lagged(2): a window has one step of the weights and one of the architecture. With plain descent its first update
    # of the weights is the gradient of one step, not half of it.
    options = {"optimizer": weft.Optimizer("sgd", lr=0.1, schedule="constant")}
    begun = weights(train(tmp_path, steps=1, optimizer=weft.Optimizer("sgd", lr=0.0)))
    exact = weights(train(tmp_path, steps=1, **options))
    lagged = weights(train(tmp_path, steps=2, consistency="lagged(2)", **options))
    for name in exact:
        torch.testing.assert_close(lagged[name] - begun[name], exact[name] - begun[name], rtol=1e-4, atol=1e-7)


def test_a_search_that_was_stopped_goes_on_to_the_same_end(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 7:
            raise Stop

    whole = train(tmp_path, "gdas", run="whole")
    with pytest.raises(Stop):
        train(tmp_path, "gdas", run="cut", checkpoint_every=3, callbacks=[stop])
    again = train(tmp_path, "gdas", run="cut", checkpoint_every=3, resume=True)
    assert again.fingerprint == whole.fingerprint


@pytest.mark.parametrize(
    ("mixed", "changes", "words"),
    [
        (True, {"source": Data("x", open_data("digits").train)}, "validation data"),
        (True, {"architecture_search": None}, "two levels"),
        (False, {}, "two levels"),
    ],
)
def test_what_two_levels_need_is_said(tmp_path: Path, mixed: bool, changes: dict[str, Any], words: str) -> None:
    net = mixed_factory(layered, Darts()) if mixed else layered
    options = {"architecture_search": Bilevel(), "source": open_data("digits"), **changes}
    with pytest.raises(TrainError, match=words):
        weft.train(net, options.pop("source"), steps=2, stream=net().space.first(), folder=tmp_path, **options)


def plain_choice() -> weft.Chain:
    space = weft.Space()
    ops = {"tanh": partial(_layer, nn.Tanh), "sigmoid": partial(_layer, nn.Sigmoid)}
    return weft.Chain(
        weft.Shared(partial(_double, 3, 4), "stem"),
        weft.Choice(space, "op", ops),
        weft.Shared(partial(_double, 4, 2), "head"),
    )


def _double(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs, dtype=torch.float64)


def _layer(act: type[nn.Module]) -> nn.Module:
    return nn.Sequential(_double(4, 4), act())


def test_the_second_order_is_the_gradient_through_one_step_of_the_weights(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    rows = [Tensors(x=torch.randn(8, 3, generator=rng, dtype=torch.float64), label=torch.arange(8) % 2) for _ in "ab"]
    data = Data("x", rows[0], rows[1])
    rate = 0.5
    net = mixed_factory(plain_choice, Darts())
    options: dict[str, Any] = {"batch_size": 8, "stream": net().space.first()}
    options |= {"optimizer": weft.Optimizer("sgd", lr=rate, schedule="constant"), "loss": loss, "folder": tmp_path}
    arch = weft.Optimizer("sgd", lr=1.0)
    trained = weft.train(net, data, steps=2, architecture_search=Bilevel(arch, order=2), **options)

    chain = weft.initialise(net, 0)
    names = [name for name, _ in chain.named_parameters() if not name.startswith("arch-")]
    start = weft.train(
        net, data, steps=1, architecture_search=Bilevel(arch), **options
    ).chain.state_dict()  # after step 0
    w = {name: start[name].clone().requires_grad_() for name in names}
    alpha = torch.zeros(2, requires_grad=True)

    def run(w: dict[str, Tensor], part: Tensors) -> Tensor:
        batch = part.take(torch.arange(8).numpy())
        x, label = batch["x"], batch["label"]
        p = torch.softmax(alpha, 0)
        y = nn.functional.linear(x, w["stem.weight"], w["stem.bias"])
        a, b = (nn.functional.linear(y, w[f"op.{o}.0.weight"], w[f"op.{o}.0.bias"]) for o in ("tanh", "sigmoid"))
        y = p[0] * torch.tanh(a) + p[1] * torch.sigmoid(b)
        y = nn.functional.linear(y, w["head.weight"], w["head.bias"])
        return nn.functional.cross_entropy(y, label)

    # The batch is all of the data, whose order does not matter to a mean.
    gradients = torch.autograd.grad(run(w, rows[0]), list(w.values()), create_graph=True)
    ahead = {name: w[name] - rate * g for name, g in zip(w, gradients, strict=True)}
    (wanted,) = torch.autograd.grad(run(ahead, rows[1]), [alpha])
    (first,) = torch.autograd.grad(run(w, rows[1]), [alpha])
    found = -trained.chain.module("arch-op").alpha.detach()
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-7)
    assert not torch.allclose(first, wanted, rtol=1e-2)
    after = trained.chain.state_dict()
    assert all(torch.equal(after[name], start[name]) for name in names)


@pytest.mark.parametrize(("stages", "changes"), [(2, {}), (1, {"microbatches": 2}), (1, {"consistency": "lagged(2)"})])
def test_the_second_order_is_refused_where_it_cannot_be_had(stages: int, changes: dict[str, Any]) -> None:
    chain = make_mixed_chain(layered, Darts())
    config = TrainConfig(loss=loss, stream=chain.space.first(), architecture_search=Bilevel(order=2), **changes)
    with pytest.raises(TrainError, match="second order"):
        check_unrolled(resolve(config, chain), stages)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", METHODS)
def test_graphs_change_no_bit_of_a_search(method: str, tmp_path: Path) -> None:
    as_it_is, captured = (
        train(tmp_path / str(on), method, device="cuda", cuda_graphs=on).fingerprint for on in (False, True)
    )
    assert as_it_is == captured
