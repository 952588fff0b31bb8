"""Steps that are replayed as CUDA graphs: the same bits as without, and hardly more memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trials import check_same, config_of, fit_of, run, run_fused

from weft.data import Data, Tensors
from weft.tune.jobs import Fit
from weft.tune.recipe import TrialConfig
from weft.tune.training.cuda_graphs import GraphRecorder
from weft.tune.training.memory_limit import OutOfMemory
from weft.utils.rng import generator

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STEPS, BATCH = 14, 64


@cache
def pictures() -> Data:
    drawn = generator(0, "pictures")
    image = torch.from_numpy(drawn.normal(size=(640, 3, 16, 16)).astype("float32"))
    label = torch.from_numpy(drawn.integers(0, 10, 640))
    train, held = (Tensors(image=image[rows], label=label[rows]) for rows in (slice(512), slice(512, None)))
    return Data("pictures", train, held)


def mlp(params: Any, width: int = 256) -> nn.Module:
    inner = [nn.GELU(), nn.Dropout(0.2), nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2)]
    return nn.Sequential(nn.Flatten(), nn.Linear(768, width), *inner, nn.Linear(width, 10))


def convolved(norm: Callable[[], nn.Module]) -> Callable[[Any], nn.Module]:
    def build(params: Any) -> nn.Module:
        rows = [nn.Sequential(norm(), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.Dropout2d(0.1)) for _ in range(3)]
        return nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), *rows, nn.Flatten(), nn.Linear(2048, 10))

    return build


class Transformer(nn.Module):
    def __init__(self, width: int = 128, depth: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.enter, self.head, self.dropout = nn.Linear(48, width), nn.Linear(width, 10), dropout
        self.qkv = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width)) for _ in range(depth))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width))
            for _ in range(depth)
        )

    def forward(self, image: Tensor) -> Tensor:
        x = self.enter(image.reshape(len(image), 16, 48))
        for qkv, mlp in zip(self.qkv, self.mlps, strict=True):
            q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in qkv(x).chunk(3, -1))
            drop = self.dropout if self.training else 0.0
            x = x + F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True).transpose(1, 2).flatten(2)
            x = x + mlp(x)
        out: Tensor = self.head(x.mean(1))
        return out


class Waits(nn.Module):
    """Something of it keeps it from being captured."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.how = mlp({}), how

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.body(image)
        if self.how == "reads":
            return out * (2.0 if float(out.detach().mean()) > 0 else 1.0)
        if self.how == "draws":
            return out * torch.rand(()).item()
        if self.how == "waits unseen":
            torch.cuda.synchronize()
        return out


