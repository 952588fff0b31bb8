"""What is told of an operator, and figures as a person reads them."""

from __future__ import annotations

from weft.plan.batches import batch_dims
from weft.plan.graph import PARAMETER, Operator, Tensor
from weft.plan.layout import PARTIAL, Layout, layout, local_shape, result_layout
from weft.plan.page.colours import split_words
from weft.plan.page.prices import Prices
from weft.plan.plan import Plan
from weft.units import size

_COMMON = ("elementwise", "random", "copy", "along", "normalize", "constant")  # kinds that say less than what is called


def seconds(time: float) -> str:
    """A time for a person.

    >>> seconds(0.0123), seconds(4.5e-6), seconds(12.0)
    ('12.3 ms', '4.5 µs', '12 s')
    """
    if time < 1e-12:  # what is left of a difference
        return "0 s"
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if time < 1000 / factor:
            return f"{time * factor:,.3g} {unit}"
    return f"{time:,.3g} s" if time < 1000 else f"{time:,.0f} s"


def called(operator: Operator) -> str:
    """What an operator is, in a word.

    >>> called(Operator("tanh_3", "elementwise", "aten.tanh.default", (), (), ()))
    'tanh'
    """
    parts = operator.target.split(".")
    return parts[min(1, len(parts) - 1)] if operator.kind in _COMMON else operator.kind


def devices_of(plan: Plan, stage: int) -> str:
    """The devices of a stage, such as ``stage 2: devices 4 to 7``."""
    share = plan.devices // plan.stages
    first = stage * share
    names = f"device {first}" if share == 1 else f"devices {first} to {first + share - 1}"
    return f"stage {stage + 1}: {names}" if plan.stages > 1 else names


class Teller:
    """All that is known of an operator, as lines of text."""

    def __init__(self, plan: Plan, folded: dict[int, list[int]], prices: Prices | None) -> None:
        self._plan, self._folded, self._prices = plan, folded, prices
        self._batch = batch_dims(plan.graph)

    def tell(self, place: int, copies: tuple[int, ...]) -> str:
        """Of the operator at a place, which stands for those of all ``copies``."""
        plan = self._plan
        operator, split = plan.graph.operators[place], plan.splits[place]
        dims = ", ".join(f"{dim.name} {dim.size}" for dim in operator.dims)
        batch = self._batch[place]
        lines = [
            operator.name + (f" and {len(copies) - 1} alike" if len(copies) > 1 else ""),
            f"module: {operator.module or 'none'}",
            f"operator: {operator.target} ({operator.kind})" + ("" if operator.known else ", without a rule"),
            f"iteration space: {dims or 'none'}",
            f"split: {split_words(plan, place)}"
            + (f" ({operator.dims[batch].name} holds the batch)" if batch is not None else ""),
            f"stage: {plan.stage[place] + 1} of {plan.stages}" if plan.stages > 1 else "",
            *(self._tensor("reads", read.tensor, layout(read.tensor, split)) for read in operator.reads),
            *(self._tensor("gives", tensor, result_layout(tensor, split)) for tensor in operator.outputs),
            *(self._parameter(own) for own in self._folded[place] if self._is_parameter(own)),
            *self._costs(copies),
        ]
        return "\n".join(filter(None, lines))

    def _is_parameter(self, place: int) -> bool:
        return self._plan.graph.operators[place].kind == PARAMETER

    def _parameter(self, place: int) -> str:
        operator = self._plan.graph.operators[place]
        laid = result_layout(operator.outputs[0], self._plan.splits[place])
        return self._tensor(f"parameter {operator.target} kept:", operator.outputs[0], laid)

    def _tensor(self, what: str, tensor: Tensor, laid: Layout) -> str:
        here = local_shape(tensor.shape, laid, self._plan.mesh)
        partial = ", partial sums" if PARTIAL in laid else ""
        return (
            f"{what} {_shape(tensor.shape)}" + (f", {_shape(here)} a device" if here != tensor.shape else "") + partial
        )

    def _costs(self, copies: tuple[int, ...]) -> list[str]:
        if self._prices is None:
            return []
        own = [place for copy in copies for place in (copy, *self._folded[copy])]
        each = "each, on average, " if len(copies) > 1 else ""

        def mean(values: tuple[float, ...]) -> float:
            return sum(values[place] for place in own) / len(copies)

        found = self._prices
        kept = mean(found.weights) + mean(found.states)
        return [
            f"a step: {each}{seconds(mean(found.compute))} computing, "
            f"{seconds(mean(found.communication))} communicating",
            f"a device: {each}{size(kept)} parameters with gradients and states, {size(mean(found.activations))} "
            "activations" + (" a micro-batch" if self._plan.microbatches > 1 else ""),
        ]


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
