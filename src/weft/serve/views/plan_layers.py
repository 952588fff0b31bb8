"""The operators of a saved plan as nodes, grouped by layer; layers that repeat are one group."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta, Struct

FOLDED = ("parameter", "constant", "view")
"""Kinds of operators that are shown within their neighbours."""

PERIOD = 8
"""The most groups that are repeated together."""

TALL_GROUP = 32
"""A group of more nodes is looked into for layers of its own."""

Word = Annotated[str, Meta(max_length=1000)]
Place = Annotated[int, Meta(ge=0, lt=2**31)]
Amount = Annotated[float, Meta(ge=-1e30, le=1e30)]


class PlanTensor(Struct, frozen=True):
    """A tensor, whole and on a device."""

    shape: tuple[int, ...]
    local: tuple[int, ...]
    partial: bool = False


class PlanInput(PlanTensor, frozen=True, kw_only=True):
    source: Place
    moved: bool = False


class PlanOperator(Struct, frozen=True):
    """A row of ``weft.plan.saved``; its costs are None where they were not known."""

    name: Word
    kind: Word
    target: Word
    module: Word
    known: bool
    flops: Amount
    dims: tuple[tuple[Word, int], ...]
    split: tuple[Word, ...]
    batch: Word | None
    stage: Place
    reads: tuple[PlanInput, ...]
    gives: tuple[PlanTensor, ...]
    compute: Amount | None = None
    communication: Amount = 0.0
    weights: Amount = 0.0
    states: Amount = 0.0
    activations: Amount = 0.0
    gathered: Amount = 0.0


@dataclass(frozen=True, slots=True)
class GraphNodes:
    """The operators that are nodes, by their places; for every operator the node that it is shown in, None where
    nothing reads it; the edges between nodes, and those of them along which something moves between devices."""

    places: tuple[int, ...]
    owner: tuple[int | None, ...]
    edges: frozenset[tuple[int, int]]
    moved: frozenset[tuple[int, int]]

    def folded(self) -> dict[int, list[int]]:
        """For each node the places of what is folded into it."""
        found: dict[int, list[int]] = {place: [] for place in self.places}
        for place, owner in enumerate(self.owner):
            if owner is not None and owner != place:
                found[owner].append(place)
        return found


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The nodes of one layer, or of one module outside the layers.

    ``copies`` has the places of its nodes for each of the layers that are folded into it, in one order. ``run`` tells
    the groups apart that repeat together: copy i of one feeds copy i of the next.
    """

    modules: tuple[str, ...]  # of each copy
    is_layer: bool
    stage: int
    copies: tuple[tuple[int, ...], ...]
    run: int = 0

    @property
    def places(self) -> tuple[int, ...]:
        return self.copies[0]

    @property
    def times(self) -> int:
        return len(self.copies)

    @property
    def title(self) -> str:
        """Such as ``transformer.h.0-11``."""
        first, last = self.modules[0] or "model", self.modules[-1] or "model"
        return first + (f"-{last.rsplit('.', 1)[-1]}" if first != last else "")


def nodes_of(operators: Sequence[PlanOperator]) -> GraphNodes:
    """What is shown of a graph: an operator a node, with the parameters, constants and views around it folded in, and
    the counters that no other operator reads."""
    is_node = [operator.kind not in FOLDED or operator.flops > 0 for operator in operators]
    edges: dict[tuple[int, int], bool] = {}
    origins: list[dict[int, bool]] = []  # of each operator: the nodes its values come from, and whether they moved
    for place, operator in enumerate(operators):
        found: dict[int, bool] = {}
        for read in operator.reads:
            for origin, before in origins[read.source].items():
                found[origin] = found.get(origin, False) or before or read.moved
        if is_node[place]:
            edges |= {(origin, place): moves for origin, moves in found.items()}
        origins.append({place: False} if is_node[place] else found)
    near = {place for edge in edges for place in edge}
    for place, operator in enumerate(operators):
        is_counter = place not in near and all(math.prod(value.shape) == 1 for value in operator.gives)
        is_node[place] &= not (near and is_counter)
    return GraphNodes(
        tuple(place for place, own in enumerate(is_node) if own),
        _owners(operators, is_node),
        frozenset(edges),
        frozenset(edge for edge, moves in edges.items() if moves),
    )


def _owners(operators: Sequence[PlanOperator], is_node: Sequence[bool]) -> tuple[int | None, ...]:
    """What is folded belongs to its first reader, or where it has none to what it reads, or else to the next node of
    its module."""
    owner: list[int | None] = [place if own else None for place, own in enumerate(is_node)]
    for place in reversed(range(len(operators))):
        for read in operators[place].reads:
            if not is_node[read.source] and owner[place] is not None:
                owner[read.source] = owner[place]
    for place, operator in enumerate(operators):
        if owner[place] is None:
            owner[place] = next((owner[read.source] for read in operator.reads), None)
    of_module: dict[str, int] = {}
    for place in reversed(range(len(operators))):
        module = operators[place].module
        if is_node[place]:
            of_module[module] = place
        elif owner[place] is None and module and operators[place].kind != "parameter":
            owner[place] = of_module.get(module)
    return tuple(owner)


def groups(operators: Sequence[PlanOperator], nodes: GraphNodes) -> list[LayerGroup]:
    """The groups in the order they run in, stage by stage; layers that are alike are one group."""
    found = _groups_within(_GroupKeys(operators, nodes), nodes.places, 1)
    found.sort(key=lambda group: group.stage)
    return [replace(group, run=number) if group.times == 1 else group for number, group in enumerate(found)]


