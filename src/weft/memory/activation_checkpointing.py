"""Recomputation: parts of a model keep only their inputs for the backward, and compute the rest again there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn


def recompute(model: nn.Module) -> None:
    """From here on, in training, each of the model's `parts` is recomputed in the backward."""
    for part in parts(model):
        part.forward = partial(_again, part, part.forward)


def parts(model: nn.Module) -> list[nn.Module]:
    """What is recomputed by itself: the members of rows of modules that have parts of their own, and those of rows
    within a member where that is a large part of the whole; the whole model where there are none."""
    large = _layers(model) / 4

    def within(outer: nn.Module) -> list[nn.Module]:
        found: list[nn.Module] = []
        row = isinstance(outer, nn.Sequential | nn.ModuleList) and len(outer) > 1
        for child in outer.children():
            inner = within(child) if not row or _layers(child) > large else []
            found += inner or ([child] if row and _layers(child) > 1 else [])
        return found

    # By layers and not by weights: an embedding may have more of those than all the rest, and keeps next to nothing.
    return within(model) or [model]


def _again(part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    if not (part.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _layers(model: nn.Module) -> int:
    """How many parts of it have no parts."""
    return sum(1 for part in model.modules() if next(part.children(), None) is None)
