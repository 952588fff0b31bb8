"""A tensor's outline: all that the rules for workspaces look at, and what it is at another batch size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sketch:
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
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True


def sketched(value: Any) -> Any:
    """Arguments or results of an operator with sketches in place of the tensors."""
    if isinstance(value, Tensor):
        return Sketch(tuple(value.shape), value.stride(), value.element_size())
    if isinstance(value, (tuple, list)):
        return tuple(sketched(one) for one in value)
    return value


def between(first: Any, second: Any, share: float) -> Any:
    """What lies so far on the way from the first to the second, and beyond if the share is above 1."""
    if isinstance(first, Sketch):
        shape = tuple(between(a, b, share) for a, b in zip(first.shape, second.shape, strict=True))
        strides = tuple(between(a, b, share) for a, b in zip(first.strides, second.strides, strict=True))
        return Sketch(shape, strides, first.element)
    if isinstance(first, tuple):
        return tuple(between(a, b, share) for a, b in zip(first, second, strict=True))
    if isinstance(first, int) and not isinstance(first, bool):
        return max(0, round(first + share * (second - first)))
    return first
