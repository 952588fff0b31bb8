"""glibc's allocator in a process that trains on a CPU: what one step frees is there for the next one."""

from __future__ import annotations

import ctypes
import os
from functools import cache

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""What glibc calls M_TRIM_THRESHOLD and M_MMAP_THRESHOLD."""

NEVER = 2**31 - 1
MMAP_FROM = 32 * 2**20
"""Bytes from which on glibc asks the system for a mapping of its own, at most."""


@cache
def keep_freed_memory() -> bool:
    """From here on glibc keeps the memory that is freed at the end of its heap.

    A step on a CPU frees all its activations. If glibc returns them, the next step faults in every page anew, which can
    take a fifth of its time. Does nothing, and returns False, on other systems, or where the environment sets
    MALLOC_TRIM_THRESHOLD_ or MALLOC_MMAP_THRESHOLD_.
    """
    set_by_user = any(f"MALLOC_{name}_THRESHOLD_" in os.environ for name in ("TRIM", "MMAP"))
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # no glibc
        return False
    return not set_by_user and bool(mallopt(TRIM_THRESHOLD, NEVER)) and bool(mallopt(MMAP_THRESHOLD, MMAP_FROM))
