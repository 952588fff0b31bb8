"""A batch as a model sees it: its tensors, its samples, the model's arguments, and the loss of the outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from weft.errors import PlanError

TARGETS = ("label", "targets", "y")
"""Entries of a batch that a loss reads, and a model does not."""


def batch_items(value: Any) -> list[tuple[Any, Any]]:
    """What a mapping, tuple, list or dataclass holds, by key, index or name; nothing for anything else."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return []


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested mappings, tuples, lists and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    else:
        for _, item in batch_items(value):
            yield from tensors_in(item)


def batch_size(batch: Any) -> int:
    """The first dimension of the batch's first tensor; `PlanError` if it has none."""
    if isinstance(batch, Tensor):
        if batch.dim():
            return batch.shape[0]
    else:
        for _, value in batch_items(batch):
            if isinstance(value, Tensor) or batch_items(value):
                return batch_size(value)
    raise PlanError("the batch holds no tensor with a first dimension to count samples by")


def call_model(model: Callable[..., Any], batch: Any, inputs: Sequence[str] | None = None, targets: bool = True) -> Any:
    """The model's outputs for a batch.

    A tuple or list holds its arguments in order; a tensor, or a dataclass, is its one argument. Of a mapping the
    entries ``inputs`` are the arguments in order; without them, all by name, or without ``targets`` in order all that
    are not named as targets are.
    """
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    if not isinstance(batch, Mapping):
        return model(batch)
    if inputs is not None:
        return model(*(batch[name] for name in inputs))
    if targets:
        return model(**batch)
    return model(*(value for name, value in batch.items() if name not in TARGETS))


def loss_of(outputs: Any, batch: Any, loss: Callable[[Any, Any], Tensor] | None = None) -> Tensor:
    """The loss of a batch, or without a function for it the output's own, or the mean of its first tensor.

    `PlanError` where the outputs hold no tensor.
    """
    if loss is not None:
        return loss(outputs, batch)
    own = getattr(outputs, "loss", None)
    if isinstance(own, Tensor):
        return own
    first = next(tensors_in(outputs), None)
    if first is None:
        raise PlanError(f"the model gives a {type(outputs).__name__} in which no tensor is found: give a loss")
    return first if not first.dim() else first.float().mean()
