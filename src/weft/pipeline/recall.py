"""A layer that keeps nothing but its input, and runs its forward again when its backward is due: ``recomputed``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from weft.errors import ConsistencyError
from weft.pipeline import foreach
from weft.pipeline.boundary import boundary, entered
from weft.pipeline.seeding import Seeder
from weft.pipeline.weights import Weights
from weft.supernet import Carry

Again = Callable[[], AbstractContextManager[None]]
"""A block in which a layer draws, and computes, as it did in its forward."""


@contextmanager
def as_before(
    seeder: Seeder, precision: Callable[[], AbstractContextManager[Any]], i: int, j: int, layer: str
) -> Iterator[None]:
    """A block for micro-batch j of step i in which the layer draws, and computes, as it did in its forward."""
    with precision():
        seeder.set(i, j, layer)
        yield


class Recalled:
    """One layer of one micro-batch: a forward without a graph, and a backward that makes one, under newer weights.

    What is saved is the input of each layer, and not of each stage, so that the result is the same at every cut.
    """

    def __init__(self, n: int, weights: Weights, side: Mapping[str, Any], trains: bool, again: Again) -> None:
        self._n, self._weights, self._side, self._trains, self._again = n, weights, side, trains, again
        self._record: list[Tensor] = []
        self.taken: Carry = ()

    def forward(self, carry: Carry) -> Carry:
        """The outputs under the version that the forward must see."""
        self.taken = carry
        before = [x._version for x in carry]
        with torch.no_grad():
            outputs, _ = self._weights.forward(self._n, tuple(x.detach() for x in carry), self._side, self._trains)
        if [x._version for x in carry] != before:
            raise ConsistencyError(
                f"layer '{self._weights.layer.name}' works in place on its input, which 'recomputed' needs again for "
                "the backward: use the form that does not, such as nn.ReLU(inplace=False)"
            )
        if self._weights.statistics.norms:
            self._record = self._weights.statistics.record(copy=True)
        graded = self._trains or any(x.requires_grad for x in carry)
        return tuple(y.detach().requires_grad_(graded and y.is_floating_point()) for y in outputs)

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients of the layer's parameters and of its inputs, under the newest version."""
        weights = self._weights
        newest = weights.current()
        leaves = newest if self._trains else [leaf.detach() for leaf in newest]
        inputs = tuple(x.detach().requires_grad_(x.requires_grad) for x in self.taken)
        with self._again(), torch.enable_grad():
            outputs = boundary(weights.run(leaves, entered(inputs), self._side))
        if self._record:  # what counts is what the forward saw
            foreach.copy_([x.data for x in weights.statistics.record(copy=False)], self._record)
        sources = [*(leaves if self._trains else ()), *(x for x in inputs if x.requires_grad)]
        pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad and g is not None]
        count = len(leaves) if self._trains else 0
        if not pairs or not sources:
            return [None] * count, [None] * len(inputs)
        found = torch.autograd.grad([y for y, _ in pairs], sources, [g for _, g in pairs], allow_unused=True)
        back = iter(found[count:])
        return list(found[:count]), [next(back) if x.requires_grad else None for x in inputs]
