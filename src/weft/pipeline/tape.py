"""One micro-batch through some layers: forward now, backward once the gradient of what came out is known.

Layers run in *islands*. Within an island autograd keeps the graph; between two islands the tape carries the gradient
across. A layer captured as a CUDA graph is an island of its own. Where islands begin and end never changes a bit (see
``boundary``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.pipeline.boundary import boundary, entered
from weft.pipeline.graphs import Captured, Graphs
from weft.pipeline.weights import Weights
from weft.supernet import Carry

Gradients = Sequence[Tensor | None]


@dataclass(slots=True)
class _Island:
    inputs: Carry
    outputs: Carry = ()
    layers: list[tuple[Weights, list[Tensor]]] = field(default_factory=list)


class Tape:
    """The layers that a micro-batch has used so far, and what is needed to go back through them.

    A carry that was ``received`` comes from another stage: what of it requires a gradient gets one of its own.
    """

    def __init__(self, n: int, carry: Carry, graphs: Graphs | None = None, received: bool = False) -> None:
        self.n = n
        self.carry = carry
        self.used: list[Weights] = []
        self.back: Gradients = ()
        """After the backward: the gradients of the carry that the tape began with."""
        self._graphs = graphs
        self._received = received
        self._islands: list[_Island | Captured] = []

    def forward(self, weights: Weights, side: Mapping[str, Tensor]) -> None:
        """Runs the layer on what the last one left, under the version that this micro-batch must see."""
        self.used.append(weights)
        captured = None if self._graphs is None else self._graphs.get(weights, self.carry)
        if captured is not None:
            self.carry = (captured.forward(self.carry[0]),)
            self._islands.append(captured)
            return
        island = self._open()
        carry, leaves = weights.forward(self.n, self.carry, side)
        self.carry = boundary(carry)
        island.layers.append((weights, leaves))

    def outputs(self) -> Carry:
        """What the last layer left, as part of an open island: the loss is computed from it."""
        self._open()
        return self.carry

    def backward(self, outputs: Carry, gradients: Gradients) -> dict[str, list[Tensor | None]]:
        """Gradients by layer, from those of the outputs; every layer sees the version that its backward must see."""
        for weights in self.used:
            weights.before_backward(self.n)
        self._close(outputs)
        leaves: list[Tensor | None] = []
        for island in reversed(self._islands):
            if isinstance(island, Captured):
                own, gradients = island.backward(gradients[0])
            else:
                own, gradients = _backward(island, gradients)
            leaves[:0] = own
        self.back = gradients
        self._islands.clear()
        found: dict[str, list[Tensor | None]] = {}
        start = 0
        for weights in self.used:
            count = len(weights.parameters)
            found[weights.layer.name] = leaves[start : start + count]
            start += count
        return found

    def _open(self) -> _Island:
        last = self._islands[-1] if self._islands else None
        if isinstance(last, _Island):
            return last
        leaves = self.carry
        if last is not None or self._received:
            leaves = tuple(x.detach().requires_grad_(x.requires_grad) for x in self.carry)
            self.carry = entered(leaves)
        island = _Island(leaves)
        self._islands.append(island)
        return island

    def _close(self, outputs: Carry) -> None:
        if self._islands and isinstance(self._islands[-1], _Island):
            self._islands[-1].outputs = outputs
        # An island ends where a captured layer begins, with what that one took.
        for before, after in zip(self._islands, self._islands[1:], strict=False):
            if isinstance(before, _Island) and isinstance(after, Captured):
                before.outputs = (after.taken,)


def _backward(island: _Island, gradients: Gradients) -> tuple[list[Tensor | None], Gradients]:
    pairs = [(o, g) for o, g in zip(island.outputs, gradients, strict=True) if o.requires_grad and g is not None]
    wanted = [x for x in island.inputs if x.requires_grad]
    leaves = [leaf for _, own in island.layers for leaf in own]
    if not pairs or not (leaves or wanted):
        return [None] * len(leaves), [None] * len(island.inputs)
    with ExitStack() as stack:
        for weights, own in island.layers:
            block = weights.bound(own)
            if block is not None:
                stack.enter_context(block)
        outputs, seeds = [out for out, _ in pairs], [g for _, g in pairs]
        found = torch.autograd.grad(outputs, [*leaves, *wanted], seeds, allow_unused=True)
    back = iter(found[len(leaves) :])
    return list(found[: len(leaves)]), [next(back) if x.requires_grad else None for x in island.inputs]
