"""Spaces of the zoo: identity, size, every stream, moves; and the weights that a seed gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import weft
from benchmarks.golden import digests
from benchmarks.golden.adapter import first
from benchmarks.golden.runner import Case

SPACES = ("digits-mlp", "digits-conv", "nas-bench-201", "gpt-test", "vit-test", "conv-macro", "toy-cell")
SMALL = ("digits-mlp", "digits-conv", "gpt-test", "vit-test", "toy-cell")
STREAMS = ("iid", "fair", "spaced", "spaced:2", "sandwich:2")


def space(name: str) -> dict[str, Any]:
    found = first("weft.zoo:find")(name)().space
    return {
        "id": found.id,
        "size": str(found.size()),
        "streams": {spec: stream(found, spec) for spec in STREAMS},
        "moves": moves(found),
        "json": digests.sha(found.to_json()),
    }


def stream(found: Any, spec: str) -> str:
    try:
        made = weft.make_stream(found, spec, 5)
        return digests.sha([[subnet.id for subnet in made[step]] for step in range(40)])
    except weft.WeftError as error:
        return f"refused: {type(error).__name__}"


def moves(found: Any) -> str:
    """Sampling, mutation, crossover, neighbours."""
    draw = np.random.default_rng(7)
    one, other = found.sample(draw), found.sample(draw)
    made = [one, other, found.mutate(one, draw), found.crossover(one, other, draw), *found.neighbours(one)[:20]]
    return digests.sha([subnet.id for subnet in [*made, found.first(), found.last()]])


def weights(name: str) -> dict[str, Any]:
    chain = weft.initialise(first("weft.zoo:find")(name), 0)
    return {
        "weights": digests.module(chain),
        "names": digests.sha(sorted(chain.state_dict())),
        "largest": chain.largest().id,
        "smallest": chain.smallest().id,
        "extracted": digests.module(weft.extract(chain, chain.smallest())),
    }


def cases() -> Iterator[Case]:
    for name in SPACES:
        yield f"space/{name}", lambda _, name=name: space(name)
    for name in SMALL:
        yield f"init/{name}", lambda _, name=name: weights(name)
