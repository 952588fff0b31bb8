"""PaSE's own tables: the solver finds the optimum that PaSE and a plain elimination found, and proves it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pase import tables

from weft.plan.solver import Problem, solve

Require = Callable[[str, bool, str], None]

GRAPHS = {"alexnet": 128, "inception3": 128, "rnnlm": 64, "transformer": 64}


@pytest.mark.parametrize("p", [4, 8, 32])
@pytest.mark.parametrize("graph", GRAPHS)
def test_the_tables_that_pase_wrote_are_solved_to_its_optimum(require: Require, graph: str, p: int):
    folder = Path(os.environ.get("WEFT_DATA", "")) / "pase"
    stem = folder / f"{graph}_p{p}_b{GRAPHS[graph]}.json"
    require("data", bool(os.environ.get("WEFT_DATA")) and stem.is_file(), "set WEFT_DATA to the folder with pase/")
    about = json.loads(stem.read_text())
    with np.load(stem.with_suffix(".npz"), allow_pickle=False) as arrays:
        unary = tuple(arrays[f"v{vertex['id']}"] for vertex in about["vertices"])
        pairs = {(i, j): arrays[f"e{i}_{j}"] for i, j in about["edges"]}
    known = next(
        row for row in json.loads((folder / "results.json").read_text()) if (row["graph"], row["p"]) == (graph, p)
    )
    found = solve(Problem(unary, pairs))
    assert found.cost == known["optimal_cost_dense_elim"]
    assert found.optimal
    assert Problem(unary, pairs).cost(found.assignment) == found.cost


@pytest.mark.parametrize(
    ("graph", "p", "optimum"),
    [
        ("alexnet", 16, 70320712672),
        ("alexnet", 64, 41120456048),
        ("inception3", 16, 673045949344),
        ("inception3", 64, 553203648656),
        ("rnnlm", 16, 2476066881536),
        ("rnnlm", 64, 935818633216),
        ("transformer", 16, 1004992614400),
        ("transformer", 64, 521017024512),
    ],
)
def test_the_tables_built_for_other_device_counts_have_the_known_optimum(graph: str, p: int, optimum: int):
    unary, pairs, _ = tables(graph, p, GRAPHS[graph])
    found = solve(Problem(tuple(unary), pairs))
    assert found.cost == optimum
    assert found.optimal


def test_narrowing_by_bounds_and_plain_elimination_agree():
    unary, pairs, _ = tables("inception3", 12, 128)
    problem = Problem(tuple(unary), pairs)
    eliminated, bounded = solve(problem), solve(problem, entries=64)
    assert eliminated.method == "elimination"
    assert bounded.method == "bounds"
    assert bounded.cost == eliminated.cost
    assert bounded.optimal
