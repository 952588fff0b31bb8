"""How a model trains, as a value: its loss and optimizer, in which dtype, and the usual step of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import PlanError, nearest
from weft.plan.memory.fakes import parts_of
from weft.plan.memory.kernels import Kernels

Loss = Callable[[Any, Any], Tensor]
Step = Callable[[nn.Module, torch.optim.Optimizer, Any], Any]
OPTIMIZERS = {
    "sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}  # fmt: skip
_TARGETS = ("label", "targets", "y")
_DTYPES = {"float32": None, "fp32": None, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Training:
    """How a model trains, apart from the batch."""

    model: nn.Module
    kernels: Kernels
    loss: Loss | None = None
    inputs: Sequence[str] | None = None
    optimizer: str | Callable[[list[nn.Parameter]], torch.optim.Optimizer] = "adamw"
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    recompute: bool | Callable[[nn.Module], None] = False
    accumulate: int = 1
    step: Step | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise PlanError(f"the model is a {type(self.model).__name__}: it must be an nn.Module")
        if self.dtype not in _DTYPES:
            raise PlanError(f"unknown dtype '{self.dtype}'{nearest(self.dtype, _DTYPES)}")
        if isinstance(self.optimizer, str) and self.optimizer.lower() not in OPTIMIZERS:
            raise PlanError(f"unknown optimizer '{self.optimizer}'{nearest(self.optimizer.lower(), OPTIMIZERS)}")
        if self.accumulate < 1:
            raise PlanError(f"a step accumulates at least 1 micro-batch, not {self.accumulate}")


def usual_step(training: Training) -> Step:
    """The usual step: gradients are dropped before the forward, and nobody keeps outputs or loss."""
    low = _DTYPES[training.dtype]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        optimizer.zero_grad(set_to_none=True)
        for _ in range(training.accumulate):
            context: AbstractContextManager[Any] = torch.autocast("cpu", low) if low else nullcontext()
            with context:
                value = _loss(training, model, batch)
            value.backward()  # type: ignore[no-untyped-call]
            del value
        optimizer.step()

    return step


def _loss(training: Training, model: nn.Module, batch: Any) -> Tensor:
    loss = training.loss
    if isinstance(batch, (tuple, list)):
        outputs = model(*batch)
    elif not isinstance(batch, Mapping):  # a tensor, or a dataclass as a whole
        outputs = model(batch)
    elif training.inputs is not None:
        outputs = model(*(batch[name] for name in training.inputs))
    elif loss is None:
        outputs = model(**batch)
    else:
        outputs = model(*(value for name, value in batch.items() if name not in _TARGETS))
    if loss is not None:
        return loss(outputs, batch)
    found = getattr(outputs, "loss", None)
    if isinstance(found, Tensor):
        return found
    first = next(tensors(outputs), None)
    if first is None:
        raise PlanError(f"the model gives a {type(outputs).__name__} in which no tensor is found: give a loss")
    return first if not first.dim() else first.float().mean()


def make_optimizer(training: Training, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer as it works on a GPU: over lists of tensors, unless it was told otherwise."""
    if isinstance(training.optimizer, str):
        kind, options = OPTIMIZERS[training.optimizer.lower()], {"lr": 1e-3} | dict(training.options)
        try:
            made: torch.optim.Optimizer = kind(parameters, **options)
        except (TypeError, ValueError) as error:
            name = training.optimizer
            raise PlanError(f"optimizer '{name}' cannot be had with these options: {error}") from error
    else:
        made = training.optimizer(parameters)
    for group in made.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
    return made


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    else:
        for _, one in parts_of(value):
            yield from tensors(one)
