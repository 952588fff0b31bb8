"""Models whose layers read much of what came before are captured whole, and planned within a limit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.plan.capture import capture
from weft.plan.planner import plan_captured


class Dense(nn.Module):
    """A block of DenseNet: each layer reads what all before it made."""

    def __init__(self, layers: int = 5, growth: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, growth, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(n * growth), nn.ReLU(), nn.Conv2d(n * growth, growth, 3, padding=1))
            for n in range(1, layers + 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        made = [self.stem(x)]
        for layer in self.layers:
            made.append(layer(torch.cat(made, 1)))
        return torch.cat(made, 1).mean((2, 3))


class UNet(nn.Module):
    """Down, attention where it is smallest, and up again beside what was kept."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(2 * width, 3, 1)
        self.down, self.up = nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.norm, self.parts = nn.GroupNorm(4, 2 * width), nn.Conv2d(2 * width, 6 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = F.silu(self.first(x))
        low = F.silu(self.down(kept))
        n, c, h, w = low.shape
        q, k, v = self.parts(self.norm(low)).reshape(n, 3, 4, c // 4, h * w).transpose(-1, -2).unbind(1)
        low = low + F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(n, c, h, w)
        return self.last(torch.cat([kept, self.up(low)], 1))


IMAGES = torch.zeros(24, 3, 16, 16, device="meta")


@pytest.mark.parametrize("kind", [Dense, UNet])
def test_every_operator_is_known_and_a_limit_on_memory_is_kept(kind: type[nn.Module]) -> None:
    with torch.device("meta"):
        model = kind()
    captured = capture(model, IMAGES, loss=lambda output, _: output.square().mean())
    assert not captured.graph.unknown
    for devices in (3, 8):
        free = plan_captured(captured, devices=devices, stages=1, compare=False)
        tight = plan_captured(captured, devices=devices, stages=1, memory=0.75 * free.cost.memory, compare=False)
        assert tight.cost.memory <= 0.75 * free.cost.memory
        assert tight.gap <= 0.01
        assert tight.cost.step_time >= free.cost.lower_bound
        assert free.unsupported() == tight.unsupported() == []
