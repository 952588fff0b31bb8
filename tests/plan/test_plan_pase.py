"""PaSE's model without its files: small cases by hand, and what each correction changes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from pase import NETWORKS, Corrections, tables
from pase.layers import Builder, Value
from pase.markov_chain import markov_chain
from pase.network import Network

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


@pytest.mark.parametrize("name", ["edges", "gather", "batch_norm", "slices", "units"])
def test_each_correction_changes_only_what_it_names(name: str) -> None:
    touched = {"edges": "transformer", "gather": "rnnlm", "batch_norm": "inception3"}.get(name, "alexnet")
    untouched = {"edges": "rnnlm", "gather": "alexnet", "batch_norm": "transformer"}.get(name)
    fix = Corrections(**{name: True})
    for network_name, same in ((touched, False), *([(untouched, True)] if untouched else [])):
        before, after = tables(network_name, 4), tables(network_name, 4, corrected=fix)
        unary = all((a == b).all() for a, b in zip(before[0], after[0], strict=True))
        pairs = all((before[1][pair] == after[1][pair]).all() for pair in before[1])
        assert (unary and pairs) == same


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("p", [1, 6])
def test_any_number_of_devices_has_tables_without_holes(name: str, p: int) -> None:
    for corrected in (False, True):
        unary, pairs, of = tables(name, p, 24, corrected=corrected)
        for costs, configs in zip(unary, of.configs, strict=True):
            assert costs.shape == (len(configs),)
            assert np.isfinite(costs).all()
            assert (costs >= 0).all()
            assert (configs.prod(axis=1) <= p).all()
        for (source, target), table in pairs.items():
            assert source < target
            assert table.shape == (len(of.configs[source]), len(of.configs[target]))
            assert np.isfinite(table).all()
            assert (table >= 0).all()


def test_a_markov_chain_is_never_below_the_optimum_and_its_history_only_falls() -> None:
    unary, pairs, _ = tables("alexnet", 4)
    problem = Problem(tuple(unary), pairs)
    walk = markov_chain(problem, 0.2, seed=1)
    assert problem.cost(walk.pick) == pytest.approx(walk.cost) == pytest.approx(walk.history[-1][1])
    assert walk.cost >= solve(problem).cost - 1e-9
    assert all(after < before for (_, before), (_, after) in pairwise(walk.history))
    assert walk.proposals > 0
