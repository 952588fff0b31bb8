"""The list of the zoo: each space with its size and the parameters of its ends, counted on the meta device."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from weft.elastic.extract import plain_module
from weft.errors import WeftError
from weft.space import Subnet
from weft.space.counting import TooManyCases
from weft.supernet import Chain, build_on_meta


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
            size = chain.space.size()
        except TooManyCases:
            size = math.inf
        subnets = size if isinstance(size, int) else None
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
