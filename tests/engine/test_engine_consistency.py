"""The formulas of a layer's clock against brute force, and the texts that name them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.engine.consistency import (
    Bounded,
    Consistency,
    Delayed,
    Exact,
    Lagged,
    parse_consistency,
    version_schedule,
)
from weft.errors import ConsistencyError


def test_the_table_by_hand() -> None:
    """Two micro-batches a step; what the micro-batches 0..11 see in block 1 of 4."""
    exact, delayed, lagged = (version_schedule(one, 1, 4, 2, 6) for one in (Exact(), Delayed(2), Lagged(2)))
    bounded = version_schedule(Bounded(2, 4), 1, 4, 2, 6)  # virtual stage 1, so L = 3
    expected = [
        (exact.forward_reads, "001122334455"),
        (delayed.forward_reads, "000000112233"),
        (lagged.forward_reads, "000000001111"),
        (lagged.slot, "000011112222"),
        (bounded.forward_reads, "000011223344"),
        (bounded.backward_reads, "001122334455"),
    ]
    for reads, picture in expected:
        assert "".join(str(reads(n)) for n in range(12)) == picture, reads


def pipeline_reads(window: int, every: int, total: int) -> tuple[list[int], list[int]]:
    """PACI at one stage, played: a forward starts while fewer than `window` are in flight."""
    forward, backward, done = [], [], 0
    started = 0
    while done < total:
        while started < total and started - done < window:
            forward.append(done // every)
            started += 1
        backward.append(done // every)
        done += 1
    return forward, backward


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("every", [1, 2, 3, 4, 8])
def test_bounded_reads_what_a_real_stage_of_that_depth_would(blocks: int, every: int) -> None:
    steps = 40
    for depth in range(1, blocks + 1):
        for block in range(blocks):
            stage = (block * depth) // blocks
            assert 0 <= stage < depth
            found = version_schedule(Bounded(every, depth), block, blocks, 1, steps)
            assert found.window == depth - stage
            forward, backward = pipeline_reads(depth - stage, every, steps)
            assert [found.forward_reads(n) for n in range(steps)] == forward
            assert [found.backward_reads(n) for n in range(steps)] == backward


CONSISTENCIES = st.one_of(
    st.just(Exact()),
    st.builds(Delayed, st.integers(0, 9)),
    st.builds(Lagged, st.integers(1, 9)),
    st.builds(Bounded, st.integers(1, 5), st.integers(1, 4)),
)


@given(
    m=st.integers(1, 4),
    steps=st.integers(1, 30),
    consistency=CONSISTENCIES,
    block=st.integers(0, 3),
)
def test_no_micro_batch_sees_an_update_that_holds_it_or_a_later_one(
    m: int, steps: int, consistency: Consistency, block: int
) -> None:
    if isinstance(consistency, Bounded):
        consistency = Bounded(consistency.every * m, consistency.depth)
    found = version_schedule(consistency, block, 4, m, steps)
    total = steps * m
    before = 0
    for n in range(total):
        for seen in (found.forward_reads(n), found.backward_reads(n)):
            assert 0 <= seen <= found.slot(n)
            assert seen == 0 or found.last_microbatch(seen - 1) < n
        assert found.forward_reads(n) >= before  # versions only grow, so the oldest reader is the next one
        before = found.forward_reads(n)
        assert n // m in found.steps(found.slot(n))
        assert found.last_microbatch(found.slot(n)) >= n
    # Every micro-batch is in one slot, and the slots cover the run.
    slots = [found.slot(n) for n in range(total)]
    assert slots == sorted(slots)
    assert sum(len(found.steps(slot)) for slot in set(slots)) == steps
    assert found.last_microbatch(slots[-1]) == total - 1


@given(CONSISTENCIES)
def test_a_consistency_reads_back_what_it_prints(consistency: Consistency) -> None:
    assert parse_consistency(str(consistency)) == consistency


@pytest.mark.parametrize(
    "text",
    [
        *("", "exakt", "exact(1)", "delayed", "delayed()", "delayed(1, 2)", "delayed(-1)", "delayed(1", "delayed(x)"),
        *("lagged(0)", "bounded(4)", "bounded(0, 4)", "bounded(4, 0)", "2BW"),
    ],
)
def test_a_text_that_names_no_consistency_is_refused(text: str) -> None:
    with pytest.raises(ConsistencyError):
        parse_consistency(text)


def test_the_refusals_name_a_value_that_works() -> None:
    with pytest.raises(ConsistencyError, match=r"multiple of the 4 micro-batches .* K = 8"):
        version_schedule(Bounded(6, 2), 0, 4, 4, 10)
    version_schedule(Bounded(8, 2), 0, 4, 4, 10)
    with pytest.raises(ConsistencyError, match="at most 3"):
        version_schedule(Bounded(4, 4), 0, 3, 1, 10)
    version_schedule(Bounded(4, 3), 0, 3, 1, 10)
    with pytest.raises(ConsistencyError, match="did you mean 'lagged'"):
        parse_consistency("laged(3)")
