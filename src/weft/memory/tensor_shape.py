"""A tensor without data or device: all that the rules for workspaces read, at any batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorShape:
    """Shape, strides and size of an element, with the methods of the tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element: int

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return self.element

    def stride(self, dim: int) -> int:
        return self.strides[dim]

    @property
    def bytes(self) -> int:
        return self.numel() * self.element

    def is_contiguous(self) -> bool:
        return self._is_dense_in(range(self.dim()))

    def has_channels_last(self) -> bool:
        """Whether it is dense in NHWC order."""
        return self.dim() > 2 and self._is_dense_in((0, *range(2, self.dim()), 1))

    def _is_dense_in(self, order: Sequence[int]) -> bool:
        step = 1
        for dim in reversed(order):
            if self.shape[dim] != 1 and self.strides[dim] != step:
                return False
            step *= self.shape[dim]
        return True


def to_shapes(value: Any) -> Any:
    """Arguments or results of an operator with a `TensorShape` in place of every tensor."""
    if isinstance(value, Tensor):
        return TensorShape(tuple(value.shape), value.stride(), value.element_size())
    if isinstance(value, (tuple, list)):
        return tuple(to_shapes(one) for one in value)
    return value


def weighted_sum(values: Sequence[Any], shares: Sequence[int], whole: int) -> Any:
    """The sum of the values, each weighted by its share of ``whole``; what is not a number is as in the first value.

    >>> weighted_sum([(2, "a"), (4, "a")], [-1, 2], 1)
    (6, 'a')
    """
    first = values[0]
    if isinstance(first, TensorShape):
        shape = weighted_sum([one.shape for one in values], shares, whole)
        return TensorShape(shape, weighted_sum([one.strides for one in values], shares, whole), first.element)
    if isinstance(first, tuple):
        return tuple(weighted_sum(each, shares, whole) for each in zip(*values, strict=True))
    if isinstance(first, int) and not isinstance(first, bool) and any(one != first for one in values):
        total = sum(one * share for one, share in zip(values, shares, strict=True))
        return max(0, (2 * total + whole) // (2 * whole))
    return first
