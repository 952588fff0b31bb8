"""The steps of a trial, captured: run as they are at first, then replayed as CUDA graphs, with the same bits."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from weft.data import Batch
from weft.engine.rng import host
from weft.memory.allocator import AllocatorConfig, CachingAllocator
from weft.memory.replay import allocator_factories
from weft.memory.timeline import AllocationTimeline, repeat_last_step
from weft.nn.state import ModuleState
from weft.tune.recipe import TrialConfig

log = logging.getLogger("weft.tune")

Gradients = Sequence[Tensor | None]
Exceeded = Callable[[BaseException], object]
"""Tells failures of memory, which are the trial's own, from all others, for which it gives None."""
Micro = Callable[[Batch, Gradients | None], tuple[Tensor, Gradients]]
"""One micro-batch: its loss, and the gradients so far with its own added in place. None begins a step."""

OBSERVED = 2
"""Steps that run as they are. What a model does in the first alone, such as to fill a cache, is no matter."""
LEAST = 8
"""Steps that must be left: to observe and to capture takes as long as several."""
KINDS = 4
"""Kinds of micro-batches of a step (the first, others, a smaller last one) that are captured; more are not."""


SMALL = 2**30
"""Bytes; a trial that takes more keeps a device busy as it is. And while it is captured, the allocator cannot give back
what it caches to make room, so that an estimate which is a little too low would end it."""


def capturable(setting: TrialConfig, left: int | None = None, memory: int | None = None) -> bool:
    """Whether a trial's steps, of which so many are left (all, if None), are worth a capture, where it takes so much
    memory (little, if None)."""
    steps = setting.steps if left is None else left
    return setting.cuda_graphs and steps >= LEAST and (memory is None or memory <= SMALL)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Micro-batches of one shape, at fixed addresses."""

    inputs: Batch
    carried: Gradients
    loss: Tensor
    gradients: Gradients
    replay: Callable[[], None]


class Captured:
    """Takes micro-batches as ``function`` does, and gives what it gives, until the next call overwrites that.

    The first steps are observed while they run as they are: one that waits for the host, draws there or changes what
    the model keeps there is never captured, nor is one that torch refuses to capture; the log says why, and no result
    depends on it. With no recorder all steps run as they are.
    """

    def __init__(
        self, function: Micro, recorder: Recorder | None, model: nn.Module, loss: Any, exceeded: Exceeded
    ) -> None:
        self._function, self._recorder, self._exceeded = function, recorder, exceeded
        self._model, self._loss = model, loss
        self._kinds: dict[Hashable, _Kind | None] = {}
        self._steps = 0
        if any(isinstance(part, nn.RNNBase) and part.num_layers > 1 and part.dropout for part in model.modules()):
            self._refuse("its recurrent layers drop by a generator of their own")

    def __call__(self, batch: Batch, carried: Gradients | None) -> tuple[Tensor, Gradients]:
        recorder = self._recorder
        if recorder is None:
            return self._function(batch, carried)
        self._steps += carried is None
        name = _name(batch, carried, recorder.aligned)
        if self._steps <= OBSERVED:
            return self._observed(name, batch, carried, recorder)
        kind = self._kinds.get(name) or self._capture(name, batch, carried, recorder)
        if kind is None or any(a is not b for a, b in zip(kind.carried, carried or (), strict=True)):
            self._refuse("its batches change from step to step")
            return self._function(batch, carried)
        for key, value in batch.items():
            kind.inputs[key].copy_(value)
        kind.replay()
        return kind.loss, kind.gradients

    @contextmanager
    def beside(self) -> Iterator[None]:
        """A block between two steps that takes memory, and keeps none: it uses that of the graphs."""
        if self._recorder is None:
            yield
            return
        recorder, before = self._recorder, self._recorder.held()
        with recorder.pooled():
            yield
        if any(self._kinds.values()) and recorder.held() != before:
            gc.collect()
            if recorder.held() != before:  # a replay would write over what stayed
                self._refuse("what it is judged by keeps tensors on the device")

    def close(self) -> None:
        """Nothing is taken any more, and all memory is given back at once, for the trials beside this one."""
        self._as_it_is()
        del self._function  # which may hold this object in turn

    def _observed(
        self, name: Hashable, batch: Batch, carried: Gradients | None, recorder: Recorder
    ) -> tuple[Tensor, Gradients]:
        with recorder.observed() as refused:
            before = ModuleState(self._model, self._loss, host())
            found = self._function(batch, carried)
            after = ModuleState(self._model, self._loss, host())
        if self._steps < OBSERVED:
            return found
        self._kinds[name] = None
        if before != after:
            refused.append("it changes what the model keeps on the host, or draws there")
        if len(self._kinds) > KINDS:
            refused.append(f"a step has more than {KINDS} kinds of micro-batches")
        if refused:
            self._refuse(refused[0])
        return found

    def _capture(self, name: Hashable, batch: Batch, carried: Gradients | None, recorder: Recorder) -> _Kind | None:
        if name not in self._kinds:
            return None
        try:
            inputs = {key: _alike(value, recorder.aligned).copy_(value) for key, value in batch.items()}
            (loss, gradients), replay = recorder.capture(lambda: self._function(inputs, carried))
        except Exception as problem:
            if self._exceeded(problem) is not None:
                raise
            self._refuse(f"{type(problem).__name__}: {str(problem).partition(chr(10))[0]}")
            return None
        kind = self._kinds[name] = _Kind(inputs, tuple(carried or ()), loss, gradients, replay)
        return kind

    def _refuse(self, why: str) -> None:
        if self._recorder is not None:
            log.info("a trial runs without CUDA graphs: %s", why)
        self._as_it_is()

    def _as_it_is(self) -> None:
        self._kinds.clear()
        if self._recorder is not None:
            self._recorder.close()
        self._recorder = None


def _name(batch: Batch, carried: Gradients | None, aligned: int) -> Hashable:
    """All that kernels are chosen by, with where a tensor begins: a copy that lies otherwise might be summed in
    another order."""
    lies = ((key, t.shape, t.stride(), t.dtype, t.data_ptr() % aligned) for key, t in batch.items())
    return (*lies, None if carried is None else tuple(gradient is None for gradient in carried))


def _alike(tensor: Tensor, aligned: int) -> Tensor:
    """An empty tensor that lies as this one does."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    room = torch.empty(aligned + span * tensor.element_size(), dtype=torch.uint8, device=tensor.device)
    start = (tensor.data_ptr() - room.data_ptr()) % aligned
    flat = room[start : start + span * tensor.element_size()].view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())


