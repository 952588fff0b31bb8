"""Layers captured as CUDA graphs: its forward and its backward become one launch each, with the same bits."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from weft.engine.consistency import Exact
from weft.engine.weight_versions import VersionedLayer
from weft.supernet import Activations, run_layer
from weft.supernet.layer import detached_entry

log = logging.getLogger("weft.pipeline")

Gradients = Sequence[Tensor | None]

_WARM_UP = 3
ALIGNED = 256
"""Bytes; kernels look no further when they choose by where a tensor begins."""


class CapturedLayer:
    """One layer for inputs of one shape: its tensors lie at fixed addresses, and a replay reads and writes them."""

    def __init__(self, weights: VersionedLayer, activations: Activations, trains: bool) -> None:
        leaves: list[Tensor] = [leaf if trains else leaf.detach() for leaf in weights.fixed_tensors or ()]
        self._inputs = tuple(
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            .copy_(x.detach())
            .requires_grad_(x.requires_grad)
            for x in activations
        )
        self._count = len(leaves) if trains else 0
        sources = [*leaves[: self._count], *(x for x in self._inputs if x.requires_grad)]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), ExitStack() as stack:
            for trial in range(_WARM_UP):  # lazy set-up of libraries must not be captured
                if trial == _WARM_UP - 1:
                    stack.enter_context(_host_waits_refused())
                outputs = self._run(weights, leaves)
                graded = [y for y in outputs if y.requires_grad]
                torch.autograd.grad(graded, sources, [torch.zeros_like(y) for y in graded], allow_unused=True)
            del outputs, graded
        torch.cuda.current_stream().wait_stream(stream)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with _empty_graphs_allowed(), torch.cuda.graph(self._forward, stream=stream):
            outputs = self._run(weights, leaves)
        graded = [y for y in outputs if y.requires_grad]
        self._gradients = [torch.empty_like(y) for y in graded]
        with _empty_graphs_allowed(), torch.cuda.graph(self._backward, pool=self._forward.pool(), stream=stream):
            results = torch.autograd.grad(graded, sources, self._gradients, allow_unused=True)
        self._outputs: Activations = tuple(y.detach().requires_grad_(y.requires_grad) for y in outputs)
        self._weight_gradients = list(results[: self._count])
        rest = iter(results[self._count :])
        self._input_gradients = [next(rest) if x.requires_grad else None for x in self._inputs]
        self.inputs = activations

    def _run(self, weights: VersionedLayer, leaves: list[Tensor]) -> Activations:
        # Autocast keeps the cast of a leaf for its next use. A weight's must not come from an earlier run, or the graph
        # would read that one for ever; the input is no leaf where the layer runs as it is, so it must be none here.
        torch.clear_autocast_cache()
        with weights.bound(leaves) or nullcontext():
            return run_layer(weights.layer, weights.module, detached_entry(self._inputs), {})

    def forward(self, activations: Activations) -> Activations:
        self.inputs = activations
        for buffer, x in zip(self._inputs, activations, strict=True):
            buffer.data.copy_(x.detach())
        self._forward.replay()
        return self._outputs

    def backward(self, gradients: Gradients) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients of the layer's parameters and of its inputs; they are overwritten by the next replay."""
        incoming = [g for g, y in zip(gradients, self._outputs, strict=True) if y.requires_grad]
        if all(gradient is None for gradient in incoming):
            return [None] * self._count, [None] * len(self._inputs)
        for buffer, gradient in zip(self._gradients, incoming, strict=True):
            buffer.zero_() if gradient is None else buffer.copy_(gradient)
        self._backward.replay()
        return list(self._weight_gradients), list(self._input_gradients)


class CudaGraphCache:
    """Captures a layer the first time that it is used with an input of some shape, and replays it from then on.

    Only layers whose weights lie at one address for the whole run are captured: `exact` ones and, if the device does
    one micro-batch after the other (``one_at_a_time``), `bounded` ones. A layer that cannot be captured (it waits for
    the host or draws there, changes its buffers, or takes extra inputs or the subnet) runs as it is; the log says why.
    """

    def __init__(self, limit: int = 512, one_at_a_time: bool = True) -> None:
        self._captured: dict[Any, CapturedLayer] = {}
        self._refused: set[str] = set()
        self._limit = limit
        self._one_at_a_time = one_at_a_time

    def get(self, weights: VersionedLayer, activations: Activations, trains: bool = True) -> CapturedLayer | None:
        """The captured layer, or None where the layer is to run as it is."""
        layer = weights.layer
        if layer.name in self._refused or not weights.parameters:
            return None
        if not trains and not any(x.requires_grad for x in activations):  # there is no backward to capture
            return None
        # A copy that lies otherwise might be summed in another order.
        if any(x.data_ptr() % ALIGNED for x in activations):
            return None
        key = (layer.name, trains, *((x.shape, x.dtype, x.stride(), x.requires_grad) for x in activations))
        captured = self._captured.get(key)
        if captured is None and len(self._captured) < self._limit:
            captured = self._capture(weights, activations, trains)
            if captured is not None:
                self._captured[key] = captured
        return captured

    def _capture(self, weights: VersionedLayer, activations: Activations, trains: bool) -> CapturedLayer | None:
        exact = isinstance(weights.schedule.consistency, Exact)
        fits = weights.fixed_tensors is not None and (self._one_at_a_time or exact)
        if not fits or weights.layer.extra_inputs or weights.layer.elastic:
            self._refused.add(weights.layer.name)
            return None
        try:
            with _undisturbed(weights.module, activations[0].device):
                buffers, drawn = weights.buffer_state(), torch.default_generator.get_state()
                captured = CapturedLayer(weights, activations, trains)
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
    """Restores what trial runs change: buffers, default generators, autocast's cache and the stream."""
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
def _empty_graphs_allowed() -> Iterator[None]:
    """Silences torch's warning for a backward without a kernel: that of a layer that passes gradients on unchanged."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        yield


@contextmanager
def _host_waits_refused() -> Iterator[None]:
    """Waiting for the host raises, as it would within a capture. There it would leave torch's allocator and generators
    in a state that later captures cannot use."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings(action="ignore"):  # torch says that it does not notice every kind of waiting
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
