"""Forwards of several trials as one: torch.func's vmap over the module that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from weft.data import Batch
from weft.errors import TuneError
from weft.nn.state import ModuleState, weight_norm_attributes
from weft.tune.fusion.dropout import DropoutCall, apply_masks, record_calls
from weft.tune.recipe import TrialConfig
from weft.utils.rng import host

Tensors = Mapping[str, Tensor]
DrawMasks = Callable[[Sequence[DropoutCall]], Sequence[Tensor]]


class CannotFuse(Exception):
    """Raised for what trials cannot do together, although each might alone."""


class BatchedForward:
    """Forward and loss of trials of one shape; randomness but for dropout is refused, since fused trials could not
    draw it as they do alone."""

    def __init__(self, config: TrialConfig, module: nn.Module, device: torch.device) -> None:
        self._config, self._module, self._device = config, module, device
        self._calls: dict[Any, list[DropoutCall]] = {}

    def losses(self, trained: Tensors, fixed: Tensors, batch: Batch, draw: DrawMasks, shared: bool = False) -> Tensor:
        """The training loss of each trial. ``batch`` has a first dimension of trials, unless they share it.

        ``fixed`` are buffers and what is not trained; batch norms change theirs in place. ``draw`` gives a mask for
        each dropout of the forward.
        """
        where = dict.fromkeys(batch, None if shared else 0)
        masks = list(draw(self.dropout_calls(trained, fixed, batch, shared)))

        def loss(trained: Tensors, fixed: Tensors, batch: Batch, masks: list[Tensor]) -> Tensor:
            with apply_masks(masks):
                outputs = self._forward(trained, fixed, batch)
                found = self._config.loss(outputs, batch)
            if not isinstance(found, Tensor) or found.dim() != 0:
                raise TuneError("the loss must return a tensor with one number")
            return found

        found: Tensor = self._map(loss, (0, 0, where, 0))(trained, fixed, batch, masks)
        return found

    def dropout_calls(self, trained: Tensors, fixed: Tensors, batch: Batch, shared: bool = False) -> list[DropoutCall]:
        """The dropouts of a forward of such a batch, in order: found once, by a forward that changes nothing.

        CannotFuse names what a forward changes beyond buffers in place, since the trials would share it.
        """
        self._module.train()
        kind = tuple((name, tuple(value.shape if shared else value.shape[1:])) for name, value in batch.items())
        if kind not in self._calls:
            spare = {name: value.clone() for name, value in fixed.items()}
            one = {name: value if shared else value[0] for name, value in batch.items()}
            own = {f"module.{name}": value[0] for name, value in {**trained, **spare}.items()}
            # Twice at first: a forward may fill a cache, which is no matter, but must leave it alone from then on.
            for _ in range(1 if self._calls else 2):
                calls, watched = list[DropoutCall](), _WatchedForward(self._module, self._config.loss)
                with torch.no_grad(), record_calls(calls), self._config.autocast(self._device):
                    functional_call(watched, own, (self._config.enter(one), one))
            if watched.changed is not None:
                raise CannotFuse(f"its forward changes '{watched.changed}', which the trials would share")
            self._calls[kind] = calls
        return self._calls[kind]

    def outputs(self, trained: Tensors, fixed: Tensors, batch: Batch) -> Any:
        """Of each trial on the same batch, in evaluation mode."""
        self._module.eval()
        shared = dict.fromkeys(batch)
        with torch.no_grad(), apply_masks(()), _plain_attention():
            return self._map(self._forward, (0, 0, shared))(trained, fixed, batch)

    def _forward(self, trained: Tensors, fixed: Tensors, batch: Batch) -> Any:
        return functional_call(self._module, {**trained, **fixed}, self._config.enter(batch))

    def _map(self, function: Callable[..., Any], where: tuple[Any, ...]) -> Callable[..., Any]:
        mapped = vmap(function, in_dims=where, randomness="error")

        def run(*args: Any) -> Any:
            # Autocast around vmap, never within: inside it would cast, and keep, what only one trial sees.
            with self._config.autocast(self._device):
                return mapped(*args)

        return run


class _WatchedForward(nn.Module):
    """A forward with its loss; ``changed`` then names what it changed. Buffers may be written into where they lie."""

    changed: str | None = None

    def __init__(self, module: nn.Module, loss: Any) -> None:
        super().__init__()
        self.module, self._loss = module, [loss]  # in a list, since weights of a loss are not the model's

    def forward(self, inputs: tuple[Tensor, ...], batch: Batch) -> None:
        before = ModuleState(self.module, self._loss[0], host(), writes=True)
        self._loss[0](self.module(*inputs), batch)
        anew = {(name, one) for name, part in self.module.named_modules() for one in weight_norm_attributes(part)}
        self.changed = ModuleState(self.module, self._loss[0], host(), writes=True).first_changed(before, anew)


@contextmanager
def _plain_attention() -> Iterator[None]:
    """torch's short cut through whole attention layers in evaluation has no form for fused trials."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
