"""A recorder on a GPU: what one trial computes again and again becomes CUDA graphs that share one pool of memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch

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
