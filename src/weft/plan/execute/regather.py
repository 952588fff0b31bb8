"""Parameters that are gathered again for the backward, so that none is kept whole from the forward until then."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.plan.execute.flow import Moves
from weft.plan.execute.wire import Wire


@dataclass(frozen=True, slots=True)
class _Promise:
    """A look at a gathered parameter, to be had from this device's part of it."""

    part: Tensor
    moves: Moves
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Regather:
    """Knows the parameters that lie gathered at the moment. What autograd would keep of them is promised instead."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._gathered: dict[int, tuple[Tensor, Moves]] = {}

    def hooks(self) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def gathered(self, whole: Tensor, part: Tensor, moves: Moves) -> None:
        self._gathered[whole.untyped_storage().data_ptr()] = (part.detach(), moves)

    def dropped(self, whole: Tensor) -> None:
        """Its memory may soon be another tensor's."""
        self._gathered.pop(whole.untyped_storage().data_ptr(), None)

    def _pack(self, tensor: Tensor) -> Tensor | _Promise:
        found = self._gathered.get(tensor.untyped_storage().data_ptr())
        if found is None:
            return tensor
        return _Promise(*found, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def _unpack(self, kept: Tensor | _Promise) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        whole = self._wire.carry(kept.part, kept.moves)
        return whole.as_strided(kept.shape, kept.strides, kept.offset)
