"""Ready-made spaces with their supernets, by family; one function each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weft.errors import SupernetError, nearest
from weft.supernet import Chain
from weft.zoo.cells import darts, toy_cell
from weft.zoo.conv_macro import conv_macro
from weft.zoo.digits import digits_conv, digits_mlp
from weft.zoo.gpt import language_model
from weft.zoo.mobilenet import ofa_mobilenet_v3
from weft.zoo.nas_bench_201 import nas_bench_201, nb201_key, nb201_subnet
from weft.zoo.nas_bench_macro import macro_key, macro_subnet, nas_bench_macro, nas_bench_macro_entangled
from weft.zoo.transformers import (
    autoformer_base,
    autoformer_small,
    autoformer_tiny,
    gpt,
    gpt_default,
    gpt_shakespeare,
    gpt_small,
    gpt_test,
    vit,
    vit_test,
)

SUPERNETS: Mapping[str, Callable[[], Chain]] = {
    "digits-conv": digits_conv,
    "digits-mlp": digits_mlp,
    "nas-bench-macro": nas_bench_macro,
    "nas-bench-macro-entangled": nas_bench_macro_entangled,
    "nas-bench-201": nas_bench_201,
    "toy-cell": toy_cell,
    "conv-macro": conv_macro,
    "darts": darts,
    "ofa-mobilenet-v3": ofa_mobilenet_v3,
    "autoformer-tiny": autoformer_tiny,
    "autoformer-small": autoformer_small,
    "autoformer-base": autoformer_base,
    "vit-test": vit_test,
    "gpt-small": gpt_small,
    "gpt-default": gpt_default,
    "gpt-shakespeare": gpt_shakespeare,
    "gpt-test": gpt_test,
    "gpt": language_model,
}


def find(name: str) -> Callable[[], Chain]:
    """The function that makes a supernet of the zoo; raises SupernetError with the nearest name.

    >>> find("digits-conv")().space.size()
    4096
    """
    if name not in SUPERNETS:
        raise SupernetError(f"no supernet '{name}' in the zoo{nearest(name, SUPERNETS)}")
    return SUPERNETS[name]


__all__ = [
    "SUPERNETS",
    "autoformer_base",
    "autoformer_small",
    "autoformer_tiny",
    "conv_macro",
    "darts",
    "digits_conv",
    "digits_mlp",
    "find",
    "gpt",
    "gpt_default",
    "gpt_shakespeare",
    "gpt_small",
    "gpt_test",
    "language_model",
    "macro_key",
    "macro_subnet",
    "nas_bench_201",
    "nas_bench_macro",
    "nas_bench_macro_entangled",
    "nb201_key",
    "nb201_subnet",
    "ofa_mobilenet_v3",
    "toy_cell",
    "vit",
    "vit_test",
]
