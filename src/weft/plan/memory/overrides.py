"""Kernels of PyTorch's operators replaced for a while."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

Kernel = Callable[..., Any]
_library: Any = torch.library


@contextmanager
def overriding(kernels: Mapping[str, Kernel | None], key: str) -> Iterator[None]:
    """Within the block, operators (``aten`` names) have these kernels for a dispatch key; None: they have none."""
    library = _library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kernels that are replaced, which is what is wanted
            for name, kernel in kernels.items():
                library.impl(name, kernel or _library.fallthrough_kernel, key)
        yield
    finally:
        library._destroy()
