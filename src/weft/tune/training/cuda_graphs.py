"""CUDA graphs of a trial's steps: the first steps run eagerly, later ones are replayed, with the same bits."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from weft.data import Batch
from weft.engine.cuda_graphs import ALIGNED
from weft.nn.state import ModuleState
from weft.tune.recipe import TrialConfig
from weft.utils.rng import host

log = logging.getLogger("weft.tune")

Gradients = Sequence[Tensor | None]
IsOutOfMemory = Callable[[BaseException], object]
"""Gives None for all failures but those of memory, which end the trial."""
MicroStep = Callable[[Batch, Gradients | None], tuple[Tensor, Gradients]]
"""One micro-batch: its loss, and the gradients so far with its own added in place. None begins a step."""

WARM_UP_STEPS = 2
"""Steps that run eagerly. What a model does in the first alone, such as to fill a cache, does not matter."""
MIN_STEPS = 8
"""Steps that must be left: warm-up and capture take as long as several."""
MAX_GRAPHS = 4
"""Graphs of a step (the first micro-batch, others, a smaller last one); a step with more runs eagerly."""
MAX_MEMORY = 2**30
"""Bytes; a trial that takes more keeps a device busy without graphs. And while it is captured, the allocator cannot
give back what it caches to make room, so that an estimate which is a little too low would end it."""


def can_capture(config: TrialConfig, left: int | None = None, memory: int | None = None) -> bool:
    """Whether a trial's steps, of which so many are left (all, if None), are worth a capture, where it takes so much
    memory (little, if None)."""
    steps = config.steps if left is None else left
    return config.cuda_graphs and steps >= MIN_STEPS and (memory is None or memory <= MAX_MEMORY)


@dataclass(frozen=True, slots=True)
class _Graph:
    """A replayable micro-batch of one shape, at fixed addresses."""

    inputs: Batch
    before: Gradients
    loss: Tensor
    gradients: Gradients
    replay: Callable[[], None]


class GraphedStep:
    """Takes micro-batches as ``function`` does, and returns what it returns, until the next call overwrites that.

    A step that waits for the host during the warm-up, draws there or changes what the model keeps there is never
    captured, nor is one that torch refuses to capture; the log says why, and no result depends on it.
    """

    def __init__(
        self,
        function: MicroStep,
        recorder: GraphRecorder,
        model: nn.Module,
        loss: Any,
        is_out_of_memory: IsOutOfMemory,
    ) -> None:
        self._function, self._is_out_of_memory = function, is_out_of_memory
        self._recorder: GraphRecorder | None = recorder
        self._model, self._loss = model, loss
        self._graphs: dict[Hashable, _Graph | None] = {}
        self._steps = 0
        if any(isinstance(part, nn.RNNBase) and part.num_layers > 1 and part.dropout for part in model.modules()):
            self._refuse("its recurrent layers drop by a generator of their own")

    def __call__(self, batch: Batch, before: Gradients | None) -> tuple[Tensor, Gradients]:
        recorder = self._recorder
        if recorder is None:
            return self._function(batch, before)
        self._steps += before is None
        name = _signature(batch, before, recorder.aligned)
        if self._steps <= WARM_UP_STEPS:
            return self._warm_up(name, batch, before, recorder)
        graph = self._graphs.get(name) or self._capture(name, batch, before, recorder)
        if graph is None or any(a is not b for a, b in zip(graph.before, before or (), strict=True)):
            self._refuse("its batches change from step to step")
            return self._function(batch, before)
        for key, value in batch.items():
            graph.inputs[key].copy_(value)
        graph.replay()
        return graph.loss, graph.gradients

    @contextmanager
    def outside_graph(self) -> Iterator[None]:
        """A block between two steps that takes memory, and keeps none: it uses the memory of the graphs."""
        if self._recorder is None:
            yield
            return
        recorder, held = self._recorder, self._recorder.held()
        with recorder.pooled():
            yield
        if any(self._graphs.values()) and recorder.held() != held:
            gc.collect()
            if recorder.held() != held:  # a replay would write over what stayed
                self._refuse("its evaluation keeps tensors on the device")

    def close(self) -> None:
        """Gives all memory back at once, for the trials beside this one; no call may follow."""
        self._run_eagerly()
        del self._function  # which may hold this object in turn

    def _warm_up(
        self, name: Hashable, batch: Batch, before: Gradients | None, recorder: GraphRecorder
    ) -> tuple[Tensor, Gradients]:
        with recorder.warm_up() as refused:
            state = ModuleState(self._model, self._loss, host())
            found = self._function(batch, before)
            after = ModuleState(self._model, self._loss, host())
        if self._steps < WARM_UP_STEPS:
            return found
        self._graphs[name] = None
        if state != after:
            refused.append("it changes what the model keeps on the host, or draws there")
        if len(self._graphs) > MAX_GRAPHS:
            refused.append(f"a step has more than {MAX_GRAPHS} kinds of micro-batches")
        if refused:
            self._refuse(refused[0])
        return found

    def _capture(
        self, name: Hashable, batch: Batch, before: Gradients | None, recorder: GraphRecorder
    ) -> _Graph | None:
        if name not in self._graphs:
            return None
        try:
            inputs = {key: empty_aligned_like(value, recorder.aligned).copy_(value) for key, value in batch.items()}
            (loss, gradients), replay = recorder.capture(lambda: self._function(inputs, before))
        except Exception as problem:
            if self._is_out_of_memory(problem) is not None:
                raise
            self._refuse(f"{type(problem).__name__}: {str(problem).partition(chr(10))[0]}")
            return None
        graph = self._graphs[name] = _Graph(inputs, tuple(before or ()), loss, gradients, replay)
        return graph

    def _refuse(self, why: str) -> None:
        if self._recorder is not None:
            log.info("a trial runs without CUDA graphs: %s", why)
        self._run_eagerly()

    def _run_eagerly(self) -> None:
        self._graphs.clear()
        if self._recorder is not None:
            self._recorder.close()
        self._recorder = None


def _signature(batch: Batch, before: Gradients | None, aligned: int) -> Hashable:
    """All that kernels are chosen by, with where a tensor begins: a copy with another layout might be summed in
    another order."""
    layouts = ((key, t.shape, t.stride(), t.dtype, t.data_ptr() % aligned) for key, t in batch.items())
    return (*layouts, None if before is None else tuple(gradient is None for gradient in before))


def empty_aligned_like(tensor: Tensor, aligned: int) -> Tensor:
    """An empty tensor with the strides of this one, and that begins at an equal offset from an aligned address."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    room = torch.empty(aligned + span * tensor.element_size(), dtype=torch.uint8, device=tensor.device)
    start = (tensor.data_ptr() - room.data_ptr()) % aligned
    flat = room[start : start + span * tensor.element_size()].view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())


