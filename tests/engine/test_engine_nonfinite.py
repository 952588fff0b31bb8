"""Numbers that are none: a run stops and says where, or a micro-batch and a layer are left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from stages import equal, layer_contents, make_engine
from torch import Tensor, nn

import weft
from weft.data import as_data
from weft.engine.losses import mean_squared_error
from weft.engine.optimizer import Optimizer
from weft.engine.reference import SequentialReference
from weft.errors import NonFiniteError
from weft.space import Space
from weft.supernet import Chain, Choice, Shared
from weft.trainer.config import Execution, TrainConfig, resolve
from weft.trainer.metrics_log import StepRecord
from weft.trainer.trainer import DeviceEngine

WIDTH = 3


class Trap(nn.Module):
    """A layer that makes inf of inputs above 50."""

    def __init__(self, value: float = float("inf")) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.inner(x.clamp(max=50.0)))
        return torch.where((x > 50).any(), torch.full_like(out, self.value), out)


class RootOfNothing(nn.Module):
    """Finite forward, infinite gradient: the root of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + torch.sqrt(self.w * torch.where(x.sum() > 100, 0.0, 1.0))


def build(layer: Callable[[], nn.Module] = Trap) -> Chain:
    torch.manual_seed(0)
    space = Space()
    return Chain(
        Shared(nn.Identity(), "entry"),
        Choice(space, "b", {"trap": layer(), "fine": nn.Linear(WIDTH, WIDTH)}),
        Shared(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), "head"),
    )


def batch(seed: int, rows: int = 4, bad: slice | None = None, value: float = 60.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)
    if bad is not None:
        x[bad] = value
    return {"x": x, "y": y}


def newest(sequential: SequentialReference) -> dict[str, Tensor]:
    """The contents of all layers but for older versions."""
    layers = [layer_contents(sequential, name) for name in sequential.weights]
    return {key: value for layer in layers for key, value in layer.items() if "@" not in key}


@pytest.mark.parametrize("value", [float("inf"), float("nan"), float("-inf")])
def test_a_loss_that_is_no_number_stops_with_step_subnet_and_layer(value: float) -> None:
    chain = build(lambda: Trap(value))
    trap = chain.space.subnet(b="trap")
    sequential = make_engine(chain, [trap] * 3, m=2)
    sequential.step(0, batch(0, 8))
    with pytest.raises(
        NonFiniteError, match=r"step 1, micro-batch 1, subnet b=trap: it first appears in layer 'b.trap'\."
    ):
        sequential.step(1, batch(1, 8, bad=slice(6, 7)))


@pytest.mark.parametrize(
    "blame", ["the batch itself", "the loss function", "layer 'b.fine', whose weights are not finite"]
)
def test_weights_a_batch_and_a_loss_that_are_to_blame_are_named(blame: str) -> None:
    chain, nan = build(), float("nan")
    if "weights" in blame:
        nn.init.constant_(chain.module("b.fine").weight, nan)
    loss = (lambda out, batch: out.sum() * nan) if "loss" in blame else mean_squared_error
    data = batch(0, bad=slice(0, 1) if "batch" in blame else None, value=nan)
    with pytest.raises(NonFiniteError, match=f"it first appears in {blame}"):
        make_engine(chain, [chain.space.subnet(b="fine")], loss=loss).step(0, data)


@pytest.mark.parametrize("consistency", ["exact", "delayed(1)", "lagged(2)", "bounded(2,1)", "bounded(2,3)"])
def test_a_skipped_step_contributes_to_no_layer(consistency: str) -> None:
    chain = build()
    trap = chain.space.subnet(b="trap")
    sequential = make_engine(chain, [trap] * 6, on_nonfinite="skip", consistency=consistency)
    for i in (0, 1):
        assert sequential.step(i, batch(i)).skipped == 0
    before = newest(sequential)
    result = sequential.step(2, batch(2, bad=slice(0, 1)))
    assert result.skipped == 1
    assert not torch.isfinite(result.losses[0])
    assert equal(newest(sequential), before)
    for i in (3, 4, 5):
        assert sequential.step(i, batch(i)).skipped == 0
    assert all(torch.isfinite(t).all() for name in chain.layers for t in layer_contents(sequential, name).values())


