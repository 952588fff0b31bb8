"""Ready-made spaces with their supernets, by family; one function each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weft.errors import SupernetError, nearest
from weft.supernet import Chain
from weft.zoo.digits import digits_conv, digits_mlp
from weft.zoo.macro import macro_key, macro_subnet, nas_bench_macro

SUPERNETS: Mapping[str, Callable[[], Chain]] = {
    "digits-conv": digits_conv,
    "digits-mlp": digits_mlp,
    "nas-bench-macro": nas_bench_macro,
}


def find(name: str) -> Callable[[], Chain]:
    """The function that makes a supernet of the zoo; raises SupernetError with the nearest name.

    >>> find("digits-conv")().space.size()
    4096
    """
    if name not in SUPERNETS:
        raise SupernetError(f"no supernet '{name}' in the zoo{nearest(name, SUPERNETS)}")
    return SUPERNETS[name]


__all__ = ["SUPERNETS", "digits_conv", "digits_mlp", "find", "macro_key", "macro_subnet", "nas_bench_macro"]
