"""Candidates captured as CUDA graphs: a layer's forward and backward become one launch each, with the same bits."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from weft.pipeline.boundary import entered
from weft.pipeline.consistency import Exact
from weft.pipeline.weights import Weights
from weft.supernet import Carry

log = logging.getLogger("weft.pipeline")

_WARM_UP = 3
_ALIGNED = 256
"""Bytes; kernels look no further when they choose by where a tensor begins."""


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
        with torch.cuda.stream(stream), ExitStack() as stack:
            for trial in range(_WARM_UP):  # lazy set-up of libraries must not be captured
                if trial == _WARM_UP - 1:
                    stack.enter_context(_waiting_refused())
                y = self._run(weights.module)
                torch.autograd.grad(y, sources, torch.zeros_like(y), allow_unused=True)
            del y
        torch.cuda.current_stream().wait_stream(stream)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._forward, stream=stream):
            y = self._run(weights.module)
        self._gradient = torch.empty_like(y)
        with torch.cuda.graph(self._backward, pool=self._forward.pool(), stream=stream):
            found = torch.autograd.grad(y, sources, self._gradient, allow_unused=True)
        self._y: Tensor = y.detach().requires_grad_()
        self._own = list(found[: self._count])
        self._back: Tensor | None = found[self._count] if x.requires_grad else None
        self.taken = x

    def _run(self, module: nn.Module) -> Tensor:
        # Autocast keeps the cast of a leaf for its next use. A weight's must not come from an earlier run, or the graph
        # would read that one for ever; the input is no leaf where the layer runs as it is, so it must be none here.
        torch.clear_autocast_cache()
        y: Tensor = module(*entered((self._x,)))
        return y

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
    captured (it waits for the host or draws there, changes its buffers, carries a tuple, or takes side inputs) runs as
    it is, and the log says why.
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
        if x.data_ptr() % _ALIGNED:  # a copy of it would lie otherwise, and might be summed in another order
            return None
        key = (layer.name, x.shape, x.dtype, x.stride(), x.requires_grad)
        found = self._captured.get(key)
        if found is None and len(self._captured) < self._most:
            found = self._capture(weights, x)
            if found is not None:
                self._captured[key] = found
        return found

    def _capture(self, weights: Weights, x: Tensor) -> Captured | None:
        if not isinstance(weights.clock.consistency, Exact) or weights.layer.side or weights.layer.elastic:
            self._refused.add(weights.layer.name)
            return None
        try:
            with _undisturbed(weights.module, x.device):
                buffers, drawn = weights.buffer_state(), torch.default_generator.get_state()
                captured = Captured(weights, x)
                if weights.buffer_state() != buffers:
                    raise RuntimeError("it changes its own buffers")
                if not torch.equal(torch.default_generator.get_state(), drawn):
                    raise RuntimeError("it draws on the host, and a replay would repeat what came of that")
                return captured
        except Exception as problem:  # whatever keeps a layer from being captured, it can still run as it is
            log.warning("layer '%s' runs without a CUDA graph: %s", weights.layer.name, problem)
            self._refused.add(weights.layer.name)
            return None


@contextmanager
def _undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """What trial runs move is afterwards as it was: buffers, default generators, autocast's cache and the stream."""
    buffers = [(part, name, b, b.clone()) for part in module.modules() for name, b in part.named_buffers(recurse=False)]
    generators = (torch.default_generator, torch.cuda.default_generators[device.index])
    states = [generator.get_state() for generator in generators]
    try:
        with torch.cuda.stream(torch.cuda.current_stream(device)):  # a failed capture leaves its own stream current
            yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        torch.clear_autocast_cache()
        for part, name, buffer, before in buffers:
            setattr(part, name, buffer)
            if not torch.equal(buffer, before):  # to write counts as a change, and the fingerprint covers what changed
                buffer.copy_(before)


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """Waiting for the host raises, as it would within a capture, where it leaves torch's allocator and generators
    odd."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings(action="ignore"):  # torch says that it does not notice every kind of waiting
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
