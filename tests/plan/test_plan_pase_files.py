"""The networks and tables equal those that PaSE's own code wrote, vertex by vertex and entry by entry."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pase import network, tables
from pase.network import Vertex

Require = Callable[[str, bool, str], None]

SERIAL = {"alexnet": 436245065984, "inception3": 2212587921664, "rnnlm": 23440163635200, "transformer": 6338487812096}
CASES = [(name, p) for name in SERIAL for p in (4, 8, 32)]


def load(require: Require, name: str, p: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    folder = os.environ.get("WEFT_DATA", "")
    file = Path(folder) / "pase" / f"{name}_p{p}_b{128 if name in ('alexnet', 'inception3') else 64}.json"
    require("data", bool(folder) and file.is_file(), "set WEFT_DATA to the folder with pase/")
    with np.load(file.with_suffix(".npz"), allow_pickle=False) as arrays:
        return json.loads(file.read_text()), {key: arrays[key] for key in arrays}


def order(ours: Vertex, theirs: dict[str, Any]) -> list[int]:
    """Where each of our dimensions stands in theirs: PaSE writes those that an einsum sums over in any order."""
    if ours.space == tuple(theirs["dom"]):
        return list(range(len(ours.space)))
    assert ours.kind == "Einsum"
    assert ours.space[-2:] == tuple(theirs["dom"][:-3:-1])
    rank = len(ours.space)
    return [*range(rank - 2), rank - 1, rank - 2]


@pytest.mark.parametrize(("name", "p"), CASES)
def test_networks_equal_pases_vertex_by_vertex(require: Require, name: str, p: int) -> None:
    theirs, _ = load(require, name, p)
    ours = network(name, theirs["batch"])
    assert len(ours.vertices) == len(theirs["vertices"])
    for vertex, their in zip(ours.vertices, theirs["vertices"], strict=True):
        assert vertex.kind == their["type"]
        assert vertex.pointwise == their["pw_op_cnt"]
        assert [vertex.space[i] for i in np.argsort(order(vertex, their))] == their["dom"]
        assert [list(tensor.shape) for tensor in vertex.inputs] == their["in_tensors"]
        assert [list(tensor.shape) for tensor in vertex.outputs] == their["out_tensors"]
    assert [[edge.source, edge.target, edge.input] for edge in ours.edges] == theirs["edge_calls"]
    assert sorted(ours.pairs(parallel=False)) == sorted(map(tuple, theirs["edges"]))


@pytest.mark.parametrize(("name", "p"), CASES)
def test_tables_equal_pases_entry_by_entry(require: Require, name: str, p: int) -> None:
    theirs, arrays = load(require, name, p)
    unary, pairs, of = tables(name, p, theirs["batch"])
    rows = []  # where each of our configurations stands in theirs
    for vertex, their, configs in zip(of.network.vertices, theirs["vertices"], of.configs, strict=True):
        places = {tuple(config): number for number, config in enumerate(their["configs"])}
        back = np.argsort(order(vertex, their))
        assert len(places) == len(configs)
        rows.append([places[tuple(config[back].tolist())] for config in configs])
        np.testing.assert_allclose(unary[their["id"]], arrays[f"v{their['id']}"][rows[-1]], rtol=1e-9, atol=0)
    assert len(pairs) == len(theirs["edges"])
    for (source, target), table in pairs.items():
        expected = arrays[f"e{source}_{target}"][np.ix_(rows[source], rows[target])]
        np.testing.assert_allclose(table, expected, rtol=1e-9, atol=1e-9 * theirs["flop_per_word"])


@pytest.mark.parametrize("name", SERIAL)
def test_the_unsplit_pick_costs_what_pase_says_and_moves_nothing(name: str) -> None:
    unary, pairs, of = tables(name, 4)
    assert all((configs[0] == 1).all() for configs in of.configs)
    assert sum(costs[0] for costs in unary) == SERIAL[name]
    assert {float(table[0, 0]) for table in pairs.values()} == {0.0}