def _groups_within(keys_of: _GroupKeys, places: Sequence[int], depth: int) -> list[LayerGroup]:
    """The groups of some nodes by the numbers in their modules' paths, so many deep."""
    plain = _split_by_module(keys_of.operators, places, depth)
    found: list[LayerGroup] = []
    keys = [keys_of.number(group.places, group.modules[0] if group.is_layer else None) for group in plain]
    for start, period, times in repeats(keys):
        for number in range(start, start + period):
            copies = plain[number : number + period * times : period]
            group = plain[number]
            if times > 1:
                modules = tuple(own.modules[0] for own in copies)
                # Numbers below zero, so that no group that stands alone has the same.
                run = -1 - plain[start].places[0]
                found.append(replace(group, modules=modules, copies=tuple(own.copies[0] for own in copies), run=run))
            elif len(group.places) > TALL_GROUP and group.is_layer:
                inner = _groups_within(keys_of, group.places, depth + 1)
                found += inner if any(own.is_layer for own in inner) else [group]
            else:
                found.append(group)
    return found


def _split_by_module(operators: Sequence[PlanOperator], places: Sequence[int], depth: int) -> list[LayerGroup]:
    """A group for each layer, wherever its nodes are; of the others one for each module as long as it runs."""
    found: dict[object, list[int]] = {}
    named: dict[object, tuple[str, bool, int]] = {}
    previous: object = None
    for place in places:
        module, stage = operators[place].module, operators[place].stage
        layer = layer_of(module, depth)
        key: object = (stage, layer) if layer else (stage, module, len(named))
        if not layer and previous is not None and named[previous] == (module, False, stage):
            key = previous
        named.setdefault(key, (layer or module, bool(layer), stage))
        found.setdefault(key, []).append(place)
        previous = key
    return [LayerGroup((name,), layer, stage, (tuple(found[key]),)) for key, (name, layer, stage) in named.items()]


def layer_of(module: str, depth: int = 1) -> str:
    """The path of a module up to its number that is so many deep; empty if it has fewer.

    >>> layer_of("stages.2.layers.1.conv", 1), layer_of("stages.2.layers.1.conv", 2), layer_of("stages.2.norm", 2)
    ('stages.2', 'stages.2.layers.1', '')
    """
    numbers = [at for at, part in enumerate(module.split(".")) if part.isdigit()]
    return ".".join(module.split(".")[: numbers[depth - 1] + 1]) if len(numbers) >= depth else ""


class _GroupKeys:
    """Numbers that are equal for groups that are shown alike."""

    def __init__(self, operators: Sequence[PlanOperator], nodes: GraphNodes) -> None:
        self.operators = operators
        self._folded = nodes.folded()
        self._sources: dict[int, list[int]] = {}
        for source, reader in nodes.edges:
            self._sources.setdefault(reader, []).append(source)
        self._numbers: dict[object, int] = {}

    def number(self, places: Sequence[int], layer: str | None) -> int:
        """Of the nodes at some places; ``layer`` is the path of their layer, None where they are in none."""
        at = {place: number for number, place in enumerate(places)}
        key = tuple(self._node(place, layer, at) for place in places)
        return self._numbers.setdefault((layer is None, key), len(self._numbers))

    def _node(self, place: int, layer: str | None, at: Mapping[int, int]) -> object:
        own = self.operators[place]
        folded = [self.operators[other] for other in self._folded[place]]
        return (
            own.stage,
            own.module.removeprefix(layer or ""),
            (own.kind, own.target, own.dims, own.gives, own.split),
            # A constant that all layers share is folded into the first of them, and makes it no other layer.
            tuple((one.kind, one.dims, one.split) for one in folded if one.module.startswith(layer or "")),
            tuple(sorted(at[source] for source in self._sources.get(place, ()) if source in at)),
        )


def repeats(keys: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(start, period, times): the keys as blocks that repeat, each as much as can be.

    >>> list(repeats([7, 1, 2, 1, 2, 1, 2, 5, 5]))
    [(0, 1, 1), (1, 2, 3), (7, 1, 2)]
    """
    start = 0
    while start < len(keys):
        saved, best = 0, (1, 1)
        for period in range(1, min(PERIOD, (len(keys) - start) // 2) + 1):
            times, block = 1, keys[start : start + period]
            while keys[start + times * period : start + (times + 1) * period] == block:
                times += 1
            if (times - 1) * period > saved:
                saved, best = (times - 1) * period, (period, times)
        yield start, *best
        start += best[0] * best[1]


def shown_edges(nodes: GraphNodes, found: Sequence[LayerGroup]) -> tuple[list[tuple[int, int]], set[tuple[int, int]]]:
    """The edges between the nodes that are shown, and those that move something. Of layers that are folded into one,
    the edges from each to the next are left out."""
    at = {
        place: (group.run, number, first)
        for group in found
        for number, copy in enumerate(group.copies)
        for place, first in zip(copy, group.places, strict=True)
    }
    edges: dict[tuple[int, int], bool] = {}
    for source, reader in sorted(nodes.edges):
        (run, copy, start), (other, its, end) = at[source], at[reader]
        if run != other or copy == its:
            edges[start, end] = edges.get((start, end), False) or (source, reader) in nodes.moved
    return list(edges), {edge for edge, moves in edges.items() if moves}
