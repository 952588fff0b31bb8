"""Activation checkpointing: parts of a model keep only their inputs for the backward, which computes the rest again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn


def recompute(model: nn.Module) -> None:
    """From here on each of the model's `recomputed_parts` is recomputed in the backward of a training step."""
    for part in recomputed_parts(model):
        part.forward = partial(_checkpointed, part, part.forward)


def recomputed_parts(model: nn.Module) -> list[nn.Module]:
    """The modules that are checkpointed, each by itself.

    These are the members, with children of their own, of every `Sequential` or `ModuleList`. A member that makes up a
    large part of the model is replaced by such members within it. Without any, it is the whole model.
    """
    large = _count_layers(model) / 4

    def within(outer: nn.Module) -> list[nn.Module]:
        found: list[nn.Module] = []
        row = isinstance(outer, nn.Sequential | nn.ModuleList) and len(outer) > 1
        for child in outer.children():
            inner = within(child) if not row or _count_layers(child) > large else []
            found += inner or ([child] if row and _count_layers(child) > 1 else [])
        return found

    # Counted in layers, not in weights: an embedding may have more weights than all the rest, and keeps hardly any
    # activations.
    return within(model) or [model]


def _checkpointed(part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    if not (part.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _count_layers(model: nn.Module) -> int:
    """The number of modules without children."""
    return sum(1 for part in model.modules() if next(part.children(), None) is None)
