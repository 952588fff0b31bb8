"""Deterministic kernels for the time of a run, and the settings as they were afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Within the block, equal inputs give equal bits; an operator without a deterministic kernel raises and names
    itself."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS makes its first handle
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # costs a pass over memory and changes no result
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill
        torch.backends.cudnn.benchmark = benchmark
