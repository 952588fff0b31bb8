"""What pytest leaves out where the package that a module is for is not installed."""

from __future__ import annotations

from importlib.util import find_spec

# Doctests are collected by importing every module, and these are imported by the library only where there is triton.
_KERNELS = [f"src/weft/supernet/elastic/{name}.py" for name in ("kernels", "linear_kernels", "norm_kernels")]
collect_ignore = [] if find_spec("triton") else _KERNELS
