"""How an operator of a captured program is run on a part: which of its arguments change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from weft.plan.graph import Operator, Tensor

_SIZES = {"view": "size", "reshape": "shape", "_unsafe_view": "size", "expand": "size", "_reshape_alias": "size"}
_BIAS = {"linear": 2, "addmm": 0, "baddbmm": 0, "addmv": 0}


def localise(node: fx.Node, operator: Operator, parts: Mapping[int, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the node for one part, where ``parts`` says into how many each dimension (by place) is split.

    Sizes that views and expansions are given become those of the part, and groups of a convolution are divided. Tensors
    stay nodes. A part of a tensor need not be contiguous: run ``view`` as ``reshape``.
    """
    name = operator.target.split(".")[1] if "." in operator.target else operator.target
    if name in _SIZES:
        return _replaced(node, _SIZES[name], list(local_shape(operator.outputs[0], parts)))
    if name == "repeat_interleave" and node.kwargs.get("output_size") is not None:
        return _replaced(node, "output_size", None)
    if name == "native_group_norm":
        return _replaced(node, "N", local_shape(operator.outputs[0], parts)[0])
    if operator.kind == "conv":
        places = [place for place, dim in enumerate(operator.dims) if dim.name == "g"]
        if places and (count := parts.get(places[0], 1)) > 1:
            schema = node.target._schema  # type: ignore[union-attr]
            place = next(number for number, argument in enumerate(schema.arguments) if argument.name == "groups")
            groups = node.args[place] if place < len(node.args) else node.kwargs["groups"]
            return _replaced(node, "groups", groups // count)  # type: ignore[operator]
    return tuple(node.args), dict(node.kwargs)


def local_shape(tensor: Tensor, parts: Mapping[int, int]) -> tuple[int, ...]:
    """The shape of a part of a tensor.

    >>> local_shape(Tensor((4, 6), 4, (0, None)), {0: 2, 1: 3})
    (2, 6)
    """
    return tuple(
        size if place is None else size // parts.get(place, 1)
        for size, place in zip(tensor.shape, tensor.dims, strict=True)
    )


def bias_operand(operator: Operator) -> int | None:
    """Which read of a product or convolution is added to the result.

    Where a dimension that is summed over is split, every part adds it, so a runner divides it by the number of parts
    (its gradient comes out right: each part gives its share). Nothing else must change: the sum of the parts is the
    result."""
    name = operator.target.split(".")[1] if "." in operator.target else operator.target
    if operator.kind == "conv":
        return 2 if len(operator.reads) > 2 else None
    if operator.kind == "matmul" and name in _BIAS and len(operator.reads) > 2:
        return _BIAS[name]
    return None


def summed(operator: Operator) -> frozenset[int]:
    """The dimensions that the first output lacks: splitting one leaves partial sums."""
    held = set(operator.outputs[0].dims) if operator.outputs else set()
    return frozenset(place for place in range(len(operator.dims)) if place not in held)


def draws(node: fx.Node) -> bool:
    """Whether the node draws random numbers when it runs: parts would draw others than the whole."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    arguments = {argument.name: number for number, argument in enumerate(node.target._schema.arguments)}

    def given(name: str, default: Any) -> Any:
        number = arguments.get(name)
        if number is not None and number < len(node.args):
            return node.args[number]
        return node.kwargs.get(name, default)

    name = node.target._schema.name.removeprefix("aten::")
    if name in ("dropout", "native_dropout", "feature_dropout", "alpha_dropout"):
        return bool(given("p", 0.5)) and bool(given("train", True))
    if "scaled_dot_product" in name:
        return bool(given("dropout_p", 0.0))
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return bool(given("dropout", 0.0)) and bool(given("train", False)) and given("num_layers", 1) > 1
    return torch.Tag.nondeterministic_seeded in node.target.tags


def _replaced(node: fx.Node, name: str, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    arguments = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    place = arguments.index(name)
    if place < len(node.args):
        return (*node.args[:place], value, *node.args[place + 1 :]), dict(node.kwargs)
    return tuple(node.args), {**node.kwargs, name: value}
