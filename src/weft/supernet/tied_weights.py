"""Tied weights: parameters of two layers that are one. Each layer has a copy, so that a chain can be cut between them,
and training keeps the copies equal."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from weft.errors import SupernetError, nearest
from weft.supernet.layer import Layer, LazyLayer, build_layer

if TYPE_CHECKING:
    from weft.supernet.chain import Chain


class Place(NamedTuple):
    """The place of a parameter: its layer, and its path in the layer's module."""

    layer: str
    path: str

    def __str__(self) -> str:
        return f"{self.layer}.{self.path}"


class Tie(NamedTuple):
    """Two parameters that are one; both begin with the values of the first."""

    first: Place
    second: Place


def make_ties(pairs: Iterable[Sequence[str]], layers: Mapping[str, Layer]) -> tuple[Tie, ...]:
    """Pairs of global names such as ``head.out.weight`` as ties; SupernetError for a pair that cannot be one."""
    ties: list[Tie] = []
    for pair in pairs:
        if isinstance(pair, str) or len(pair) != 2:
            raise SupernetError(f"tie={pair!r}: a tie is a pair of names, ('tokens.weight', 'head.weight')")
        tie = Tie(_place(pair[0], layers), _place(pair[1], layers))
        if layers[tie.first.layer].block == layers[tie.second.layer].block:
            raise SupernetError(
                f"'{tie.first}' and '{tie.second}' are of one block: share the parameter there as any module does"
            )
        for place in tie:
            if any(place in other for other in ties):
                raise SupernetError(f"'{place}' is in two ties: a parameter is tied to one other")
        ties.append(tie)
    return tuple(ties)


def copy_tied_weights(chain: Chain, seed: int, built: Collection[str]) -> None:
    """Gives the second parameter of every tie the first values of the first one.

    This is for second layers among those ``built``; the first layer may not be built here.
    """
    for first, second in chain.ties:
        if second.layer not in built:
            continue
        source = chain.module(first.layer)
        if isinstance(source, LazyLayer) or any(p.is_meta for p in source.parameters()):
            twin = source if isinstance(source, LazyLayer) else copy.deepcopy(source)
            source = build_layer(twin, first.layer, seed, torch.device("cpu"))
        one, other = _parameter(source, first), _parameter(chain.module(second.layer), second)
        for what, mine, theirs in (
            ("shape", tuple(one.shape), tuple(other.shape)),
            ("dtype", one.dtype, other.dtype),
            ("requires_grad", one.requires_grad, other.requires_grad),
        ):
            if mine != theirs:
                raise SupernetError(
                    f"'{first}' and '{second}' cannot be tied: their {what} must be the same, not {mine} and {theirs}"
                )
        # In the same layout too, since a kernel may round otherwise where it walks over memory otherwise.
        other.data = one.detach().to(other.device, copy=True)


def share_tied_weights(plain: nn.Module, ties: Iterable[Tie], labels: Mapping[str, str]) -> None:
    """In a module whose parts are the layers, by these labels, every tie becomes one Parameter."""
    for first, second in ties:
        if first.layer in labels and second.layer in labels:
            one = _parameter(plain.get_submodule(labels[first.layer]), first)
            part = plain.get_submodule(labels[second.layer])
            other = _parameter(part, second)
            for path, parameter in list(part.named_parameters(remove_duplicate=False)):
                if parameter is other:
                    owner, _, name = path.rpartition(".")
                    setattr(part.get_submodule(owner), name, one)


def _place(name: str, layers: Mapping[str, Layer]) -> Place:
    inside = [layer for layer in layers if str(name).startswith(f"{layer}.")]
    if not inside:
        raise SupernetError(
            f"tie: '{name}' is in no layer{nearest(str(name).partition('.')[0], layers)}. "
            "Write the name of a layer, '.', and the path of the parameter in it"
        )
    layer = max(inside, key=len)
    record = layers[layer]
    if not record.shared or record.elastic or record.is_architecture:
        raise SupernetError(
            f"tie: layer '{layer}' is a candidate, elastic or of the architecture, but tied parameters belong to "
            "layers that every subnet uses in full: put them into Shared blocks"
        )
    return Place(layer, name.removeprefix(f"{layer}."))


def _parameter(module: nn.Module, place: Place) -> nn.Parameter:
    parameters = dict(module.named_parameters())
    if place.path not in parameters:
        raise SupernetError(
            f"tie: layer '{place.layer}' has no parameter '{place.path}'{nearest(place.path, parameters)}"
        )
    return parameters[place.path]
