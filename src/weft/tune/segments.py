"""How the allocator of a trial's process reserves memory of a GPU: by pages, which leaves few holes.

With segments of their own for every size, what a training reserves depends on the order in which sizes happen to come,
and is up to a sixth more than what it uses; pages (PyTorch's expandable segments) follow what is used, so that it is
known beforehand and more fits.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def expandable(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether trials of this environment reserve by pages: on Linux, unless a variable of PyTorch's says otherwise.

    >>> expandable({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False,max_split_size_mb:64"})
    False
    """
    said = ",".join(environment.get(name, "") for name in VARIABLES).replace(" ", "")
    return sys.platform == "linux" and "expandable_segments:False" not in said and "backend:cudaMalloc" not in said


def expand() -> None:
    """Before its first tensor on a GPU: this process reserves by pages from now on, if it is to."""
    if not expandable():
        return
    import torch

    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
