"""The memory of a process that trains on a CPU: what one step frees is there for the next one."""

from __future__ import annotations

import ctypes
import os
from functools import cache

import torch

TRIM, MMAP = -1, -3
"""What glibc calls M_TRIM_THRESHOLD and M_MMAP_THRESHOLD."""

MOST = 2**31 - 1
APART = 32 * 2**20
"""Bytes from which on glibc asks the system for a block of its own, at most."""


def keep_freed(device: torch.device) -> None:
    """From here on glibc does not give back to the system what is freed at the end of its heap.

    A step frees all its activations. Given back, every page of them is a fault and a page of zeros in the next step,
    which costs some hundredths of its time, or nothing, by what else happens to lie at the end. Nothing is done on
    other devices, on other systems, or where the environment says MALLOC_TRIM_THRESHOLD_ or MALLOC_MMAP_THRESHOLD_.
    """
    if device.type == "cpu":
        _kept()


@cache
def _kept() -> bool:
    set_by_hand = any(f"MALLOC_{name}_THRESHOLD_" in os.environ for name in ("TRIM", "MMAP"))
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # no glibc
        return False
    return not set_by_hand and bool(mallopt(TRIM, MOST)) and bool(mallopt(MMAP, APART))
