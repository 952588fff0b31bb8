"""The limit of a trial's device memory, kept on every kind of device, and how much it took."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from weft.utils.live_memory import LiveStorages
from weft.utils.units import format_bytes


class OutOfMemory(Exception):
    """A trial wanted more than its limit, or than its device has. ``needed`` is at least what it would have taken then;
    what it would have wanted later is not known."""

    def __init__(self, needed: int, limit: int) -> None:
        super().__init__(f"out of memory: at least {format_bytes(needed)} wanted of {format_bytes(limit)}")
        self.needed, self.limit = needed, limit

    def __reduce__(self) -> tuple[type[OutOfMemory], tuple[int, int]]:
        return OutOfMemory, (self.needed, self.limit)


class MemoryLimit:
    """Within the block, the process may take at most ``memory`` bytes of the device; None sets no limit.

    On a GPU PyTorch's allocator keeps to it, and ``peak`` is what it reserved at most. On the CPU the storages of
    tensors are counted, within ``count_cpu`` alone and only if there is a limit.
    """

    def __init__(self, device: torch.device, memory: int | None) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda and device.index is None:  # the allocator takes a number
            device = torch.device("cuda", torch.cuda.current_device())
        self.device, self.memory = device, memory
        self._before = 0
        """Bytes that earlier trials of this process left and that cannot be given back, such as workspaces."""
        self._counter: LimitedStorages | None = None

    def __enter__(self) -> MemoryLimit:
        if self._cuda:
            if torch.cuda.memory_allocated(self.device):
                gc.collect()  # what a trial that failed left in circles would be counted as lasting, and end later
            self.release()
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = int(torch.cuda.memory_reserved(self.device))
            if self.memory is not None:
                total = torch.cuda.get_device_properties(self.device).total_memory
                limit = min(1.0, (self.memory + self._before) / total)
                torch.cuda.set_per_process_memory_fraction(limit, self.device)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._cuda and self.memory is not None:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def release(self) -> None:
        """Gives back to the device what no tensor uses any more, for the trials beside this one."""
        if self._cuda:
            torch.cuda.empty_cache()

    @contextmanager
    def count_cpu(self, held: Iterable[Tensor]) -> Iterator[None]:
        """Where trials on the CPU allocate: ``held`` are the tensors that were there before and stay."""
        if self._cuda or self.memory is None:
            yield
            return
        self._counter = LimitedStorages(self.memory, held)
        with self._counter:
            yield

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Within ``count_cpu``, where tensors are made that stand for those in the memory of the host."""
        if self._counter is None:
            yield
            return
        self._counter.paused = True
        try:
            yield
        finally:
            self._counter.paused = False

    @property
    def peak(self) -> int | None:
        """Bytes at the most so far; None where nothing counts them."""
        if self._cuda:
            return int(torch.cuda.max_memory_reserved(self.device)) - self._before
        return None if self._counter is None else self._counter.peak

    def exceeded(self, problem: BaseException) -> OutOfMemory | None:
        """What a failure means if it is one of memory, else None."""
        if isinstance(problem, OutOfMemory):
            return problem
        if isinstance(problem.__cause__, OutOfMemory):  # raised again by a loader
            return problem.__cause__
        text = str(problem)
        lacking = isinstance(problem, RuntimeError) and any(mark in text for mark in _MARKS)
        if not isinstance(problem, torch.OutOfMemoryError | MemoryError) and not lacking:
            return None
        limit, taken = self.memory or 0, 0
        if self._cuda:
            limit = limit or int(torch.cuda.get_device_properties(self.device).total_memory)
            taken = int(torch.cuda.max_memory_reserved(self.device)) - self._before
        return OutOfMemory(max(taken + _tried(text), limit + 1), limit)


class LimitedStorages(LiveStorages):  # type: ignore[no-untyped-call]
    """Live storages that may not pass a limit: the operator that would pass it raises OutOfMemory."""

    paused = False

    def __init__(self, limit: int, held: Iterable[Tensor] = ()) -> None:
        self._limit = limit
        super().__init__(held)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self.paused:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _see(self, tensor: Tensor, watch: bool) -> None:
        super()._see(tensor, watch)
        if self.now > self._limit:
            raise OutOfMemory(self.now, self._limit)


_MARKS = ("out of memory", "_STATUS_ALLOC_FAILED", "can't allocate memory")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _tried(text: str) -> int:
    """The bytes that the allocator says it was asked for.

    >>> _tried("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...")
    2684354560
    """
    found = re.search(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", text)
    return 0 if found is None else int(float(found[1]) * _UNITS[found[2]])
