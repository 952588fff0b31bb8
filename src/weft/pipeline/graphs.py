"""Candidates captured as CUDA graphs: a layer's forward and backward become one launch each, with the same bits."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from weft.pipeline.consistency import Exact
from weft.pipeline.weights import Weights
from weft.supernet import Carry

log = logging.getLogger("weft.pipeline")

_WARM_UP = 3


class Captured:
    """One layer for inputs of one shape: its tensors lie at fixed addresses, and a replay reads and writes them."""

    def __init__(self, weights: Weights, x: Tensor) -> None:
        parameters = list(weights.parameters)
        self._x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x.detach())
        self._x.requires_grad_(x.requires_grad)
        sources = [*parameters, self._x] if x.requires_grad else parameters
        self._count = len(parameters)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), _uncached():
            for _ in range(_WARM_UP):  # lazy set-up of libraries must not be captured
                y = weights.module(self._x)
                torch.autograd.grad(y, sources, torch.zeros_like(y), allow_unused=True)
            del y
        torch.cuda.current_stream().wait_stream(stream)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with _uncached():
            with torch.cuda.graph(self._forward, stream=stream):
                y = weights.module(self._x)
            self._gradient = torch.empty_like(y)
            with torch.cuda.graph(self._backward, pool=self._forward.pool(), stream=stream):
                found = torch.autograd.grad(y, sources, self._gradient, allow_unused=True)
        self._y: Tensor = y.detach().requires_grad_()
        self._own = list(found[: self._count])
        self._back: Tensor | None = found[self._count] if x.requires_grad else None
        self.taken = x

    def forward(self, x: Tensor) -> Tensor:
        self.taken = x
        self._x.data.copy_(x.detach())
        self._forward.replay()
        return self._y

    def backward(self, gradient: Tensor | None) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients of the layer's parameters and of its input; they are overwritten by the next replay."""
        if gradient is None:
            return [None] * self._count, [None]
        self._gradient.copy_(gradient)
        self._backward.replay()
        return list(self._own), [self._back]


class Graphs:
    """Captures a layer the first time that it is used with an input of some shape, and replays it from then on.

    Only `exact` layers are captured: their weights lie at one address for the whole run. A layer that cannot be
    captured (it waits for the host, carries a tuple, or takes side inputs) runs as it is, and the log says why.
    """

    def __init__(self, most: int = 512) -> None:
        self._captured: dict[Any, Captured] = {}
        self._refused: set[str] = set()
        self._most = most

    def get(self, weights: Weights, carry: Carry) -> Captured | None:
        """The captured layer, or None where the layer is to run as it is."""
        layer = weights.layer
        if layer.name in self._refused or not weights.parameters or len(carry) != 1:
            return None
        x = carry[0]
        key = (layer.name, x.shape, x.dtype, x.stride(), x.requires_grad)
        found = self._captured.get(key)
        if found is None and len(self._captured) < self._most:
            found = self._capture(weights, x)
            if found is not None:
                self._captured[key] = found
        return found

    def _capture(self, weights: Weights, x: Tensor) -> Captured | None:
        if not isinstance(weights.clock.consistency, Exact) or weights.layer.side:
            self._refused.add(weights.layer.name)
            return None
        buffers = [(b, b.clone()) for b in weights.module.buffers()]
        state = weights.buffer_state()
        try:
            captured = Captured(weights, x)
            if weights.buffer_state() != state:
                raise RuntimeError("it changes its own buffers")
            return captured
        except Exception as problem:  # whatever keeps a layer from being captured, it can still run as it is
            log.warning("layer '%s' runs without a CUDA graph: %s", weights.layer.name, problem)
            self._refused.add(weights.layer.name)
            return None
        finally:
            for buffer, before in buffers:  # the trial runs may have moved them
                buffer.copy_(before)


def _uncached() -> AbstractContextManager[Any]:
    # Autocast would keep the cast that a trial run made, and the graph would read that one for ever.
    if not torch.is_autocast_enabled("cuda"):
        return nullcontext()
    return torch.autocast("cuda", torch.get_autocast_dtype("cuda"), cache_enabled=False)
