"""Lanes: trials of one shape side by side, their weights stacked in one matrix with a row each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from weft.nn.state import named_tensors, non_persistent_buffers
from weft.tune.fusion.attributes import aliased, attributes, difference
from weft.tune.fusion.dropout import DROPOUT_PLACEHOLDER
from weft.tune.fusion.optimizers import StackedOptimizer
from weft.tune.fusion.vmap import CannotFuse
from weft.tune.recipe import TrialConfig
from weft.tune.training.checkpoint import TrialCheckpoint
from weft.utils.rng import torch_seeded

ALIGNED = 64
"""Weights begin at multiples of so many elements, as kernels like them."""


def template(setting: TrialConfig, rate: float = DROPOUT_PLACEHOLDER) -> nn.Module:
    """The module that lanes share, for its forward alone: dropouts stand for the lane's own, weights for any."""
    if setting.dropout is None:
        return setting.bare()
    own = {**setting.params, "dropout": rate}
    return replace(setting, params=own, dropout=rate).bare()


def unfit(module: nn.Module) -> str | None:
    """Why a module cannot be that of several lanes, by what it holds; None if it can."""
    if (name := aliased(module)) is not None:
        return f"'{name}' holds a weight or a buffer under another name, where lanes would not find it"
    known = {id(tensor) for _, tensor in named_tensors(module)}
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) not in known:
            return f"'{name}' of its state_dict is neither a weight nor a buffer"
    return None


class StackedModel:
    """The weights, buffers and optimizer of several trials on a device; lanes are numbered as they stand now.

    ``parameters`` are views into the matrix, (lanes, ...), so that one update of it updates all. Raises NotTogether for
    trials whose models differ in more than weights and dropout.
    """

    def __init__(self, settings: Sequence[TrialConfig], device: torch.device) -> None:
        self.device = device
        with torch_seeded(settings[0].seed, "init"):
            self.module = template(settings[0])
        shared = attributes(self.module)
        if (why := unfit(self.module)) is not None:
            raise CannotFuse(why)
        self._trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self._starts: dict[str, int] = {}
        width = 0
        for name, parameter in self._trained.items():
            self._starts[name] = width
            width += -(-parameter.numel() // ALIGNED) * ALIGNED
        dtype = next(iter(self._trained.values())).dtype
        self.matrix = torch.zeros(len(settings), width, dtype=dtype, device=device)
        built: list[dict[str, Tensor]] = []
        for lane, setting in enumerate(settings):
            module = setting.build()
            if (other := difference(shared, attributes(module), setting.dropout)) is not None:
                raise CannotFuse(f"'{other}' is not the same in all of their models, and lanes would share it")
            given = dict(module.named_parameters())
            for name in self._trained:
                self._view(name, self.matrix)[lane].copy_(given[name].detach())
            constant = {n: p.detach() for n, p in given.items() if n not in self._trained}
            built.append({**constant, **dict(module.named_buffers())})
        self.fixed = {name: torch.stack([one[name] for one in built]).to(device) for name in built[0]}
        self.optimizer = StackedOptimizer([setting.optimizer for setting in settings], self.matrix)
        self._written: frozenset[str] = frozenset()
        self._versions = {
            name: self.fixed[name]._version for name in non_persistent_buffers(self.module) if name in self.fixed
        }
        self._expose()

    def joined(self, gradients: Sequence[Tensor]) -> Tensor:
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

    def keep(self, lanes: Sequence[int]) -> None:
        """Only these go on; the memory of the others is free again."""
        self._note()
        chosen = torch.tensor(list(lanes), device=self.device, dtype=torch.long)
        self.matrix = self.matrix[chosen]
        self.fixed = {name: value[chosen] for name, value in self.fixed.items()}
        self._versions = {name: self.fixed[name]._version for name in self._versions}
        self.optimizer.keep(chosen)
        self._expose()

    def copied(self) -> StackedModel:
        """As they are now, on the host, in few copies: what is kept of lanes while they train on."""
        self._note()
        other = copy(self)
        other.matrix = _host(self.matrix)
        other.fixed = {name: _host(value) for name, value in self.fixed.items()}
        other.optimizer = copy(self.optimizer)
        other.optimizer.state = {name: _host(value) for name, value in self.optimizer.state.items()}
        return other

    def tensors(self) -> list[Tensor]:
        """All that lanes hold."""
        return [self.matrix, *self.fixed.values(), *self.optimizer.state.values()]

    def weights(self, lane: int) -> dict[str, Tensor]:
        """As the ``state_dict`` of the lane's own module."""
        first = {id(tensor): name for name, tensor in named_tensors(self.module)}
        return {
            name: self._tensor(first[id(tensor)])[lane]
            for name, tensor in self.module.state_dict(keep_vars=True).items()
        }

    def buffers(self, lane: int) -> dict[str, Tensor]:
        """Those that were changed and that the ``state_dict`` leaves out."""
        return {name: self.fixed[name][lane] for name in sorted(self._written)}

    def states(self, lane: int) -> dict[str, dict[str, Tensor]]:
        """As torch.optim has them, by the name of the parameter."""
        if not self.optimizer.steps:
            return {}
        scalars, names = self.optimizer.scalars(lane), self.optimizer.has(lane)
        return {
            name: {**scalars, **{key: self._view(name, self.optimizer.state[key])[lane] for key in names}}
            for name in self._trained
        }

    def load(self, lane: int, kept: TrialCheckpoint) -> None:
        """Puts back what a checkpoint has of a lane, whether it was alone or not."""
        with torch.no_grad():
            for name, tensor in self.weights(lane).items():
                tensor.copy_(kept.weights[name])
            for name, tensor in kept.buffers.items():
                self.fixed[name][lane].copy_(tensor)
            for name, state in kept.states.items():
                for key in self.optimizer.has(lane):
                    if key in state:
                        self._view(name, self.optimizer.state[key])[lane].copy_(state[key])
        self.optimizer.steps = kept.step

    def _note(self) -> None:
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


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
