"""Measures the cost of every layer, each run alone on real data, and the bytes that pass between blocks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.data import Batch
from weft.engine.optimizer import LayerOptimizer, Optimizer
from weft.pipeline.message import Message, pack, unpack
from weft.supernet import Activations, Chain, extra_inputs, run_layer
from weft.supernet.layer import detached_entry

Loss = Callable[[Any, Batch], Tensor]


def profile_chain(
    chain: Chain, batch: Batch, repeats: int = 5, optimizer: Optimizer | None = None, loss: Loss | None = None
) -> dict[str, tuple[float, float]]:
    """Seconds of forward and backward by layer name, medians over passes through the whole chain after one to warm up.

    Candidates of a block are measured on the output of the block before; the first candidate's output goes on. Elastic
    layers are measured at the largest subnet. A pass goes from layer to layer, as training does, so that weights are no
    warmer in the caches than there. With an optimizer the update counts as part of the backward, and the loss with the
    layers of the last block. The weights are changed: give a copy of what is to be kept.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in chain.layers}
    optimizers: dict[str, LayerOptimizer] = {}
    if optimizer is not None:
        optimizers = {
            name: LayerOptimizer(optimizer, trained) for name in chain.layers if (trained := _trained(chain, name))
        }
    chain.train()
    subnet = chain.largest()
    for _ in range(repeats + 1):
        activations = chain.enter(batch)
        for block in chain.blocks:
            following: Activations | None = None
            for name in block.candidates():
                layer = chain.layers[name]
                run = partial(run_layer, layer, chain.module(name), extras=extra_inputs(layer, batch, subnet))
                outputs, spent = _measure(run, activations, _trained(chain, name).values(), optimizers.get(name))
                if loss is not None and block is chain.blocks[-1]:
                    _, more = _measure(partial(_loss, loss, batch), outputs)
                    spent = (spent[0] + more[0], spent[1] + more[1])
                times[name].append(spent)
                following = following or tuple(x.detach().requires_grad_(x.requires_grad) for x in outputs)
            activations = following or activations
    return {
        name: (statistics.median(t[0] for t in spent[1:]), statistics.median(t[1] for t in spent[1:]))
        for name, spent in times.items()
    }


def _measure(
    run: Callable[[Activations], Activations],
    activations: Activations,
    trained: Iterable[nn.Parameter] = (),
    layer_optimizer: LayerOptimizer | None = None,
) -> tuple[Activations, tuple[float, float]]:
    """The outputs, and the seconds of the forward and of the backward with its update."""
    parameters = list(trained)
    leaves = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in activations)
    inputs = detached_entry(leaves)
    began = _clock(inputs)
    outputs = run(inputs)
    between = _clock(outputs)
    gradients = _backward(outputs, [*parameters, *(x for x in leaves if x.requires_grad)])
    pairs = [(p, g) for p, g in zip(parameters, gradients, strict=False) if g is not None]
    if layer_optimizer is not None and pairs:
        layer_optimizer.apply([p for p, _ in pairs], [g for _, g in pairs], 1.0)
    return outputs, (between - began, _clock(outputs) - between)


def _loss(loss: Loss, batch: Batch, outputs: Activations) -> Activations:
    return (loss(outputs[0] if len(outputs) == 1 else outputs, batch),)


def message_seconds(size: float, repeats: int = 5) -> float:
    """The time that a stage spends on one message of that many bytes, sent or received: copies, and a header.

    Measured: the message is packed, copied twice, as the wire does it, and unpacked; that is two stages' work.
    """
    tensor = torch.empty(max(int(size) // 4, 1))
    spent = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        block = pack(Message("F", 0, (tensor,), (True,)))
        unpack(block.clone().clone(), torch.device("cpu"))
        spent.append((time.perf_counter() - began) / 2)
    return statistics.median(spent[1:])


def _trained(chain: Chain, name: str) -> dict[str, nn.Parameter]:
    return {path: p for path, p in chain.module(name).named_parameters() if p.requires_grad}


def message_bytes(chain: Chain, batch: Mapping[str, Tensor]) -> list[float]:
    """The bytes that enter every block for one micro-batch, which a message has at a cut before that block."""
    activations, subnet = chain.enter(batch), chain.largest()
    sizes: list[float] = []
    with torch.no_grad():
        for block in chain.blocks:
            sizes.append(float(sum(x.numel() * x.element_size() for x in activations)))
            name = next(iter(block.candidates()))
            layer = chain.layers[name]
            activations = run_layer(layer, chain.module(name), activations, extra_inputs(layer, batch, subnet))
    return sizes


def _backward(outputs: Activations, sources: list[Tensor]) -> Sequence[Tensor | None]:
    graded = [x for x in outputs if x.requires_grad]
    if not sources or not graded:
        return [None] * len(sources)
    return torch.autograd.grad(graded, sources, [torch.ones_like(x) for x in graded], allow_unused=True)


def _clock(activations: Activations) -> float:
    if activations[0].is_cuda:
        torch.cuda.synchronize(activations[0].device)
    return time.perf_counter()
