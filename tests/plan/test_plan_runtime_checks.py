"""Strategies that cannot be run are refused before anything runs, with the operator and the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.plan.capture import CapturedModel, capture
from weft.plan.graph import Dim, Operator
from weft.plan.runtime import unsupported
from weft.plan.sharding import REPLICATED, Mesh, OpSplit, ShardingStrategy


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(4, 6, 2, 12).transpose(1, 2).chunk(3, -1)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return seen.amax(-1).square().sum(-1).view(8)


@pytest.fixture(scope="module")
def net() -> CapturedModel:
    return capture(Net(), torch.randn(4, 6, 8))


def strategy(net: CapturedModel, mesh: Mesh, chosen: dict[int, OpSplit] | None = None) -> ShardingStrategy:
    whole = (REPLICATED,) * len(mesh.sizes)
    return ShardingStrategy(mesh, tuple((chosen or {}).get(op, whole) for op in range(len(net.graph))))


def split_by(net: CapturedModel, name: str, dim: str) -> list[str]:
    """What is said of a strategy that splits one dimension of one operator in two."""
    op = net.op_index[name]
    number = next(number for number, each in enumerate(net.graph.operators[op].dims) if each.name == dim)
    return unsupported(net, strategy(net, Mesh((2,)), {op: (number,)}))


def changed(net: CapturedModel, name: str, change: Callable[[Operator], Operator]) -> CapturedModel:
    op = net.op_index[name]
    operators = (*net.graph.operators[:op], change(net.graph.operators[op]), *net.graph.operators[op + 1 :])
    return replace(net, graph=replace(net.graph, operators=operators))


def all_free(operator: Operator) -> Operator:
    """As if the operator's rule let all its dimensions be split."""
    return replace(operator, dims=tuple(Dim.free(each.name, each.size) for each in operator.dims))


def last_dim(net: CapturedModel, name: str) -> str:
    operator = net.graph.operators[net.op_index[name]]
    return operator.dims[operator.reads[0].tensor.dims[-1] or 0].name


def test_what_leaves_an_equal_part_for_every_device_can_be_run(net: CapturedModel) -> None:
    assert unsupported(net, strategy(net, Mesh((2,)))) == []
    assert unsupported(net, strategy(net, Mesh((5, 3, 2)))) == []
    for dim in ("m0", "n", "k"):
        assert split_by(net, "linear", dim) == []


def test_parts_that_do_not_make_up_the_result_are_refused(net: CapturedModel) -> None:
    (reason,) = split_by(changed(net, "amax", all_free), "amax", last_dim(net, "amax"))
    assert "do not add up to the whole" in reason
    attention = "scaled_dot_product_attention"
    (reason,) = split_by(changed(net, attention, all_free), attention, "q")
    assert "the mask is causal" in reason
    assert split_by(changed(net, attention, all_free), attention, "h") == []

    def alike(operator: Operator) -> Operator:  # as if each output had the axis along which the tensor is taken apart
        axes = operator.reads[0].tensor.dims
        return replace(all_free(operator), outputs=tuple(replace(each, dims=axes) for each in operator.outputs))

    (reason,) = split_by(changed(net, "split", alike), "split", last_dim(net, "split"))
    assert "its part has the shape" in reason


def test_a_draw_that_cannot_be_cut_is_refused() -> None:
    lstm = capture(nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True).train(), torch.randn(4, 6, 4))
    (reason,) = split_by(lstm, "lstm", "b")
    assert "it draws at random, and its draw cannot be cut" in reason
    assert unsupported(lstm, strategy(lstm, Mesh((2,)))) == []


def test_an_operator_that_works_in_place_is_refused() -> None:
    own = capture(Net(), torch.randn(4, 6, 8))
    next(node for node in own.program.graph.nodes if node.name == "square").target = torch.ops.aten.square_.default
    (reason,) = unsupported(own, strategy(own, Mesh((2,))))
    assert "it changes its operands in place" in reason
