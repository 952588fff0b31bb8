"""What pytest leaves out: modules that it cannot import as the library does."""

from __future__ import annotations

from importlib.util import find_spec

# Doctests are collected by importing every module, and these are imported by the library only where there is triton.
_KERNELS = [f"src/weft/supernet/elastic/{name}.py" for name in ("kernels", "linear_kernels", "norm_kernels")]
# It puts another module into its own place, which pytest's way to import would undo for all tests.
_ALIASES = ["src/weft/elastic.py"]
collect_ignore = _ALIASES if find_spec("triton") else [*_ALIASES, *_KERNELS]
