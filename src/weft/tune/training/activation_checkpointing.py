"""Less memory for activations at the same result: recomputing them in the backward, or keeping them on the host."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.engine.batch_stats import running_norms
from weft.engine.rng import get_rng_state, restored, set_rng_state
from weft.nn.checkpointing import recomputed_parts


@contextmanager
def recomputing(module: nn.Module) -> Iterator[None]:
    """Within the block, parts of the module keep only their inputs in training, and compute the rest again in the
    backward.

    Outputs, gradients, running statistics and what dropout draws are the same to the last bit.
    """
    before = [(part, part.__dict__.get("forward")) for part in recomputed_parts(module)]
    recompute(module)
    try:
        yield
    finally:
        for part, forward in before:
            del part.forward  # the class's own is seen again
            if forward is not None:
                part.forward = forward


def recompute(module: nn.Module) -> None:
    """As ``recomputing``, for good: what ``weft.estimate`` takes, so that it estimates what is done."""
    for part in recomputed_parts(module):
        part.forward = partial(_again, part, part.forward)


def offloading(
    module: nn.Module, host: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> AbstractContextManager[Any]:
    """Within the block, what forwards keep for their backward lies in host memory; the module's weights stay.

    A CPU with a cap behaves as a device would: copies are made within ``host``, where nobody counts.
    """
    own = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor, bool]:
        if tensor.untyped_storage()._cdata in own:
            return tensor.device, tensor, False
        with host():
            kept = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
            kept.copy_(tensor, non_blocking=True)
        return tensor.device, kept, True

    def unpack(packed: tuple[torch.device, Tensor, bool]) -> Tensor:
        device, kept, copied = packed
        return kept.to(device, non_blocking=True, copy=True) if copied else kept

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _again(part: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not (part.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    stand = get_rng_state()
    contexts = lambda: (nullcontext(), _unmoved(part, stand))  # noqa: E731
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextmanager
def _unmoved(part: nn.Module, stand: Hashable) -> Iterator[None]:
    """Within the block, the norms' running statistics are copies: those of a second forward are not to count. And what
    it draws on the host is drawn again from where the generators stood."""
    norms = running_norms(part)
    before = [dict(norm._buffers) for norm in norms]
    for norm in norms:
        for name, buffer in norm._buffers.items():
            norm._buffers[name] = None if buffer is None else buffer.clone()
    try:
        with restored(get_rng_state()):
            set_rng_state(stand)
            yield
    finally:
        for norm, buffers in zip(norms, before, strict=True):
            norm._buffers.update(buffers)
