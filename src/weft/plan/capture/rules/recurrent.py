"""Recurrent layers, or one step of them, as one operator: sequences of a batch are free, all else is whole."""

from __future__ import annotations

from weft.plan.capture.op_call import AxisNames, IterationSpace, OpCall, iteration_space, rule

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@rule("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")
def recurrent(call: OpCall) -> IterationSpace | None:
    """``input`` and result ``(b, s, h)`` or ``(s, b, h)`` by ``batch_first``, states ``(layers, b, h)``."""
    value = call.operands[0]
    if value.rank != 3:
        return None
    order: AxisNames = ("b", None, None) if call.given["batch_first"] else (None, "b", None)
    state: AxisNames = (None, "b", None)
    hidden = call.given["hx"]
    states = len(hidden) if isinstance(hidden, (list, tuple)) else 1
    weights = call.operands[1 + states :]
    steps = value.elements // value.shape[2]
    products = sum(weight.elements for weight in weights if weight.rank == 2)
    gates = _GATES[call.target.split(".")[1]]
    return iteration_space(
        call,
        "recurrent",
        [order, *[state] * states, *[(None,) * weight.rank for weight in weights]],
        [order, *[state] * (len(call.results) - 1)],
        flops=2.0 * steps * products,
        backward=2.0,
        saved_operands=[0],
        saved_results=[0],
        extra=float(steps * call.results[0].shape[2] * (gates + 1) * value.dtype.itemsize * call.given["num_layers"]),
    )


@rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def cell(call: OpCall) -> IterationSpace | None:
    """One step of such a layer: ``input`` ``(b, i)``, states and results ``(b, h)``."""
    value = call.operands[0]
    if value.rank != 2:
        return None
    hidden = call.given["hx"]
    states = len(hidden) if isinstance(hidden, (list, tuple)) else 1
    weights = call.operands[1 + states :]
    products = sum(weight.elements for weight in weights if weight.rank == 2)
    gates = _GATES[call.target.split(".")[1].removesuffix("_cell")]
    row: AxisNames = ("b", None)
    return iteration_space(
        call,
        "recurrent",
        [*[row] * (1 + states), *[(None,) * weight.rank for weight in weights]],
        [row] * len(call.results),
        flops=2.0 * value.shape[0] * products,
        backward=2.0,
        saved_operands=[0],
        saved_results=[0],
        extra=float(value.shape[0] * call.results[0].shape[1] * (gates + 1) * value.dtype.itemsize),
    )
