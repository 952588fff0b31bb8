"""A tensor's outline: all that the rules for workspaces look at, and what it is at another batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorShape:
    """Answers like the tensor that it is of."""

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
        return self._lies(range(self.dim()))

    def has_channels_last(self) -> bool:
        """Whether the numbers of a pixel lie side by side, and pixel after pixel."""
        return self.dim() > 2 and self._lies((0, *range(2, self.dim()), 1))

    def _lies(self, order: Sequence[int]) -> bool:
        step = 1
        for dim in reversed(order):
            if self.shape[dim] != 1 and self.strides[dim] != step:
                return False
            step *= self.shape[dim]
        return True


def sketched(value: Any) -> Any:
    """Arguments or results of an operator with sketches in place of the tensors."""
    if isinstance(value, Tensor):
        return TensorShape(tuple(value.shape), value.stride(), value.element_size())
    if isinstance(value, (tuple, list)):
        return tuple(sketched(one) for one in value)
    return value


def combined(values: Sequence[Any], shares: Sequence[int], whole: int) -> Any:
    """The sum of so many shares, of which there are ``whole``, of each value; what is no number is as in the first.

    >>> combined([(2, "a"), (4, "a")], [-1, 2], 1)
    (6, 'a')
    """
    first = values[0]
    if isinstance(first, TensorShape):
        shape = combined([one.shape for one in values], shares, whole)
        return TensorShape(shape, combined([one.strides for one in values], shares, whole), first.element)
    if isinstance(first, tuple):
        return tuple(combined(each, shares, whole) for each in zip(*values, strict=True))
    if isinstance(first, int) and not isinstance(first, bool) and any(one != first for one in values):
        total = sum(one * share for one, share in zip(values, shares, strict=True))
        return max(0, (2 * total + whole) // (2 * whole))
    return first
