"""Modules that take a pick: elastic leaves, which hold weights, and composites that a user writes from them."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor, nn

from weft.space import Subnet
from weft.supernet.elastic.mixture import Pick
from weft.supernet.elastic.sizes import Sizes
from weft.supernet.elastic.slices import narrowed


class Module(nn.Module):
    """A module whose forward takes the pick as the keyword ``pick`` and hands it to the elastic modules within.

    ``extract`` traces such a forward with the subnet's sizes; so a forward is made of calls of modules and torch
    functions, and whatever it asks of the pick is settled then.
    """

    @property
    def reads(self) -> tuple[str, ...]:
        """The choices that the module itself reads, those of the modules within apart."""
        return ()


class Leaf(Module):
    """An elastic module with weights of its own: knows its sizes and its plain form."""

    sizes: Sizes

    @property
    def reads(self) -> tuple[str, ...]:
        return self.sizes.names

    @abstractmethod
    def plain(self, subnet: Subnet) -> nn.Module:
        """A module of torch.nn with copies of what the subnet uses."""


def call(module: nn.Module, *inputs: Tensor, pick: Pick, **side: Any) -> Any:
    """The module's output; the pick is given to those that take one."""
    return module(*inputs, pick=pick, **side) if takes_pick(module) else module(*inputs, **side)


def takes_pick(module: nn.Module) -> bool:
    return isinstance(module, Module)


def prefix(tensor: Tensor, *sizes: int) -> Tensor:
    """The part of a weight that a subnet uses, laid out as in the plain module, so that kernels round alike."""
    return narrowed(tensor, *sizes).contiguous()


def copied(tensor: Tensor, *sizes: int) -> Tensor:
    """The same as a tensor of its own."""
    return prefix(tensor.detach(), *sizes).clone()


def load(module: nn.Module, tensors: dict[str, Tensor | None], training: bool) -> nn.Module:
    """A fresh plain module with these parameters and buffers."""
    for name, tensor in tensors.items():
        if tensor is not None:
            target = getattr(module, name)
            if isinstance(target, nn.Parameter):
                setattr(module, name, nn.Parameter(tensor, requires_grad=target.requires_grad))
            else:
                setattr(module, name, tensor)
    return module.train(training)
