"""Dropout in a fused training: each trial draws what it would draw alone, at its own rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.engine.rng import Seeder

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
