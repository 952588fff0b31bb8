"""The weights, buffers and optimizer of fused trials, stacked in one matrix with a row for each trial."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.engine.optimizer import Optimizer
from weft.nn.batch import tensors_in
from weft.nn.state import attributes_of, joined, named_tensors, non_persistent_buffers
from weft.space import Value
from weft.tune.fusion.vmap import DROPOUT_PLACEHOLDER, CannotFuse
from weft.tune.recipe import CONTINUOUS, TrialConfig
from weft.tune.training.checkpoint import TrialCheckpoint
from weft.utils.rng import torch_seeded

ALIGNED = 64
"""Weights begin at multiples of so many elements, as kernels like them."""


class ReadTracker(Mapping[str, Value]):
    """A trial's values that remember which of them a model's function reads."""

    def __init__(self, params: Mapping[str, Value]) -> None:
        self._params, self.read = dict(params), set[str]()

    def __getitem__(self, name: str) -> Value:
        self.read.add(name)
        return self._params[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)


def build_tracked(config: TrialConfig) -> tuple[nn.Module, set[str]]:
    """The trial's module, and the names of the continuous choices that it may depend on.

    These are the ones that the model's function reads, or all if anything keeps the values for later.
    """
    tracker = ReadTracker(config.params)
    read, kept = tracker.read, weakref.ref(tracker)
    module = replace(config, params=tracker).bare()
    del tracker
    names = read if kept() is None else {*read, *config.params}
    return module, names & set(CONTINUOUS)


def shared_template(config: TrialConfig, rate: float = DROPOUT_PLACEHOLDER) -> tuple[nn.Module, set[str]]:
    """The module whose forward all fused trials share, and what it depends on as of `build_tracked`.

    Its dropouts have a rate that stands for each trial's own, and its weights stand for any.
    """
    if config.dropout is None:
        return build_tracked(config)
    return build_tracked(replace(config, params={**config.params, "dropout": rate}, dropout=rate))


def why_not_shared(module: nn.Module) -> str | None:
    """Why fused trials cannot share a module, by what it holds; None if they can."""
    for name, part in module.named_modules():
        for attribute, value in attributes_of(part):
            kept_by_torch = isinstance(part, nn.RNNBase) and attribute == "_flat_weights"
            if not kept_by_torch and next(tensors_in(value), None) is not None:
                return f"'{joined(name, attribute)}' is a tensor that is neither a weight nor a buffer"
    known = {id(tensor) for _, tensor in named_tensors(module)}
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) not in known:
            return f"'{name}' of its state_dict is neither a weight nor a buffer"
    return None


class StackedModel:
    """The weights, buffers and optimizer of several trials on a device; rows are numbered as they stand now.

    ``parameters`` are views into the matrix, (trials, ...), so that one update of it updates all. Raises CannotFuse for
    trials whose models differ in more than weights and dropout.
    """

    def __init__(self, configs: Sequence[TrialConfig], device: torch.device) -> None:
        self.device = device
        with torch_seeded(configs[0].seed, "init"):
            self.module, read = shared_template(configs[0])
        if (why := why_not_shared(self.module)) is not None:
            raise CannotFuse(why)
        for name in sorted(read - {"dropout"}):
            if len({config.params[name] for config in configs}) > 1:
                raise CannotFuse(f"their models depend on '{name}', which is not the same in all of them")
        self._trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self._starts: dict[str, int] = {}
        width = 0
        for name, parameter in self._trained.items():
            self._starts[name] = width
            width += -(-parameter.numel() // ALIGNED) * ALIGNED
        dtype = next(iter(self._trained.values())).dtype
        self.matrix = torch.zeros(len(configs), width, dtype=dtype, device=device)
        shapes = {name: tensor.shape for name, tensor in named_tensors(self.module)}
        built: list[dict[str, Tensor]] = []
        for row, config in enumerate(configs):
            tensors = dict(named_tensors(config.build()))
            if {name: tensor.shape for name, tensor in tensors.items()} != shapes:
                raise CannotFuse("their models have other weights or buffers")
            for name in self._trained:
                self._view(name, self.matrix)[row].copy_(tensors[name].detach())
            built.append({name: tensor.detach() for name, tensor in tensors.items() if name not in self._trained})
        self.fixed = {name: torch.stack([one[name] for one in built]).to(device) for name in built[0]}
        self.optimizer = StackedOptimizer([config.optimizer for config in configs], self.matrix)
        self._written: frozenset[str] = frozenset()
        self._versions = {
            name: self.fixed[name]._version for name in non_persistent_buffers(self.module) if name in self.fixed
        }
        self._expose()

    def join(self, gradients: Sequence[Tensor]) -> Tensor:
        """Gradients in the order of ``parameters``, as one matrix like that of the weights."""
        count, pieces = len(self.matrix), []
        for gradient in gradients:
            flat = gradient.reshape(count, -1)
            pieces.append(flat)
            if gap := -flat.shape[1] % ALIGNED:
                pieces.append(flat.new_zeros(1, 1).expand(count, gap))
        return torch.cat(pieces, 1)

    def update(self, gradients: Tensor, factor: float) -> None:
        """``gradients`` are used up."""
        with torch.no_grad():
            self.optimizer.step(self.matrix, gradients, factor)

    def keep(self, rows: Sequence[int]) -> None:
        """Only these go on; the memory of the others is free again."""
        self._note_written()
        chosen = torch.tensor(list(rows), device=self.device, dtype=torch.long)
        self.matrix = self.matrix[chosen]
        self.fixed = {name: value[chosen] for name, value in self.fixed.items()}
        self._versions = {name: self.fixed[name]._version for name in self._versions}
        self.optimizer.keep(chosen)
        self._expose()

    def copy_to_host(self) -> StackedModel:
        """As they are now, on the host, in few copies: what checkpoints are written from while the trials train on."""
        self._note_written()
        other = copy(self)
        other.matrix = _to_host(self.matrix)
        other.fixed = {name: _to_host(value) for name, value in self.fixed.items()}
        other.optimizer = copy(self.optimizer)
        other.optimizer.state = {name: _to_host(value) for name, value in self.optimizer.state.items()}
        return other

    def tensors(self) -> list[Tensor]:
        """All tensors that the trials hold."""
        return [self.matrix, *self.fixed.values(), *self.optimizer.state.values()]

    def weights(self, row: int) -> dict[str, Tensor]:
        """As the ``state_dict`` of the trial's own module."""
        first = {id(tensor): name for name, tensor in named_tensors(self.module)}
        return {
            name: self._tensor(first[id(tensor)])[row]
            for name, tensor in self.module.state_dict(keep_vars=True).items()
        }

    def buffers(self, row: int) -> dict[str, Tensor]:
        """Those that were changed and that the ``state_dict`` leaves out."""
        return {name: self.fixed[name][row] for name in sorted(self._written)}

    def states(self, row: int) -> dict[str, dict[str, Tensor]]:
        """As torch.optim has them, by the name of the parameter."""
        if not self.optimizer.steps:
            return {}
        scalars, names = self.optimizer.scalars(), self.optimizer.has(row)
        return {
            name: {**scalars, **{key: self._view(name, self.optimizer.state[key])[row] for key in names}}
            for name in self._trained
        }

    def load(self, row: int, checkpoint: TrialCheckpoint) -> None:
        """Restores a checkpoint of a trial, whether it was fused or not."""
        with torch.no_grad():
            for name, tensor in self.weights(row).items():
                tensor.copy_(checkpoint.weights[name])
            for name, tensor in checkpoint.buffers.items():
                self.fixed[name][row].copy_(tensor)
            for name, state in checkpoint.states.items():
                for key in self.optimizer.has(row):
                    if key in state:
                        self._view(name, self.optimizer.state[key])[row].copy_(state[key])
        self.optimizer.steps = checkpoint.step

    def _note_written(self) -> None:
        """Which buffers were written into by now, before they lie elsewhere."""
        now = {name for name, version in self._versions.items() if self.fixed[name]._version != version}
        self._written |= now

    def _expose(self) -> None:
        self.parameters: Mapping[str, Tensor] = {
            name: self._view(name, self.matrix).requires_grad_() for name in self._trained
        }

    def _view(self, name: str, matrix: Tensor) -> Tensor:
        parameter, start = self._trained[name], self._starts[name]
        return matrix.detach()[:, start : start + parameter.numel()].view(len(matrix), *parameter.shape)

    def _tensor(self, name: str) -> Tensor:
        return self._view(name, self.matrix) if name in self._trained else self.fixed[name]


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


# The optimizer: the arithmetic of torch.optim on a matrix with a row for each trial's own options.

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
        make: Any = optimizers[0].cls
        defaults: Mapping[str, Any] = make([torch.zeros(1)]).defaults
        self._options = [{**defaults, **one.options} for one in optimizers]
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

    def scalars(self) -> dict[str, Tensor]:
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