MODELS: dict[str, Callable[[Any], nn.Module]] = {
    "mlp": mlp,
    "conv": convolved(lambda: nn.GroupNorm(4, 32)),
    "normed": convolved(lambda: nn.BatchNorm2d(32)),
    "transformer": lambda params: Transformer(),
}


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each capture that succeeded."""
    found: list[str] = []
    capture = GraphRecorder.capture

    def counting(self: GraphRecorder, function: Any) -> Any:
        result = capture(self, function)
        found.append("captured")
        return result

    monkeypatch.setattr(GraphRecorder, "capture", counting)
    return found


def config(model: Any, params: Any = None, **fields: Any) -> TrialConfig:
    given = {"data": pictures, "steps": STEPS, "batch_size": BATCH, "report_every": 5, "microbatch_batchnorm": True}
    return config_of(model, params, **given | {"optimizer_options": {"lr": 0.002}} | fields)


def check_plain(one: TrialConfig, folder: Path, fit: Fit | None = None) -> None:
    wanted, _ = run(replace(one, cuda_graphs=False), folder / "plain", fit, device="cuda")
    found, _ = run(one, folder / "graphs", fit, device="cuda")
    check_same(found, wanted, folder / "graphs", folder / "plain")


@pytest.mark.parametrize(
    ("micro", "fields"),
    [
        (BATCH, {"lr_schedule": "cosine"}),
        (BATCH, {"precision": "bf16"}),
        (32, {"optimizer": "sgd"}),
        (23, {"optimizer": "sgd"}),
    ],
)
@pytest.mark.parametrize("model", list(MODELS))
def test_graphs_give_the_same_bits(
    model: str, micro: int, fields: dict[str, Any], tmp_path: Path, captures: list[str]
) -> None:
    fit = fit_of(micro, batch=BATCH)
    check_plain(config(MODELS[model], **fields), tmp_path, fit)
    assert len(captures) == fit.microbatches


@pytest.mark.parametrize("how", ["reads", "draws", "waits unseen"])
def test_what_cannot_be_captured_leaves_no_trace(how: str, tmp_path: Path, captures: list[str]) -> None:
    check_plain(config(lambda _: Waits(how)), tmp_path / how)
    assert captures == []
    check_plain(config(mlp), tmp_path / "next")  # in the same process
    assert len(captures) == 1


def test_a_metric_that_keeps_a_tensor_is_not_written_over(tmp_path: Path, captures: list[str]) -> None:
    known: list[Tensor] = []

    def distance(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        if not known:
            known.append(torch.linspace(0, 1, 1 << 20, device=outputs.device))
        return known[0].mean() + outputs.sum(), len(outputs)

    one = config(mlp, metrics={"distance": distance}, objectives=("distance", "loss"))
    wanted, _ = run(replace(one, cuda_graphs=False), tmp_path / "plain", device="cuda")
    known.clear()
    found, _ = run(one, tmp_path / "graphs", device="cuda")
    assert (found.losses, found.values) == (wanted.losses, wanted.values)
    assert torch.equal(known[0], torch.linspace(0, 1, 1 << 20, device="cuda"))
    assert len(captures) == 1


@pytest.mark.parametrize("model", ["mlp", "normed", "transformer"])
def test_fused_trials_give_the_same_bits(model: str, tmp_path: Path, captures: list[str]) -> None:
    own = [{"lr": 0.001 * (n + 1), "dropout": 0.1 * n, "seed": n} for n in range(3)]
    wanted, found = (
        run_fused(
            [config(MODELS[model], params, steps=24, cuda_graphs=graphs) for params in own],
            tmp_path / str(graphs),
            report=lambda trial, step, values: (trial, step) == (1, 10),
            device="cuda",
        )
        for graphs in (False, True)
    )
    assert found[1] == wanted[1] == "pruned"
    for trial in (0, 2):
        assert (found[trial].losses, found[trial].values) == (wanted[trial].losses, wanted[trial].values)
    assert len(captures) == 2  # and anew once a trial has left


@pytest.mark.parametrize("model", ["transformer", "mlp", "conv"])
@pytest.mark.parametrize("micro", [512, 128])
def test_graphs_take_hardly_more_memory(model: str, micro: int, tmp_path: Path, captures: list[str]) -> None:
    built = {"transformer": lambda _: Transformer(512, 6), "mlp": lambda _: mlp({}, 4096)}
    one = config(built.get(model, MODELS[model]), batch_size=512)
    fit = fit_of(micro, batch=512)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()  # what others in this process keep
    peaks = [
        run(replace(one, cuda_graphs=on), tmp_path / str(on), fit, device="cuda")[0].peak or 0 for on in (False, True)
    ]
    assert peaks[1] <= 1.05 * peaks[0] + 64 * 2**20
    assert len(captures) == min(fit.microbatches, 2)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before + 256 * 2**20  # a trial gives all of it back


def test_memory_that_graphs_lack_is_the_trials_own(tmp_path: Path) -> None:
    one = config(lambda _: Transformer(512, 6), batch_size=512)
    with pytest.raises(OutOfMemory):
        run(one, tmp_path, memory=600 * 2**20, device="cuda")
