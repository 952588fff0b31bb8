"""Where layers lie while no micro-batch needs them: pinned host memory, taken once, and behind it a file."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from weft.errors import TrainError
from weft.units import size

log = logging.getLogger("weft.pipeline")


class Host:
    """Room for blocks of given sizes, in order: the first ones in memory, the rest on disk.

    The file is scratch: it loses its name as soon as it is open, so nothing of it outlives the process, and no
    checkpoint ever reads it.
    """

    def __init__(
        self,
        sizes: list[int],
        limit: int | None,
        folder: Path | str | None,
        pin: bool,
        given: Tensor | None = None,
    ) -> None:
        """``given`` is memory that was taken before, as pinning takes long."""
        total, self.in_memory = 0, 0
        for number, need in enumerate(sizes):
            if limit is not None and total + need > limit:
                break
            total, self.in_memory = total + need, number + 1
        if given is not None and given.numel() < total:
            raise TrainError(f"the layers need {size(total)} on the host, and {size(given.numel())} were given")
        self.memory = taken(total, pin) if given is None else given[:total]
        self.pinned = pin and (not total or self.memory.is_pinned())
        self.on_disk = sum(sizes[self.in_memory :])
        self.disk = _file(self.on_disk, folder) if self.on_disk else torch.empty(0, dtype=torch.uint8)
        self.blocks: list[Tensor] = []
        """Memory of every block, in bytes."""
        at = 0
        for number, need in enumerate(sizes):
            if number == self.in_memory:
                at = 0
            source = self.memory if number < self.in_memory else self.disk
            self.blocks.append(source[at : at + need])
            at += need
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
            f"the host has no {size(need)} for the layers: say how much it has as residency.host, and the rest lies on "
            "disk"
        )
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if pin:
        problem = pinning(memory)
        if problem:
            log.warning(
                "%s of host memory cannot be pinned (%s): copies then go through a buffer of the driver, at about half "
                "the speed, and the program waits for each. Raise the limit of locked memory (ulimit -l), or give "
                "residency.host a size that can be pinned",
                size(need),
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


def _file(need: int, folder: Path | str | None) -> Tensor:
    where = Path(tempfile.gettempdir() if folder is None else folder)
    handle, name = tempfile.mkstemp(prefix="weft-layers-", dir=where)
    try:
        try:
            os.posix_fallocate(handle, 0, need)  # a full disk shows here, and not as a signal in the middle of a step
        except OSError as problem:
            raise TrainError(
                f"the {size(need)} of layers that do not fit on the host do not fit into '{where}' either "
                f"({problem.strerror}): name another folder as residency.disk"
            ) from None
        return torch.from_file(name, shared=True, size=need, dtype=torch.uint8)
    finally:
        os.close(handle)
        with contextlib.suppress(OSError):
            os.unlink(name)
