"""Where layers lie while no micro-batch needs them: pinned host memory, taken once."""

from __future__ import annotations

import logging
import mmap
import os

import torch
from torch import Tensor

from weft.errors import TrainError
from weft.utils.units import format_bytes

log = logging.getLogger("weft.pipeline")


class Host:
    """Room for blocks of given sizes, in order."""

    def __init__(self, sizes: list[int], pin: bool, given: Tensor | None = None) -> None:
        """``given`` is memory that was taken before, as pinning takes long."""
        total = sum(sizes)
        if given is not None and given.numel() < total:
            raise TrainError(
                f"the layers need {format_bytes(total)} on the host, and {format_bytes(given.numel())} were given"
            )
        self.memory = taken(total, pin) if given is None else given[:total]
        self.pinned = pin and (not total or self.memory.is_pinned())
        self.blocks: list[Tensor] = list(torch.split(self.memory, sizes))
        """Memory of every block, in bytes."""
        self._spare: dict[int, list[Tensor]] = {}

    @property
    def bytes(self) -> int:
        """What is taken of the host's memory."""
        return self.memory.numel()

    def take(self, need: int) -> Tensor:
        """Memory for an older version, which there may be any number of."""
        kept = self._spare.get(need)
        return kept.pop() if kept else taken(need, self.pinned)

    def give(self, memory: Tensor) -> None:
        """It is free again."""
        self._spare.setdefault(memory.numel(), []).append(memory)


class _Pages(mmap.mmap):
    """Memory of the host in whole pages; those that are pinned are let go of before the memory is."""

    pinned_at = 0

    def __del__(self) -> None:
        if self.pinned_at and torch is not None:
            torch.cuda.cudart().cudaHostUnregister(self.pinned_at)  # type: ignore[no-untyped-call]


def taken(need: int, pin: bool) -> Tensor:
    """Host memory, pinned if it can be. torch's own pinned memory comes in powers of two: up to twice as much."""
    if not need:
        return torch.empty(0, dtype=torch.uint8)
    try:
        pages = _Pages(-1, need)
    except OSError:
        pages = None
    if pages is None or need > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise TrainError(
            f"the host has no {format_bytes(need)} for the layers, and offloaded layers are kept in "
            f"host memory only: use more "
            "stages on other hosts, an optimizer with less state, or a smaller supernet"
        )
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if pin:
        problem = pinning(memory)
        if problem:
            log.warning(
                "%s of host memory cannot be pinned (%s): copies then go through a buffer of the driver, at about half "
                "the speed, and the program waits for each. Raise the limit of locked memory (ulimit -l)",
                format_bytes(need),
                problem,
            )
        else:
            pages.pinned_at = memory.data_ptr()
    return memory


def pinning(memory: Tensor) -> str:
    """Pins memory; what stood against it, or nothing."""
    try:
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as problem:
        return str(problem).splitlines()[0]
    return "" if code == 0 else f"CUDA error {code}"
