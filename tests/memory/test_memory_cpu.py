"""Estimates for a CPU count the bytes that a real step has alive."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import weft
from weft.utils.live_memory import LiveStorages


class LastOutput(nn.Module):
    """An LSTM's last output, classified."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(32, 64, 2, batch_first=True, bidirectional=True), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.cells(x)[0][:, -1])
        return outputs


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 10))


def attention() -> nn.Module:
    return nn.Sequential(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), nn.Flatten(), nn.Linear(512, 10))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("build", "shape"), [(convolutions, (8, 3, 10, 10)), (attention, (8, 16, 32)), (LastOutput, (8, 12, 32))]
)
def test_on_a_cpu_the_estimate_is_the_live_bytes_of_a_real_step(
    build: Callable[[], nn.Module], shape: tuple[int, ...], optimizer: str
) -> None:
    def loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch["y"])

    def batch_of(samples: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(samples, *shape[1:]), "y": torch.zeros(samples, dtype=torch.long)}

    def live_bytes(batch: dict[str, torch.Tensor]) -> int:
        model = build()
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
        made = kind(model.parameters(), lr=1e-3)

        def step() -> None:
            made.zero_grad(set_to_none=True)
            loss(model(batch["x"]), batch).backward()
            made.step()

        step()
        states = [value for state in made.state.values() for value in state.values()]
        with LiveStorages([*model.parameters(), *model.buffers(), *states, *batch.values()]) as live:
            step()
        return int(live.peak)

    found = weft.estimate(build(), batch_of(shape[0]), loss=loss, optimizer=optimizer, device="cpu")
    for samples in (shape[0], 3 * shape[0]):
        real = live_bytes(batch_of(samples))
        assert found.at(samples).allocated == pytest.approx(real, rel=0.03, abs=1024)
    assert found.reserved == found.allocated
    assert found.context == 0
    assert found.at(found.largest_batch("4MiB", margin=0.0)).fits("4MiB")
    assert not found.at(found.largest_batch("4MiB", margin=0.0) + 1).fits("4MiB")
