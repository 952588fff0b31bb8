"""glibc's allocator in a process that trains on a CPU: what one step frees is there for the next one."""

from __future__ import annotations

import ctypes
import os
from functools import cache

import torch

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""What glibc calls M_TRIM_THRESHOLD and M_MMAP_THRESHOLD."""

NEVER = 2**31 - 1
MMAP_FROM = 32 * 2**20
"""Bytes from which on glibc asks the system for a mapping of its own, at most."""


def keep_freed_memory(device: torch.device) -> None:
    """From here on glibc keeps the memory that is freed at the end of its heap.

    A step frees all its activations. If glibc returns them, the next step faults in every page anew, which can take a
    fifth of its time. Does nothing for other devices, on other systems, or where the environment sets
    MALLOC_TRIM_THRESHOLD_ or MALLOC_MMAP_THRESHOLD_.
    """
    if device.type == "cpu":
        tune_glibc()


@cache
def tune_glibc() -> bool:
    """Sets both thresholds, once a process; False where that cannot or must not be done."""
    set_by_user = any(f"MALLOC_{name}_THRESHOLD_" in os.environ for name in ("TRIM", "MMAP"))
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # no glibc
        return False
    return not set_by_user and bool(mallopt(TRIM_THRESHOLD, NEVER)) and bool(mallopt(MMAP_THRESHOLD, MMAP_FROM))
