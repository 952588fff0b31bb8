"""Optimizers of fused trials: the arithmetic of torch.optim on a matrix with a row for each trial's own options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.engine.optimizer import Optimizer

KINDS = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adamw"}
_KNOWN = {
    "sgd": {"lr", "weight_decay", "momentum", "dampening", "nesterov"},
    "adam": {"lr", "weight_decay", "betas", "eps"},
    "adamw": {"lr", "weight_decay", "betas", "eps"},
}
_WITHOUT_EFFECT = {"foreach", "fused", "capturable", "differentiable"}
"""Options that change no result."""


def why_not_stackable(optimizer: Optimizer) -> str | None:
    """Why fused trials cannot have this optimizer; None if they can."""
    kind = KINDS.get(optimizer.cls)
    if kind is None:
        return f"the optimizer {optimizer.cls.__name__} has no form for fused trials, as SGD, Adam and AdamW have"
    if optimizer.groups is not None:
        return "its optimizer has groups of parameters"
    beyond = {name for name, value in optimizer.options.items() if value} - _KNOWN[kind] - _WITHOUT_EFFECT
    return f"{optimizer.cls.__name__} of fused trials has no {', '.join(sorted(beyond))}" if beyond else None


class StackedOptimizer:
    """Updates a matrix of weights, (trials, weights), by gradients of the same shape."""

    def __init__(self, optimizers: Sequence[Optimizer], weights: Tensor) -> None:
        self.kind = KINDS[optimizers[0].cls]
        self._options = [{**_defaults(one), **one.options} for one in optimizers]
        self._device = weights.device
        self.names: tuple[str, ...] = ("momentum_buffer",) if self.kind == "sgd" else ("exp_avg", "exp_avg_sq")
        if self.kind == "sgd" and not any(options["momentum"] for options in self._options):
            self.names = ()
        self.state = {name: torch.zeros_like(weights) for name in self.names}
        self.steps = 0
        self._make_columns()

    def step(self, weights: Tensor, gradients: Tensor, factor: float) -> None:
        """One update at ``factor`` times each trial's learning rate. ``gradients`` are used up."""
        self.steps += 1
        rate = self._rate * factor
        if self.kind == "sgd":
            self._sgd(weights, gradients, rate)
        else:
            self._adam(weights, gradients, rate)

    def keep(self, rows: Tensor) -> None:
        """Only these rows go on, in this order."""
        self.state = {name: value[rows] for name, value in self.state.items()}
        self._options = [self._options[row] for row in rows.tolist()]
        self._make_columns()

    def scalars(self, row: int) -> dict[str, Tensor]:
        """What torch.optim keeps beside tensors like the weights, for a checkpoint."""
        return {} if self.kind == "sgd" else {"step": torch.tensor(float(self.steps))}

    def has(self, row: int) -> tuple[str, ...]:
        """The names of the states that torch.optim would have for a trial."""
        return self.names if self.kind != "sgd" or self._options[row]["momentum"] else ()

    def _make_columns(self) -> None:
        def column(name: str) -> Tensor:
            values = [[float(options.get(name) or 0.0)] for options in self._options]
            return torch.tensor(values, dtype=torch.float64).to(self._device)

        self._rate, self._decay = column("lr"), column("weight_decay")
        self._momentum, self._dampening = column("momentum"), column("dampening")
        self._decays = any(options.get("weight_decay") for options in self._options)
        self._common = self._options[0]

    def _sgd(self, weights: Tensor, gradients: Tensor, rate: Tensor) -> None:
        if self._decays:
            gradients.addcmul_(weights, self._decay.to(weights.dtype))
        if self.names:
            buffer, momentum = self.state["momentum_buffer"], self._momentum.to(weights.dtype)
            # Without momentum torch keeps no buffer and dampens nothing; nor does it in the first step.
            damped = (self._momentum != 0) & (self.steps > 1)
            fresh = (1.0 - self._dampening * damped).to(weights.dtype)
            buffer.mul_(momentum).addcmul_(gradients, fresh)
            gradients = gradients.addcmul_(buffer, momentum) if self._common["nesterov"] else buffer
        weights.addcmul_(gradients, -rate.to(weights.dtype))

    def _adam(self, weights: Tensor, gradients: Tensor, rate: Tensor) -> None:
        first, second = self._common["betas"]
        mean, square = self.state["exp_avg"], self.state["exp_avg_sq"]
        if self._decays and self.kind == "adam":
            gradients.addcmul_(weights, self._decay.to(weights.dtype))
        elif self._decays:
            weights.mul_((1.0 - rate * self._decay).to(weights.dtype))
        mean.lerp_(gradients, 1.0 - first)
        square.mul_(second).addcmul_(gradients, gradients, value=1.0 - second)
        size = rate / (1.0 - first**self.steps)
        spread = square.sqrt().div_((1.0 - second**self.steps) ** 0.5).add_(self._common["eps"])
        weights.addcmul_(mean.div(spread), -size.to(weights.dtype))


def _defaults(optimizer: Optimizer) -> Mapping[str, Any]:
    make: Any = optimizer.cls
    made: torch.optim.Optimizer = make([torch.zeros(1)])
    return made.defaults
