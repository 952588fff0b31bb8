"""Host memory for layers that no micro-batch needs just now: pinned, and allocated once."""

from __future__ import annotations

import logging
import mmap
import os

import torch
from torch import Tensor

from weft.errors import TrainError
from weft.utils.units import format_bytes

log = logging.getLogger("weft.pipeline")


class HostMemory:
    """Blocks of given sizes, in order, and further ones for older versions."""

    def __init__(self, sizes: list[int], pin: bool, buffer: Tensor | None = None) -> None:
        """``buffer`` is memory that the caller has allocated before: pinning takes long."""
        total = sum(sizes)
        if buffer is not None and buffer.numel() < total:
            raise TrainError(
                f"the layers need {format_bytes(total)} on the host, and {format_bytes(buffer.numel())} were given"
            )
        self.memory = allocate_host(total, pin) if buffer is None else buffer[:total]
        self.pinned = pin and (not total or self.memory.is_pinned())
        self.blocks: list[Tensor] = list(torch.split(self.memory, sizes))
        self._free: dict[int, list[Tensor]] = {}

    def take(self, size: int) -> Tensor:
        """Memory for an older version of a layer."""
        free = self._free.get(size)
        return free.pop() if free else allocate_host(size, self.pinned)

    def give_back(self, memory: Tensor) -> None:
        """Memory that ``take`` gave is free again."""
        self._free.setdefault(memory.numel(), []).append(memory)


class _Pages(mmap.mmap):
    """Whole pages of host memory, unpinned before they are freed."""

    pinned_at = 0

    def __del__(self) -> None:
        if self.pinned_at and torch is not None:
            torch.cuda.cudart().cudaHostUnregister(self.pinned_at)  # type: ignore[no-untyped-call]


def allocate_host(size: int, pin: bool) -> Tensor:
    """Host memory, pinned if possible. torch's own pinned memory comes in powers of two: up to twice as much."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    try:
        pages = _Pages(-1, size)
    except OSError:
        pages = None
    if pages is None or size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise TrainError(
            f"the host has no {format_bytes(size)} for the layers, and offloaded layers are kept in host memory only: "
            "use more stages on other hosts, an optimizer with less state, or a smaller supernet"
        )
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if pin:
        try:
            code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))  # type: ignore[no-untyped-call]
            problem = f"CUDA error {code}" if code else ""
        except (RuntimeError, AssertionError) as error:
            problem = str(error).splitlines()[0]
        if problem:
            log.warning(
                "%s of host memory cannot be pinned (%s): copies then go through a buffer of the driver, at about half "
                "the speed, and the program waits for each. Raise the limit of locked memory (ulimit -l)",
                format_bytes(size),
                problem,
            )
        else:
            pages.pinned_at = memory.data_ptr()
    return memory
