"""Strategies that cannot be run are refused before anything runs, with the operator and the reason."""

from __future__ import annotations

from dataclasses import replace

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


def captured() -> CapturedModel:
    return capture(Net(), torch.randn(4, 6, 8))


def place_of(net: CapturedModel, name: str) -> int:
    return next(place for place, each in enumerate(net.graph.operators) if each.name == name)


def strategy(net: CapturedModel, mesh: Mesh, chosen: dict[int, OpSplit] | None = None) -> ShardingStrategy:
    whole = (REPLICATED,) * len(mesh.sizes)
    return ShardingStrategy(mesh, tuple((chosen or {}).get(place, whole) for place in range(len(net.graph))))


def with_operator(net: CapturedModel, place: int, operator: Operator) -> CapturedModel:
    operators = (*net.graph.operators[:place], operator, *net.graph.operators[place + 1 :])
    return replace(net, graph=replace(net.graph, operators=operators))


def dim(net: CapturedModel, place: int, name: str) -> int:
    return next(number for number, each in enumerate(net.graph.operators[place].dims) if each.name == name)


def all_free(net: CapturedModel, place: int) -> CapturedModel:
    """As if the operator's rule let all its dimensions be split."""
    operator = net.graph.operators[place]
    return with_operator(
        net, place, replace(operator, dims=tuple(Dim.free(each.name, each.size) for each in operator.dims))
    )


def test_computing_everything_on_every_device_can_always_be_run() -> None:
    net = captured()
    assert unsupported(net, strategy(net, Mesh((2,)))) == []
    assert unsupported(net, strategy(net, Mesh((5, 3, 2)))) == []


def test_a_split_that_leaves_a_part_for_every_device_can_be_run() -> None:
    net = captured()
    place = place_of(net, "linear")
    for name in ("m0", "n", "k"):
        assert unsupported(net, strategy(net, Mesh((2,)), {place: (dim(net, place, name),)})) == []


def test_a_strategy_for_another_graph_is_refused() -> None:
    net = captured()
    short = ShardingStrategy(Mesh((2,)), ((REPLICATED,),) * 3)
    assert unsupported(net, short) == [f"the strategy has 3 splits for the {len(net.graph)} operators of 'Net'"]


def test_a_mesh_axis_without_devices_is_refused() -> None:
    net = captured()
    assert unsupported(net, strategy(net, Mesh((2, 0)))) == ["a mesh of 2x0 has an axis without devices"]


def test_a_split_with_too_few_entries_is_refused() -> None:
    net = captured()
    place = place_of(net, "linear")
    (reason,) = unsupported(net, strategy(net, Mesh((2, 2)), {place: (0,)}))
    assert (
        reason == "operator 'linear' (aten.linear.default): the split (0,) has 1 entries for the 2 axes of the mesh 2x2"
    )


def test_a_split_of_a_dimension_that_is_not_there_is_refused() -> None:
    net = captured()
    place = place_of(net, "linear")
    (reason,) = unsupported(net, strategy(net, Mesh((2,)), {place: (9,)}))
    assert reason == "operator 'linear' (aten.linear.default): the split (9,) names dimension 9 of 4"


def test_a_split_that_does_not_divide_is_refused_for_every_operator_that_has_one() -> None:
    net = captured()
    linear, square = place_of(net, "linear"), place_of(net, "square")
    chosen = {linear: (dim(net, linear, "m1"),), square: (2,)}
    reasons = unsupported(net, strategy(net, Mesh((4,)), chosen))
    assert len(reasons) == 2
    assert reasons[0].startswith("operator 'linear' (aten.linear.default): 'm1' cannot be split into 4 equal parts")


def test_parts_whose_results_do_not_add_up_are_refused() -> None:
    net = captured()
    place = place_of(net, "amax")
    net = all_free(net, place)
    last = net.graph.operators[place].reads[0].tensor.dims[-1]
    assert last is not None
    (reason,) = unsupported(net, strategy(net, Mesh((2,)), {place: (last,)}))
    assert reason.startswith("operator 'amax' (aten.amax.default): the results of parts of ")
    assert reason.endswith("do not add up to the whole")


def test_parts_of_the_queries_of_causal_attention_are_refused() -> None:
    net = captured()
    place = place_of(net, "scaled_dot_product_attention")
    net = all_free(net, place)
    (reason,) = unsupported(net, strategy(net, Mesh((2,)), {place: (dim(net, place, "q"),)}))
    assert "the mask is causal" in reason
    assert unsupported(net, strategy(net, Mesh((2,)), {place: (dim(net, place, "h"),)})) == []


def test_a_draw_that_cannot_be_cut_is_refused() -> None:
    net = capture(nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True).train(), torch.randn(4, 6, 4))
    place = place_of(net, "lstm")
    (reason,) = unsupported(net, strategy(net, Mesh((2,)), {place: (dim(net, place, "b"),)}))
    assert reason == "operator 'lstm' (aten.lstm.input): it draws at random, and its draw cannot be cut"
    assert unsupported(net, strategy(net, Mesh((2,)))) == []


def test_a_kernel_that_does_not_take_parts_is_refused() -> None:
    net = captured()
    place = place_of(net, "split")
    net = all_free(net, place)
    operator = net.graph.operators[place]
    last = operator.reads[0].tensor.dims[-1]
    assert last is not None
    # As if each output had the axis along which the tensor is taken apart.
    outputs = tuple(replace(each, dims=operator.reads[0].tensor.dims) for each in operator.outputs)
    net = with_operator(net, place, replace(operator, outputs=outputs))
    (reason,) = unsupported(net, strategy(net, Mesh((2,)), {place: (last,)}))
    assert "its part has the shape" in reason


def test_an_operator_that_works_in_place_is_refused() -> None:
    net = captured()
    node = next(node for node in net.program.graph.nodes if node.name == "square")
    before = node.target
    node.target = torch.ops.aten.square_.default
    try:
        (reason,) = unsupported(net, strategy(net, Mesh((2,))))
        assert reason.endswith("it changes its operands in place, and parts of them are copies")
    finally:
        node.target = before
