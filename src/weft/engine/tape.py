"""One micro-batch through some layers: forward now, backward once the gradient of what came out is known.

Layers run in *islands*. Within an island autograd keeps the graph; between two islands the tape carries the gradient
across. A layer captured as a CUDA graph is an island of its own. Where islands begin and end never changes a bit (see
``boundary``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.engine.cuda_graphs import CapturedLayer, CudaGraphCache, Gradients
from weft.engine.weight_versions import VersionedLayer
from weft.supernet import Activations
from weft.supernet.layer import detached_entry, grad_barrier

Grad = Callable[[], tuple[Tensor | None, ...]]
InBackground = Callable[[Grad], tuple[Tensor | None, ...]]
"""Calls a function that leaves Python free for other threads meanwhile."""


@dataclass(slots=True)
class _Island:
    inputs: Activations
    outputs: Activations = ()
    layers: list[tuple[VersionedLayer, list[Tensor], bool]] = field(default_factory=list)


class Tape:
    """The layers that a micro-batch has used so far, with all that its backward needs.

    Activations that were ``received`` come from another stage: those that require a gradient become leaves. A tape
    that is ``split`` has an island for every layer, so that ``input_gradients`` come first and the gradients of
    weights after them. ``in_background`` runs other work while autograd is busy.
    """

    def __init__(
        self,
        n: int,
        activations: Activations,
        graphs: CudaGraphCache | None = None,
        received: bool = False,
        split: bool = False,
        in_background: InBackground | None = None,
    ) -> None:
        self.n = n
        self._in_background = in_background
        self.activations = activations
        self.used: list[VersionedLayer] = []
        self._trained: list[bool] = []
        self.input_gradients: Gradients = ()
        """After the backward: the gradients of the activations that the tape began with."""
        self._graphs = graphs
        self._received = received
        self._split = split
        self._islands: list[_Island | CapturedLayer] = []
        self._later: list[tuple[_Island | CapturedLayer, Gradients, list[Tensor | None]]] = []

    def forward(self, weights: VersionedLayer, extra: Mapping[str, Any], trains: bool = True) -> None:
        """Runs the layer on the activations of the last one, under the version that this micro-batch must read.

        A layer that does not train in this step gets no gradients.
        """
        self.used.append(weights)
        self._trained.append(trains)
        captured = None if self._graphs is None else self._graphs.get(weights, self.activations, trains)
        if captured is not None:
            weights.leaves(self.n)
            self.activations = captured.forward(self.activations)
            self._islands.append(captured)
            return
        island = self._open()
        activations, leaves = weights.forward(self.n, self.activations, extra, trains)
        self.activations = grad_barrier(activations)
        island.layers.append((weights, leaves, trains))

    def outputs(self) -> Activations:
        """The activations of the last layer, in an open island: the loss is computed from them."""
        self._open()
        return self.activations

    def backward(self, outputs: Activations, gradients: Gradients) -> dict[str, list[Tensor | None]]:
        """Gradients by layer, from those of the outputs, under the versions that the backward must read."""
        self.backward_inputs(outputs, gradients)
        return self.backward_weights()

    def backward_inputs(self, outputs: Activations, gradients: Gradients) -> None:
        """Finds ``input_gradients``, the gradients of the first activations; unless split, those of weights too."""
        for weights in self.used:
            weights.before_backward(self.n)
        self._close(outputs)
        for island in reversed(self._islands):
            incoming = gradients
            weight_gradients: list[Tensor | None] = []
            if not isinstance(island, _Island):
                weight_gradients, gradients = island.backward(gradients)
            elif self._split:
                _, gradients = self._go_back(island, gradients, weights=False)
            else:
                weight_gradients, gradients = self._go_back(island, gradients)
            self._later.append((island, incoming, weight_gradients))
        self.input_gradients = gradients
        self._islands.clear()

    def backward_weights(self) -> dict[str, list[Tensor | None]]:
        """The gradients by layer, after ``backward_inputs``."""
        leaves: list[Tensor | None] = []
        for island, incoming, weight_gradients in self._later:
            if self._split and isinstance(island, _Island):
                weight_gradients, _ = self._go_back(island, incoming, inputs=False)
            leaves[:0] = weight_gradients
        self._later.clear()
        by_layer: dict[str, list[Tensor | None]] = {}
        start = 0
        for weights, trained in zip(self.used, self._trained, strict=True):
            if trained:
                count = len(weights.parameters)
                by_layer[weights.layer.name] = leaves[start : start + count]
                start += count
        return by_layer

    def _open(self) -> _Island:
        last = self._islands[-1] if self._islands else None
        if isinstance(last, _Island) and not (self._split and last.layers):
            return last
        if isinstance(last, _Island):
            last.outputs = self.activations
        leaves = self.activations
        if last is not None or self._received:
            # A layer may work in place: on what was received, or on a copy of what the layer before may still need.
            # The output of a captured layer is neither, and autograd refuses to change it.
            detached = (x.detach().clone() if isinstance(last, _Island) else x.detach() for x in leaves)
            leaves = tuple(x.requires_grad_(y.requires_grad) for x, y in zip(detached, self.activations, strict=True))
            self.activations = grad_barrier(leaves) if isinstance(last, CapturedLayer) else detached_entry(leaves)
        island = _Island(leaves)
        self._islands.append(island)
        return island

    def _close(self, outputs: Activations) -> None:
        if self._islands and isinstance(self._islands[-1], _Island):
            self._islands[-1].outputs = outputs
        # An island ends where a captured layer begins, with what that one took.
        for before, after in zip(self._islands, self._islands[1:], strict=False):
            if isinstance(before, _Island) and not isinstance(after, _Island):
                before.outputs = after.inputs

    def _go_back(
        self, island: _Island, gradients: Gradients, weights: bool = True, inputs: bool = True
    ) -> tuple[list[Tensor | None], Gradients]:
        """Gradients of the island's weights and of its inputs, or of one of them, with the graph kept for the other."""
        pairs = [(o, g) for o, g in zip(island.outputs, gradients, strict=True) if o.requires_grad and g is not None]
        wanted = [x for x in island.inputs if x.requires_grad] if inputs else []
        leaves = [leaf for _, own_leaves, trained in island.layers if trained for leaf in own_leaves] if weights else []
        if not pairs or not (leaves or wanted):
            return [None] * len(leaves), [None] * len(island.inputs)
        outputs, seeds = [out for out, _ in pairs], [g for _, g in pairs]

        def grad() -> tuple[Tensor | None, ...]:
            return torch.autograd.grad(outputs, [*leaves, *wanted], seeds, retain_graph=not weights, allow_unused=True)

        with ExitStack() as stack:
            for layer, own_leaves, _ in island.layers:
                block = layer.bound(own_leaves)
                if block is not None:
                    stack.enter_context(block)
                if layer.recompute_guard.backwards:
                    stack.enter_context(layer.recompute_guard.backward())
            results = grad() if self._in_background is None else self._in_background(grad)
        if not inputs:
            return list(results), ()
        rest = iter(results[len(leaves) :])
        return list(results[: len(leaves)]), [next(rest) if x.requires_grad else None for x in island.inputs]
