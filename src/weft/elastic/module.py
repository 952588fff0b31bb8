"""Modules that take a pick: elastic leaves, which hold weights, and composites that a user writes from them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from weft.elastic.mixture import Pick
from weft.elastic.sizes import Sizes
from weft.space import Subnet

T = TypeVar("T", bound=Tensor | None)


class Module(nn.Module):
    """A module whose forward takes the pick as the keyword ``pick`` and hands it to the elastic modules within.

    ``extract`` traces such a forward with the subnet's sizes; so a forward is made of calls of modules and torch
    functions, and what it reads of the pick is fixed by the trace.
    """

    @property
    def reads(self) -> tuple[str, ...]:
        """The choices that the module itself reads, without those of the modules within."""
        return ()


class Leaf(Module):
    """An elastic module that holds weights, with their sizes and a plain form."""

    sizes: Sizes

    @property
    def reads(self) -> tuple[str, ...]:
        return self.sizes.names

    @abstractmethod
    def plain(self, subnet: Subnet) -> nn.Module:
        """A module of torch.nn with copies of what the subnet uses."""


def call(module: nn.Module, *inputs: Tensor, pick: Pick, **extras: Any) -> Any:
    """The module's output; the pick goes to modules that take one."""
    return module(*inputs, pick=pick, **extras) if takes_pick(module) else module(*inputs, **extras)


def takes_pick(module: nn.Module) -> bool:
    return isinstance(module, Module)


def contiguous_prefix(tensor: T, *sizes: int) -> T:
    """The part of a weight that a subnet uses, laid out as in the plain module, so that kernels round alike; None of
    None."""
    return tensor if tensor is None else narrow_prefix(tensor, *sizes).contiguous()  # type: ignore[return-value]


def load(module: nn.Module, training: bool, **tensors: Tensor | None) -> nn.Module:
    """A fresh plain module with copies of these as its parameters and buffers."""
    for name, tensor in tensors.items():
        if tensor is not None:
            held = tensor.detach().clone()
            setattr(module, name, nn.Parameter(held) if isinstance(getattr(module, name), nn.Parameter) else held)
    return module.train(training)


# Slices of weights that autograd keeps as what they are: parts of a weight, and not copies of it.
#
# A slice is copied so that kernels find it laid out as in the plain module and round alike. What is kept for the
# backward is its place in the weight: the copy is made again then, from what the weight holds by that time. That
# spares memory, and a backward under newer weights (``bounded``) sees them.


class _SavedSlice(NamedTuple):
    view: Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def narrow_prefix(tensor: Tensor, *sizes: int) -> Tensor:
    """The first entries along every dimension, as a view."""
    for dim, size in enumerate(sizes):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, size)
    return tensor


def saved_as_view(run: Callable[[Tensor], Tensor], view: Tensor) -> Tensor:
    """The output of ``run`` for the slice, laid out without gaps."""
    if view.is_contiguous() or not torch.is_grad_enabled():
        return run(view.contiguous())
    copy, part = view.contiguous(), view.detach()
    where = copy.untyped_storage().data_ptr()

    def pack(tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() != where:
            return tensor
        return _SavedSlice(part, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        return run(copy)


def _unpack(kept: Any) -> Tensor:
    if not isinstance(kept, _SavedSlice):
        return kept  # type: ignore[no-any-return]
    return kept.view.contiguous().as_strided(kept.shape, kept.stride, kept.offset)