# A recorder on a GPU: what one trial computes again and again becomes CUDA graphs that share one pool of memory.

Found = TypeVar("Found")
_WAITED = "called a synchronizing CUDA operation"
_PROTOTYPE = "Synchronization debug mode"
_FAILED: list[torch.cuda.CUDAGraph] = []
"""Those whose capture broke off: torch still knows where they are, so they stay."""


class Recorder(Protocol):
    """Records what a function does on a device, to be done again."""

    aligned: int
    """Bytes; kernels look no further when they choose by where a tensor begins."""

    def observed(self) -> AbstractContextManager[list[str]]:
        """A block of real work, all of whose memory belongs to the recorder; afterwards the list says what in it
        cannot be recorded."""
        ...

    def capture(self, function: Callable[[], Found]) -> tuple[Found, Callable[[], None]]:
        """What the function returns, and how to fill that anew from the tensors that it reads. Nothing is computed."""
        ...

    def pooled(self) -> AbstractContextManager[None]:
        """A block whose tensors lie where recorded ones lie, and must be gone when one is replayed."""
        ...

    def held(self) -> Any:
        """Equal before and after a block that keeps no tensor."""
        ...

    def close(self) -> None:
        """Gives all memory back."""
        ...


def recorder(device: torch.device) -> Recorder | None:
    """None where nothing can be recorded."""
    return Graphs(device) if device.type == "cuda" else None


@contextmanager
def streamed(device: torch.device) -> Iterator[None]:
    """On a GPU, work within the block goes to the stream on which graphs are captured.

    It is one for all trials of a process, since cuBLAS keeps a workspace for each stream that it was ever used on.
    """
    if device.type != "cuda":
        yield
        return
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


class Graphs:
    """The recorder of a GPU. Backwards run in the calling thread, whose allocations alone go to the pool."""

    aligned = 256

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.MemPool()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    @contextmanager
    def observed(self) -> Iterator[list[str]]:
        found: list[str] = []
        before, drawn = torch.cuda.get_sync_debug_mode(), torch.default_generator.get_state()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with self.pooled(), torch.autograd.set_multithreading_enabled(False):
                    yield found
            finally:
                torch.cuda.set_sync_debug_mode(before)
        if not torch.equal(torch.default_generator.get_state(), drawn):
            found.append("it draws on the host")
        for one in told:
            if _WAITED in str(one.message):
                found.append("it waits for the host")
            elif _PROTOTYPE not in str(one.message):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)

    def capture(self, function: Callable[[], Found]) -> tuple[Found, Callable[[], None]]:
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
            self._broken(graph)
            raise
        self._graphs.append(graph)
        return found, graph.replay

    def pooled(self) -> AbstractContextManager[None]:
        return torch.cuda.use_mem_pool(self._pool, self._device)

    def held(self) -> tuple[int, int]:
        told = torch.cuda.memory_stats(self._device)
        return told["allocation.all.current"], told["allocated_bytes.all.current"]

    def close(self) -> None:
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        del self._pool  # here, and not when a garbage collector comes by: a capture might be under way then

    def _broken(self, graph: torch.cuda.CUDAGraph) -> None:
        """A capture that breaks off leaves the generator, and the allocator, in the belief that it goes on."""
        number, pool = torch.cuda.current_device(), self._pool.id
        try:
            torch._C._cuda_endAllocateToPool(number, pool)
        except RuntimeError:  # it had come to its end
            return
        torch._C._cuda_releasePool(number, pool)
        _FAILED.append(graph)


# What a step reserves where it is captured: its forwards and backwards have a pool of memory of their own.


def reserved_apart(tape: AllocationTimeline, rules: AllocatorConfig) -> int:
    """Bytes that are reserved at most: what one pool has free, the other cannot use.

    The batch lies outside, with the weights and the optimizer's states. Nobody knows where a worker's segments lie: the
    largest figure counts.
    """
    tape = repeat_last_step(tape)
    return max(_reserved(tape, make) for make in allocator_factories(rules))


def _reserved(tape: AllocationTimeline, make: Callable[[], CachingAllocator]) -> int:
    outside, inside = make(), make()
    blocks = {}
    phase = most = 0
    for event in tape.events:
        number = abs(event) - 1
        if event == 0:
            phase += 1
        elif event > 0 and tape.sizes[number]:
            captured = tape.phases[phase] in ("forward", "backward") and tape.categories[number] != "batch"
            pool = inside if captured else outside
            blocks[number] = pool, pool.alloc(tape.sizes[number])
            most = max(most, outside.reserved + inside.reserved)
        elif event < 0 and tape.sizes[number]:
            pool, block = blocks.pop(number)
            pool.free(block)
    return most
