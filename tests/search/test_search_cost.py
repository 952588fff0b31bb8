"""Costs of plain modules, against counting by hand."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from weft.search.cost import flops, flops_by_child, latencies, latency, parameters, peak_memory


class Attention(nn.Module):
    def __init__(self, read_values: bool = False) -> None:
        super().__init__()
        self.read_values = read_values

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.scaled_dot_product_attention(x, x, x)
        return y * 2 if self.read_values and y.sum().item() > 0 else y


class Awkward(nn.Module):
    """A plain tensor attribute and a tensor made on the way, which are not on the meta device by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.scale = torch.full((6,), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale + torch.arange(6)


def test_parameters_count_shared_ones_once() -> None:
    layer = nn.Linear(3, 5)
    assert parameters(layer) == 20
    assert parameters(nn.Sequential(layer, nn.ReLU(), layer)) == 20
    assert parameters(nn.ReLU()) == 0


@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    [
        (nn.Linear(3, 5), (7, 3), 2 * 7 * 3 * 5),
        (nn.Conv2d(3, 8, 3, padding=1), (2, 3, 6, 6), 2 * 2 * 8 * 36 * 3 * 9),
        (nn.Conv2d(8, 8, 3, groups=8), (1, 8, 5, 5), 2 * 8 * 9 * 9),
        (Attention(), (2, 3, 16, 8), 2 * 2 * (2 * 3) * 16 * 16 * 8),
        (Attention(read_values=True), (2, 3, 16, 8), 2 * 2 * (2 * 3) * 16 * 16 * 8),
        (Awkward(), (5, 4), 2 * 5 * 4 * 6),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_multiply_add_is_two_flops(module: nn.Module, shape: tuple[int, ...], expected: int) -> None:
    assert flops(module, torch.ones(shape)) == expected


def test_flops_take_tuples_as_positional_arguments_and_compute_nothing_where_shapes_are_enough() -> None:
    devices: list[str] = []

    class Product(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            devices.extend([x.device.type, torch.ones(2).device.type])
            return x @ y

    assert flops(Product(), (torch.ones(5, 2), torch.ones(2, 3))) == 2 * 5 * 2 * 3
    assert devices == ["meta"] * 2


def test_flops_are_told_apart_by_the_children_that_spend_them() -> None:
    inner = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 5))
    module = nn.Sequential(OrderedDict(first=inner, skip=nn.Identity(), last=nn.Linear(5, 2)))
    found = flops_by_child(module, torch.ones(7, 3))
    assert found == {"first": 2 * 7 * (3 * 5 + 5 * 5), "skip": 0, "last": 2 * 7 * 5 * 2}
    assert sum(found.values()) == flops(module, torch.ones(7, 3))


def test_measuring_changes_neither_modes_nor_buffers_nor_weights() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    module.train()
    module[2].eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    x = torch.ones(3, 4)
    flops(module, x), peak_memory(module, x), latency(module, x, repeats=1, warmup=0)
    assert [part.training for part in module] == [True, True, False]
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert all(parameter.device.type == "cpu" for parameter in module.parameters())


def test_peak_memory_by_hand() -> None:
    module = nn.Sequential(nn.Linear(100, 1000), nn.ReLU(), nn.Linear(1000, 10))
    x = torch.ones(64, 100)
    weights, hidden = 4 * parameters(module), 4 * 64 * 1000
    for _ in range(2):
        assert peak_memory(module, x) == weights + 4 * x.numel() + 2 * hidden  # the ReLU's input and output


def test_peak_memory_sees_that_tensors_die_and_that_views_results_in_place_and_shared_weights_take_nothing() -> None:
    x = torch.ones(1000)
    assert peak_memory(nn.Sequential(*9 * [nn.ReLU()]), x) == 3 * 4000  # input, and two of the chain at a time
    assert peak_memory(nn.Sequential(*9 * [nn.ReLU(inplace=True)]), x) == 4000
    assert peak_memory(nn.Unflatten(0, (10, 100)), x) == 4000
    layer, row = nn.Linear(8, 8, bias=False), torch.ones(1, 8)
    assert peak_memory(nn.Sequential(layer, layer), row) == 256 + 32 + 2 * 32  # weights count once


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_memory_holds_at_least_the_live_tensors_and_latency_is_positive() -> None:
    module = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    x = torch.ones(1024, 512)
    least = peak_memory(module, x)
    assert peak_memory(module.cuda(), x.cuda()) >= least
    assert latency(module, x.cuda(), repeats=3) > 0
    assert flops(module, x.cuda()) == 2 * 2 * 1024 * 512 * 512


def test_latency_is_a_positive_number_for_each_module_in_turn() -> None:
    calls: list[str] = []

    class Named(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: Tensor) -> Tensor:
            assert torch.is_inference_mode_enabled()
            assert not self.training
            calls.append(self.name)
            return x

    found = latencies([Named("a"), Named("b")], torch.ones(1), repeats=2, warmup=1)
    assert calls == ["a", "b"] * 3
    assert all(math.isfinite(one) and one > 0 for one in found)
    assert latency(Named("c"), torch.ones(1), repeats=1) > 0
