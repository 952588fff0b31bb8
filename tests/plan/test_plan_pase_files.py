"""Networks, tables and optima equal those that PaSE's own code wrote, vertex by vertex and entry by entry."""

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

from weft.plan.solver import Problem, solve

Require = Callable[[str, bool, str], None]

GRAPHS = {"alexnet": 128, "inception3": 128, "rnnlm": 64, "transformer": 64}  # with the size of the batch


def load(require: Require, name: str, p: int) -> tuple[dict[str, Any], dict[str, np.ndarray], float]:
    folder = Path(os.environ.get("WEFT_DATA", "")) / "pase"
    file = folder / f"{name}_p{p}_b{GRAPHS[name]}.json"
    require("data", bool(os.environ.get("WEFT_DATA")) and file.is_file(), "set WEFT_DATA to the folder with pase/")
    rows = json.loads((folder / "results.json").read_text())
    optimum = next(row["optimal_cost_dense_elim"] for row in rows if (row["graph"], row["p"]) == (name, p))
    with np.load(file.with_suffix(".npz"), allow_pickle=False) as arrays:
        return json.loads(file.read_text()), {key: arrays[key] for key in arrays}, optimum


def order(ours: Vertex, theirs: dict[str, Any]) -> list[int]:
    """Where each of our dimensions stands in theirs: PaSE writes those that an einsum sums over in any order."""
    if ours.space == tuple(theirs["dom"]):
        return list(range(len(ours.space)))
    assert ours.kind == "Einsum"
    assert ours.space[-2:] == tuple(theirs["dom"][:-3:-1])
    rank = len(ours.space)
    return [*range(rank - 2), rank - 1, rank - 2]


@pytest.mark.parametrize("p", [4, 32])
@pytest.mark.parametrize("name", GRAPHS)
def test_networks_tables_and_optima_equal_pases(require: Require, name: str, p: int) -> None:
    theirs, arrays, optimum = load(require, name, p)
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

    unary, pairs, of = tables(name, p, theirs["batch"])
    rows = []  # where each of our configurations stands in theirs
    for vertex, their, configs in zip(of.network.vertices, theirs["vertices"], of.configs, strict=True):
        numbers = {tuple(config): number for number, config in enumerate(their["configs"])}
        back = np.argsort(order(vertex, their))
        assert len(numbers) == len(configs)
        rows.append([numbers[tuple(config[back].tolist())] for config in configs])
        np.testing.assert_allclose(unary[their["id"]], arrays[f"v{their['id']}"][rows[-1]], rtol=1e-9, atol=0)
    assert len(pairs) == len(theirs["edges"])
    for (source, target), table in pairs.items():
        expected = arrays[f"e{source}_{target}"][np.ix_(rows[source], rows[target])]
        np.testing.assert_allclose(table, expected, rtol=1e-9, atol=1e-9 * theirs["flop_per_word"])

    problem = Problem(
        tuple(arrays[f"v{vertex['id']}"] for vertex in theirs["vertices"]),
        {(i, j): arrays[f"e{i}_{j}"] for i, j in theirs["edges"]},
    )
    found = solve(problem)
    assert found.cost == problem.cost(found.assignment) == optimum
    assert found.optimal


OPTIMA = {
    ("alexnet", 64): 41120456048,
    ("inception3", 64): 553203648656,
    ("rnnlm", 64): 935818633216,
    ("transformer", 64): 521017024512,
}


@pytest.mark.parametrize(("name", "p"), OPTIMA)
def test_the_tables_built_for_other_device_counts_have_the_known_optimum(name: str, p: int) -> None:
    unary, pairs, _ = tables(name, p, GRAPHS[name])
    found = solve(Problem(tuple(unary), pairs))
    assert found.cost == OPTIMA[name, p]
    assert found.optimal


def test_narrowing_by_bounds_and_plain_elimination_agree() -> None:
    unary, pairs, _ = tables("inception3", 12, 128)
    problem = Problem(tuple(unary), pairs)
    eliminated, bounded = solve(problem), solve(problem, entries=64)
    assert (eliminated.method, bounded.method) == ("elimination", "bounds")
    assert bounded.cost == eliminated.cost
    assert bounded.optimal
