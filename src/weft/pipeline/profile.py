"""The measured cost of every layer: its forward and backward for one micro-batch, each run alone on real data."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from weft.supernet import Carry, Chain, as_carry, side_inputs


def profile_chain(chain: Chain, batch: Mapping[str, Tensor], repeats: int = 5) -> dict[str, tuple[float, float]]:
    """Seconds of forward and backward by layer name, medians after one run to warm up.

    Candidates of a block are measured on what the block before them left; the first candidate's output goes on.
    """
    carry = chain.enter(batch)
    found: dict[str, tuple[float, float]] = {}
    chain.train()
    for block in chain.blocks:
        following: Carry | None = None
        for name in block.candidates():
            layer, module = chain.layers[name], chain.module(name)
            side = side_inputs(layer, batch)
            times = []
            for _ in range(repeats + 1):
                inputs = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in carry)
                began = _clock(inputs)
                outputs = as_carry(module(*inputs, **side), name)
                between = _clock(outputs)
                _backward(outputs, [*inputs, *module.parameters()])
                times.append((between - began, _clock(outputs) - between))
            found[name] = (statistics.median(t[0] for t in times[1:]), statistics.median(t[1] for t in times[1:]))
            following = following or tuple(x.detach() for x in outputs)
        carry = following or carry
    return found


def _backward(outputs: Carry, sources: list[Tensor]) -> None:
    wanted = [x for x in sources if x.requires_grad]
    graded = [x for x in outputs if x.requires_grad]
    if wanted and graded:
        torch.autograd.grad(graded, wanted, [torch.ones_like(x) for x in graded], allow_unused=True)


def _clock(carry: Carry) -> float:
    if carry[0].is_cuda:
        torch.cuda.synchronize(carry[0].device)
    return time.perf_counter()