@pytest.mark.parametrize("consistency", ["exact", "lagged(2)", "bounded(4,3)"])
def test_a_skipped_micro_batch_leaves_the_others_of_its_step(consistency: str) -> None:
    """Step 1 has four micro-batches, of which one does not count: as if a loss that is 0 everywhere had stood there."""
    found = []
    for skipping in (True, False):
        chain = build()
        trap = chain.space.subnet(b="trap")

        def loss(outputs: Tensor, batch: dict[str, Tensor], skipping: bool = skipping) -> Tensor:
            value = ((outputs - batch["y"]) ** 2).sum()
            if batch["mark"].any():
                return value * float("nan") if skipping else value * 0.0
            return value

        options = {"on_nonfinite": "skip", "loss": loss, "optimizer": Optimizer("sgd", lr=0.01)}
        sequential = make_engine(chain, [trap] * 3, m=4, consistency=consistency, **options)
        for i in range(3):
            mark = torch.zeros(16)
            mark[8:12] = i == 1
            sequential.step(i, {**batch(i, 16), "mark": mark})
        found.append([p.detach().clone() for p in chain.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_a_skipped_micro_batch_takes_back_the_buffers_that_a_layer_changes_itself() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH, momentum=None)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += x.detach().sum()
            return self.norm(x)

    chain = build(Average)
    trap = chain.space.subnet(b="trap")
    sequential = make_engine(chain, [trap] * 3, on_nonfinite="skip")
    sequential.step(0, batch(0))
    before = layer_contents(sequential, "b.trap")
    sequential.step(1, batch(1, bad=slice(0, 1), value=float("nan")))
    assert equal(before, layer_contents(sequential, "b.trap"))
    sequential.step(2, batch(2))
    assert all(torch.isfinite(t).all() for t in layer_contents(sequential, "b.trap").values())


def test_a_gradient_that_is_no_number_skips_the_update_of_its_layer_alone() -> None:
    chain = build(RootOfNothing)
    trap = chain.space.subnet(b="trap")
    sequential = make_engine(
        chain, [trap] * 3, on_nonfinite="skip", optimizer=Optimizer("adamw", lr=0.01, weight_decay=0.1)
    )
    sequential.step(0, batch(0))
    before = {name: layer_contents(sequential, name) for name in chain.layers}
    big = batch(1)
    big["x"] = big["x"].abs() + 50
    result = sequential.step(1, big)
    assert result.skipped == 0
    assert torch.isfinite(result.losses[0])
    assert equal(before["b.trap"], layer_contents(sequential, "b.trap"))
    assert not equal(before["head"], layer_contents(sequential, "head"))
    sequential.step(2, batch(2))
    assert not equal(before["b.trap"], layer_contents(sequential, "b.trap"))


def test_a_run_that_stops_says_so_in_its_events_and_a_run_that_skips_counts(tmp_path: Path) -> None:
    data = {"x": torch.randn(16, WIDTH), "y": torch.randn(16, WIDTH)}
    data["x"][3] = float("nan")
    options = {"steps": 8, "batch_size": 4, "loss": mean_squared_error, "stream": "iid", "folder": tmp_path}
    with pytest.raises(NonFiniteError, match="the batch itself"):
        weft.train(build, data, run="stops", **options)
    last = list(weft.Run.open(tmp_path / "stops").events.read())[-1]
    assert last["event"] == "failed"
    assert "the batch itself" in last["reason"]
    assert weft.Run.open(tmp_path / "stops").state() == "failed"
    trained = weft.train(build, data, run="skips", on_nonfinite="skip", **options)
    steps = [event for event in trained.run.events.read() if event["event"] == "step"]
    assert [event.get("skipped", 0) for event in steps].count(1) == 2  # twice through the 16 samples
    assert all(torch.isfinite(t).all() for t in trained.chain.state_dict().values())


def test_one_bad_micro_batch_stops_a_run_that_looks_at_its_losses_later() -> None:
    """As on a GPU, where losses arrive some steps late: the mean of the others must not hide it."""
    data = {"x": torch.randn(16, WIDTH), "y": torch.randn(16, WIDTH)}
    chain = build()
    config = resolve(TrainConfig(steps=4, batch_size=4, microbatches=2, loss=mean_squared_error, stream="iid"), chain)
    engine = DeviceEngine(chain, as_data(data), config, Execution())
    engine.layers.train_mode()
    good, bad = (StepRecord(0, config.stream[0], losses, {}, 0) for losses in ([1.0, 2.0], [1.0, float("inf")]))
    assert list(engine._finite(iter([good]))) == [good]
    with pytest.raises(NonFiniteError, match="step 0, micro-batch 1"):
        list(engine._finite(iter([bad])))
