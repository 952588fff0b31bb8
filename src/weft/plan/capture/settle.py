"""What is changed in how a model runs while it is captured: its loss, and what export stumbles over."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from weft.errors import PlanError
from weft.plan.capture.batch import Named, call

Loss = Callable[[Any, Any], Tensor]


class Inapplicable(Exception):
    """A way of capture that has nothing to do with the model."""


@contextlib.contextmanager
def with_loss(model: nn.Module, named: Named, loss: Loss | None) -> Iterator[None]:
    """Within the block the model's forward takes the batch's tensors by name and gives the loss, if there is one. (A
    module around model and loss would give every parameter another name.)"""
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise PlanError("the loss has parameters of its own, which no model holds: make it part of the model")
    inner = model.forward

    def forward(**tensors: Tensor) -> Any:
        batch = named.batch(tensors)
        output = call(inner, batch)
        return _plain(output) if loss is None else loss(output, batch)

    with _patched(model, forward):
        yield


class Settled(TorchFunctionMode):
    """A single number drawn at random is the largest that can be, so that ``torch.rand([]) < p`` is false, as a
    constant; and ``x.data`` is ``x.detach()``. ``notes`` says what it came to that."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.rand and len(args) == 1 and args[0] in ([], (), [1], (1,), 1):
            self.notes.add("whole layers that the model drops at random (torch.rand) are captured as never dropped")
            largest = 1.0 - 2.0**-24
            return torch.tensor([largest] if args[0] else largest)
        if func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            self.notes.add("x.data is read as x.detach()")
            return args[0].detach()
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def settled(model: nn.Module) -> Iterator[Settled]:
    """Within the block the model's forward runs in the mode."""
    inner = model.forward
    mode = Settled()

    def forward(**tensors: Tensor) -> Any:
        with mode:
            return inner(**tensors)

    with _patched(model, forward):
        yield mode


@contextlib.contextmanager
def grouped_experts(model: nn.Module) -> Iterator[str]:
    """Within the block a mixture of experts (of ``transformers``) multiplies by group instead of looping over experts
    that the data picks. Gives the name of the implementation that it replaces; raises Inapplicable where there is
    none."""
    setter = getattr(model, "set_experts_implementation", None)
    has_choice = getattr(model, "_can_set_experts_implementation", bool)
    before = getattr(getattr(model, "config", None), "_experts_implementation", None)
    if not callable(setter) or not has_choice() or before in (None, "grouped_mm"):
        raise Inapplicable
    setter("grouped_mm")
    try:
        yield str(before)
    finally:
        setter(before)


@contextlib.contextmanager
def custom_functions() -> Iterator[set[str]]:
    """Gathers the names of autograd functions with a backward of their own, of which a program holds only the forward.
    A checkpoint of torch is such a function, without gradient inside: within the block it is what it computes."""
    found: set[str] = set()
    before = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            function, _, *inputs = args
            return function(*inputs, **kwargs)
        if not cls.__module__.startswith("torch."):
            found.add(cls.__name__)
        return before.__func__(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield found
    finally:
        torch.autograd.Function.apply = before  # type: ignore[method-assign]


@contextlib.contextmanager
def _patched(model: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = model.__dict__.get("forward")
    model.__dict__["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del model.__dict__["forward"]
        else:
            model.__dict__["forward"] = own


def _plain(output: Any) -> Any:
    """Objects that torch cannot take apart, as a mapping of the tensors that they hold."""

    def plain(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, (Tensor, bool, int, float, str)):
            return leaf
        held = {name: value for name, value in getattr(leaf, "__dict__", {}).items() if isinstance(value, Tensor)}
        return held or None

    return pytree.tree_map(plain, output)
