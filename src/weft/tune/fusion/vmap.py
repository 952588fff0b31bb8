"""Forwards of several trials as one: torch.func's vmap over the module that they share, in whose dropouts each trial
draws what it would draw alone, at its own rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from weft.data import Batch
from weft.engine.rng import Seeder
from weft.errors import TuneError
from weft.nn.state import ModuleState, weight_norm_attributes
from weft.tune.recipe import TrialConfig
from weft.utils.rng import host

Tensors = Mapping[str, Tensor]
DrawMasks = Callable[[Sequence["DropoutCall"]], Sequence[Tensor]]


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


# Dropout: what each trial would draw alone is drawn beforehand, as masks.

DROPOUT_PLACEHOLDER = 0.12345678901234567
"""Stands, in the module that fused trials share, for the dropout of each trial."""

_DROPOUTS = {name: getattr(F, name) for name in ("dropout", "dropout1d", "dropout2d", "dropout3d")}
_ATTENTION = F.scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class DropoutCall:
    """One dropout of a forward: which, on what, how often it drops."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Values are drawn in the order in which they lie in memory."""
    dtype: torch.dtype
    rate: float

    def factors(self, rate: float | None, device: torch.device) -> Tensor:
        """What a trial's values are multiplied by: 0, or more than 1."""
        ones = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device).fill_(1.0)
        factors: Tensor = _DROPOUTS[self.name](
            ones, rate if self.rate == DROPOUT_PLACEHOLDER and rate is not None else self.rate, True
        )
        return factors


Drop = Callable[[str, Tensor, float], Tensor]


@contextmanager
def record_calls(calls: list[DropoutCall]) -> Iterator[None]:
    """Within the block, dropouts draw nothing and are recorded, in order."""

    def drop(name: str, x: Tensor, rate: float) -> Tensor:
        calls.append(DropoutCall(name, tuple(x.shape), x.stride(), x.dtype, rate))
        return x

    with _replaced(drop):
        yield


@contextmanager
def apply_masks(masks: Sequence[Tensor]) -> Iterator[None]:
    """Within the block, dropouts multiply by what was drawn before, in order."""
    left = iter(masks)
    with _replaced(lambda name, x, rate: x * next(left)):
        yield


def draw_masks(
    calls: Sequence[DropoutCall],
    seeders: Sequence[Seeder],
    rates: Sequence[float | None],
    step: int,
    micro_batch: int,
    device: torch.device,
) -> list[Tensor]:
    """One mask a dropout with a first dimension of trials, drawn as each trial alone draws in this micro-batch."""
    if not calls:
        return []
    of_trials = []
    for seeder, rate in zip(seeders, rates, strict=True):
        seeder.set(step, micro_batch, "model")
        of_trials.append([call.factors(rate, device) for call in calls])
    return [torch.stack(masks) for masks in zip(*of_trials, strict=True)]


@contextmanager
def _replaced(drop: Drop) -> Iterator[None]:
    """Modules of torch, and its attention, look these functions up by name when they run.

    A model that holds one of them by another name goes on drawing by itself, which vmap then refuses.
    """
    functions: Any = F
    for name in _DROPOUTS:
        setattr(functions, name, partial(_dropout, name, drop))
    functions.scaled_dot_product_attention = partial(_attention, drop)
    try:
        yield
    finally:
        for name, original in _DROPOUTS.items():
            setattr(functions, name, original)
        functions.scaled_dot_product_attention = _ATTENTION


def _dropout(
    name: str, drop: Drop, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    return drop(name, input, p) if training and p > 0.0 else input


def _attention(
    drop: Drop,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention in the open where it drops, since its kernels would draw by themselves."""
    if not dropout_p:
        return attend(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query @ key.transpose(-2, -1) * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return drop("dropout", scores.softmax(-1), dropout_p) @ value


# Attention of several trials in one call: trials become samples, since attention looks at each sample by itself.


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None, grouped: bool
) -> Tensor:
    """``scaled_dot_product_attention`` without dropout; under vmap one kernel for all trials, not one for each."""
    found: Tensor = _Folded.apply(query, key, value, mask, causal, scale, grouped)  # type: ignore[no-untyped-call]
    return found


class _Folded(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any) -> Tensor:
        # Outside of vmap only forwards that nobody differentiates come here.
        return _local_attention(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        """Called with plain tensors, whose gradients autograd follows as those of any others."""
        trials = info.batch_size
        tensors = [_with_trials(tensor, where, trials) for tensor, where in zip(args[:3], in_dims[:3], strict=True)]
        mask = None if args[3] is None else _with_trials(args[3], in_dims[3], trials)
        batch = tensors[0].shape[1:-3]
        if mask is not None:  # (trials, ..., length, length), with ones where it is the same for all
            wide = mask.view(trials, *[1] * (tensors[0].dim() - mask.dim()), *mask.shape[1:])
            mask = wide.expand(trials, *batch, *wide.shape[-3:]).flatten(0, -4)
        query, key, value = (tensor.flatten(0, -4) for tensor in tensors)
        found = _local_attention(query, key, value, mask, *args[4:])
        return found.view(trials, *batch, *found.shape[-3:]), 0


def _local_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None, grouped: bool
) -> Tensor:
    return _ATTENTION(query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=grouped)


def _with_trials(tensor: Tensor, where: int | None, trials: int) -> Tensor:
    return tensor.expand(trials, *tensor.shape) if where is None else tensor.movedim(where, 0)
