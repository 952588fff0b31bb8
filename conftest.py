"""What pytest leaves out: modules that it cannot import as the library does."""

from __future__ import annotations

from importlib.util import find_spec

# Doctests are collected by importing every module, and these are imported by the library only where there is triton.
_KERNELS = [f"src/weft/elastic/ops/triton_{name}.py" for name in ("weight", "linear", "norm")]
collect_ignore = [] if find_spec("triton") else _KERNELS
