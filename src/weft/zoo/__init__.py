"""Ready-made spaces with their supernets, by family; one function each."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from weft.elastic.extract import plain_module
from weft.errors import SupernetError, WeftError, nearest
from weft.space import Subnet
from weft.space.counting import TooManyCases
from weft.supernet import Chain, build_on_meta
from weft.zoo.cells import darts, toy_cell
from weft.zoo.convolutions import conv_macro, digits_conv, digits_mlp
from weft.zoo.gpt import language_model
from weft.zoo.mobilenet import ofa_mobilenet_v3
from weft.zoo.nas_bench import (
    macro_key,
    macro_subnet,
    nas_bench_201,
    nas_bench_macro,
    nas_bench_macro_entangled,
    nb201_key,
    nb201_subnet,
)
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


@dataclass(frozen=True, slots=True)
class Entry:
    """One space. ``subnets`` is None where there are too many to count, parameters where they cannot be counted."""

    name: str
    subnets: int | None
    choices: int
    smallest: int | None
    """Parameters of the chain's smallest subnet: the first option of every choice, which in the zoo is the least."""
    largest: int | None
    about: str


def catalogue(supernets: Mapping[str, Callable[[], Chain]]) -> Iterator[Entry]:
    """An entry for each, in order."""
    for name, make in supernets.items():
        chain = build_on_meta(make)
        try:
            subnets: int | None = int(chain.space.size())
        except TooManyCases:
            subnets = None
        ends = [_parameters(chain, subnet) for subnet in (chain.smallest(), chain.largest())]
        yield Entry(name, subnets, len(chain.space.choices), ends[0], ends[1], summary(make))


def summary(function: Callable[..., Any]) -> str:
    """The first paragraph of a docstring, as one line of plain text.

    >>> summary(catalogue)
    'An entry for each, in order.'
    """
    first = (inspect.getdoc(function) or "").split("\n\n")[0]
    return re.sub(r"\s+", " ", first.replace("``", "")).strip()


def _parameters(chain: Chain, subnet: Subnet) -> int | None:
    """As many as the subnet has once it is extracted."""
    total, carried = 0, len(chain.inputs or ("",))
    try:
        for layer in chain.route(subnet):
            module = chain.module(layer)
            if layer.elastic:
                module = plain_module(module, subnet, carried, layer.extra_inputs)
                carried = _outputs(module)
            total += sum(parameter.numel() for parameter in module.parameters())
    except WeftError:  # a layer that takes several tensors, behind a layer whose number of outputs is unknown
        return None
    return total


def _outputs(module: nn.Module) -> int:
    """How many tensors a plain layer gives."""
    if not isinstance(module, fx.GraphModule):
        return 1
    given = next(node for node in module.graph.nodes if node.op == "output").args[0]
    return len(given) if isinstance(given, (tuple, list)) else 1


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