# The recorder: what one trial computes again and again becomes CUDA graphs that share one pool of memory.

Found = TypeVar("Found")
_WAITED = "called a synchronizing CUDA operation"
_PROTOTYPE = "Synchronization debug mode"
_FAILED: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed: torch still refers to them, so they must not be freed."""


@contextmanager
def capture_stream(device: torch.device) -> Iterator[None]:
    """Work within the block goes to the stream on which graphs are captured.

    It is one for all trials of a process, since cuBLAS keeps a workspace for each stream that it was ever used on.
    """
    own, current = _stream(device), torch.cuda.current_stream(device)
    own.wait_stream(current)
    try:
        with torch.cuda.stream(own):
            yield
    finally:
        current.wait_stream(own)


@lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class GraphRecorder:
    """Records on a GPU. Backwards run in the calling thread, whose allocations alone go to the pool."""

    aligned = ALIGNED

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.MemPool()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    @contextmanager
    def warm_up(self) -> Iterator[list[str]]:
        """A block of real work, all of whose memory belongs to the recorder; afterwards the list says what in it
        cannot be recorded."""
        found: list[str] = []
        before, drawn = torch.cuda.get_sync_debug_mode(), torch.default_generator.get_state()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with self.pooled(), torch.autograd.set_multithreading_enabled(False):
                    yield found
            finally:
                torch.cuda.set_sync_debug_mode(before)
        if not torch.equal(torch.default_generator.get_state(), drawn):
            found.append("it draws on the host")
        for one in caught:
            if _WAITED in str(one.message):
                found.append("it waits for the host")
            elif _PROTOTYPE not in str(one.message):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)

    def capture(self, function: Callable[[], Found]) -> tuple[Found, Callable[[], None]]:
        """What the function returns, and how to compute that again from the tensors that it reads; nothing is computed
        by the capture itself."""
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        drawn, before = torch.default_generator.get_state(), generator.clone_state()
        stream = torch.cuda.current_stream()
        # Loaders pin memory in threads of their own meanwhile, which must not end the capture.
        pool: Any = self._pool.id
        captured = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        try:
            with torch.autograd.set_multithreading_enabled(False), captured:
                found = function()
        except BaseException:
            generator.graphsafe_set_state(before)
            torch.default_generator.set_state(drawn)
            self._clean_up_failed(graph)
            raise
        self._graphs.append(graph)
        return found, graph.replay

    def pooled(self) -> AbstractContextManager[None]:
        """A block whose tensors share the memory of recorded ones, and must be gone when one is replayed."""
        return torch.cuda.use_mem_pool(self._pool, self._device)

    def held(self) -> tuple[int, int]:
        """Equal before and after a block that keeps no tensor."""
        stats = torch.cuda.memory_stats(self._device)
        return stats["allocation.all.current"], stats["allocated_bytes.all.current"]

    def close(self) -> None:
        """Gives all memory back."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        del self._pool  # here, and not when a garbage collector comes by: a capture might be under way then

    def _clean_up_failed(self, graph: torch.cuda.CUDAGraph) -> None:
        """A capture that breaks off leaves the generator, and the allocator, in the belief that it goes on."""
        number, pool = torch.cuda.current_device(), self._pool.id
        try:
            torch._C._cuda_endAllocateToPool(number, pool)
        except RuntimeError:  # it had come to its end
            return
        torch._C._cuda_releasePool(number, pool)
        _FAILED.append(graph)
