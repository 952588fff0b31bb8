"""PaSE's model: small cases by hand, what each correction changes, and what PaSE's own code wrote, entry by entry."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pase import Corrections, network, tables
from pase.layers import Builder, Value
from pase.markov_chain import markov_chain
from pase.network import Network, Vertex

from weft.plan.solver import Problem, solve

WORD = 5000.0  # FLOP a word of 8 bytes with the usual 10 TFLOP/s and 16 GB/s


def row(of: object, vertex: int, *config: int) -> int:
    (found,) = np.flatnonzero((of.configs[vertex] == config).all(axis=1))  # type: ignore[attr-defined]
    return int(found)


def chain(*widths: int) -> Network:
    net = Builder()
    x = Value((8, widths[0]))
    for width in widths[1:]:
        x = net.linear(x, width)
    return net.network("chain", 8, 1)


def test_a_copy_that_is_cut_is_free_forward_once_corrected() -> None:
    _, pairs, of = tables(chain(6, 4, 4), 4, corrected=Corrections(slices=True))
    table = pairs[0, 1]
    assert table[row(of, 0, 1, 1, 2), row(of, 1, 2, 1, 1)] == WORD * 16  # back, the other half of the gradient
    assert table[row(of, 0, 4, 1, 1), row(of, 1, 1, 4, 1)] == WORD * (32 - 8)  # gathered forward, cut for free back
    assert table[row(of, 0, 2, 1, 1), row(of, 1, 2, 1, 1)] == 0
    # One device computes and two read all of it: as published it is there already, in truth one has nothing.
    assert table[0, row(of, 1, 1, 2, 1)] == WORD * 32
    assert tables(chain(6, 4, 4), 4)[1][0, 1][0, row(of, 1, 1, 2, 1)] == 0


def test_a_multiply_add_is_two_operations_and_a_word_four_bytes_once_corrected() -> None:
    unary, _, of = tables(chain(6, 4), 4, corrected=Corrections(units=True))
    assert unary[0][row(of, 0, 2, 1, 1)] == 6 * 4 * 4 * 6 + WORD / 2 * 2 * 4 * 6 / 2


def test_an_embedding_reads_rows_once_corrected() -> None:
    unary, _, of = tables("rnnlm", 4, corrected=Corrections(gather=True))
    tokens, size, words = 64 * 256, 2048, 100_000
    assert unary[0][0] == 2 * tokens * size
    assert unary[0][row(of, 0, 1, 1, 1, 4)] == 2 * tokens * size + WORD * 2 * 3 / 4 * tokens * size
    assert unary[0][row(of, 0, 4, 1, 1, 1)] == tokens * size / 2 + WORD * 2 * 3 / 4 * words * size


def test_a_batch_norm_sums_a_word_a_channel_once_corrected() -> None:
    unary, _, of = tables("inception3", 4, corrected=Corrections(batch_norm=True))
    elements = 128 * 32 * 149 * 149
    assert unary[1][row(of, 1, 4, 1, 1, 1)] == elements * 4 + 4 * WORD * 2 * 3 / 4 * 32
    assert unary[1][row(of, 1, 1, 4, 1, 1)] == elements * 4


def test_parallel_tensors_are_all_counted_once_corrected() -> None:
    published, corrected = tables("transformer", 4), tables("transformer", 4, corrected=Corrections(edges=True))
    net = published[2].network
    several = {pair for pair, edges in net.pairs(parallel=True).items() if len(edges) > 1}
    assert (len(net.edges), len(published[1]), len(several)) == (280, 256, 24)
    for pair, table in published[1].items():
        if pair in several:
            assert (corrected[1][pair] >= table).all()
            assert (corrected[1][pair] > table).any()
        else:
            assert (corrected[1][pair] == table).all()


def test_a_markov_chain_is_never_below_the_optimum_and_its_history_only_falls() -> None:
    unary, pairs, _ = tables("alexnet", 4)
    problem = Problem(tuple(unary), pairs)
    walk = markov_chain(problem, 0.2, seed=1)
    assert problem.cost(walk.pick) == pytest.approx(walk.cost) == pytest.approx(walk.history[-1][1])
    assert walk.cost >= solve(problem).cost - 1e-9
    assert all(after < before for (_, before), (_, after) in pairwise(walk.history))
    assert walk.proposals > 0


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
