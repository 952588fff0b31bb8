"""Activation checkpointing: parts of a model keep only their inputs for the backward, which computes the rest again.

And offloading: what forwards keep for their backward is moved away from the device meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase as NormBase  # the common base of batch norm and instance norm
from torch.utils.checkpoint import checkpoint

from weft.utils.rng import get_rng_state, restored, set_rng_state


def recompute(model: nn.Module) -> None:
    """From here on each of the model's `recomputed_parts` is recomputed in the backward of a training step.

    Outputs, gradients, running statistics and what dropout draws are the same to the last bit.
    """
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


def offloading(
    module: nn.Module, away: Callable[[Tensor], Any], back: Callable[[Any], Tensor]
) -> AbstractContextManager[Any]:
    """Within the block, what forwards keep for their backward is stored as ``away`` returns it, and ``back`` makes a
    tensor of it again. The module's weights and buffers stay, unlike in torch's `save_on_cpu`."""
    own = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}

    def pack(tensor: Tensor) -> tuple[bool, Any]:
        stays = tensor.untyped_storage()._cdata in own
        return stays, tensor if stays else away(tensor)

    def unpack(packed: tuple[bool, Any]) -> Tensor:
        stays, value = packed
        return value if stays else back(value)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def running_norms(module: nn.Module) -> list[NormBase]:
    """The norms in a module that keep running statistics."""
    return [part for part in module.modules() if isinstance(part, NormBase) and part.running_mean is not None]


def _checkpointed(part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not (part.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    state = get_rng_state()

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _second_forward(part, state)

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextmanager
def _second_forward(part: nn.Module, state: Hashable) -> Iterator[None]:
    """Within the block, running statistics are copies, since they count the first forward only, and the generators of
    the host draw what they drew in the first."""
    norms = running_norms(part)
    before = [dict(norm._buffers) for norm in norms]
    for norm in norms:
        for name, buffer in norm._buffers.items():
            norm._buffers[name] = None if buffer is None else buffer.clone()
    try:
        with restored(get_rng_state()):
            set_rng_state(state)
            yield
    finally:
        for norm, buffers in zip(norms, before, strict=True):
            norm._buffers.update(buffers)


def _count_layers(model: nn.Module) -> int:
    """The number of modules without children."""
    return sum(1 for part in model.modules() if next(part.children(), None) is None)
