"""What all tests share: one thread, and modules that are not collected."""

from __future__ import annotations

import os
from importlib.util import find_spec

# Bits depend on the number of threads. Processes that tests start inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
# Each of the many processes that tests start would compile the library anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
import torch

# Doctests are collected by importing every module, and these are imported by the library only where there is triton.
_KERNELS = [f"src/weft/elastic/ops/triton_{name}.py" for name in ("weight", "linear", "norm")]
collect_ignore = [] if find_spec("triton") else _KERNELS


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    torch.set_num_threads(1)
