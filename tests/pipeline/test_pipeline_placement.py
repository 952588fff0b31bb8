"""Placements drawn by hand and as laws, whose turn it is on a rank, and what the simulator makes of both."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import ConsistencyError
from weft.pipeline.consistency import parse
from weft.pipeline.placement import Placement, place
from weft.pipeline.scheduler import Op, Rule, Scheduler
from weft.pipeline.simulator import Simulated, jitter, simulate, with_messages
from weft.pipeline.turns import Turns, choose
from weft.pipeline.workload import Workload


def shared(blocks: int, m: int, steps: int, consistency: str = "exact", forward: float = 1.0) -> Workload:
    """A plain network: every micro-batch uses every layer."""
    costs = dict.fromkeys(range(blocks), (forward, 2 * forward))
    return Workload(
        blocks, m, steps, lambda n: [(b, b) for b in range(blocks)], lambda layer: parse(consistency), costs
    )


def on(work: Workload, placement: Placement, rule: Rule | None = None, **options: Any) -> Simulated:
    stages = placement.stages
    return simulate(
        work, tuple(range(1, stages)), rule or Rule(2 * stages * work.microbatches), placement=placement, **options
    )


def flush(ranks: int, chunks: int, m: int, shape: str, **options: Any) -> float:
    """What waiting adds to the time of the work itself, where every step waits for the one before."""
    steps = 3
    result = on(shared(ranks * chunks, m, steps, forward=1 / chunks), Placement(ranks, chunks, shape), **options)
    return result.time / (3 * m * steps) - 1


PLACEMENTS = st.one_of(
    st.builds(Placement, st.integers(1, 6)),
    st.builds(Placement, st.integers(1, 4), st.integers(1, 4), st.just("loop")),
    st.builds(Placement, st.integers(1, 4), st.just(2), st.just("v")),
)


def test_three_ranks_drawn_by_hand() -> None:
    line, loop, v = Placement(3), Placement(3, 2, "loop"), Placement(3, 2, "v")
    assert [line.stages_of(rank) for rank in range(3)] == [(0,), (1,), (2,)]
    assert [loop.stages_of(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
    assert [v.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert line.links() == v.links() == ((0, 1), (1, 2))
    assert loop.links() == ((0, 1), (0, 2), (1, 2))
    assert [loop.neighbours(rank) for rank in range(3)] == [(1, 2), (0, 2), (0, 1)]
    assert [v.neighbours(rank) for rank in range(3)] == [(1,), (0, 2), (1,)]
    assert [stage for stage in range(5) if v.together(stage)] == [2]
    assert Placement(1, 4, "loop").links() == ()


@given(PLACEMENTS)
def test_every_stage_is_on_one_rank_and_neighbours_in_the_chain_are_linked(placement: Placement) -> None:
    own = [placement.stages_of(rank) for rank in range(placement.ranks)]
    assert sorted(stage for part in own for stage in part) == list(range(placement.stages))
    assert {len(part) for part in own} == {placement.chunks}
    assert placement.rank_of(0) == 0
    for rank, part in enumerate(own):
        assert list(part) == sorted(part)
        assert {placement.rank_of(stage) for stage in part} == {rank}
        assert all(rank in placement.neighbours(other) for other in placement.neighbours(rank))
    needed = {frozenset((placement.rank_of(s), placement.rank_of(s + 1))) for s in range(placement.stages - 1)}
    assert {frozenset(pair) for pair in placement.links()} == {pair for pair in needed if len(pair) == 2}
    if placement.shape == "v":
        last = placement.stages - 1
        assert all(placement.rank_of(stage) == placement.rank_of(last - stage) for stage in range(placement.stages))


def test_a_user_says_as_little_as_possible() -> None:
    assert place(4) == Placement(4, 1, "line")
    assert place(4, 4) == Placement(4, 1, "line")
    assert place(6, 2) == Placement(2, 3, "loop")
    assert place(4, 2, "v") == Placement(2, 2, "v")
    assert place(1) == Placement(1)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda: Placement(2, 2, "circle"), "unknown placement 'circle'; known: line, loop, v"),
        (lambda: Placement(0), "on each of 0 ranks"),
        (lambda: Placement(2, 0, "loop"), "0 stages on each of 2 ranks"),
        (lambda: Placement(2, 2), "placement 'line' has one stage a rank, not 2: use 'loop'"),
        (lambda: Placement(2, 3, "v"), "placement 'v' has two stages a rank, .* not 3: use 4 stages on 2 ranks"),
        (lambda: place(5, 2), "5 stages cannot be placed on 2 ranks: every rank has the same number"),
        (lambda: place(2, 4), "2 stages cannot be placed on 4 ranks"),
        (lambda: place(4, shape="v"), "not 1: use 8 stages on 4 ranks"),
        (lambda: Placement(2, 2, "v").rank_of(4), "no stage 4: 'v' of 2 x 2 has the stages 0 to 3"),
        (lambda: Placement(2, 2, "v").stages_of(2), "no rank 2: 'v' of 2 x 2 has the ranks 0 to 1"),
        (lambda: simulate(shared(3, 1, 1), (1, 2), Rule(2), placement=Placement(2)), "is one of 2 stages, .* are 3"),
    ],
)
def test_a_placement_that_cannot_be_is_refused_with_a_remedy(mistake: Any, words: str) -> None:
    with pytest.raises(ConsistencyError, match=words) as caught:
        mistake()
    assert "\n" not in str(caught.value)


# Whose turn it is


def test_two_ranks_of_a_loop_drawn_by_hand() -> None:
    # A stage takes half of what it would on two ranks with a stage each; stages 0 and 2 are on rank 0.
    result = on(shared(4, m=4, steps=1, forward=0.5), Placement(2, 2, "loop"))
    order = [" ".join(str(span.op) for span in result.spans if span.op.stage % 2 == rank) for rank in range(2)]
    assert order[0] == "0F0 0F1 2F0 2F1 0F2 0F3 2B0 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"
    assert order[1] == "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"
    assert result.time == 13.5  # 12 of work, and one forward and backward of half a stage


def test_forwards_first_stays_forwards_first_where_stages_share_a_rank() -> None:
    result = on(shared(4, m=4, steps=2), Placement(2, 2, "loop"), Rule(32, "forward"))
    for rank in range(2):
        for step in range(2):
            own = [s.op for s in result.spans if s.op.stage % 2 == rank and s.op.microbatch // 4 == step]
            assert [op.kind for op in own] == ["F"] * 8 + ["B"] * 8


def test_put_off_weight_gradients_wait_until_nothing_else_is_ready() -> None:
    could = [Op(2, "W", 0), Op(0, "F", 9), Op(0, "B", 7)]
    assert choose(could, ("F", "B", "W"), 2) == Op(0, "F", 9)
    assert choose(could, ("B", "F", "W"), 2) == Op(0, "B", 7)
    assert choose(could[:1], ("B", "F", "W"), 2) == Op(2, "W", 0)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 6), st.booleans(), st.sampled_from(["exact", "free"]))
def test_a_stage_is_due_whenever_one_of_the_rank_could_work_and_then_does(
    seed: int, chunks: int, window: int, defer: bool, consistency: str
) -> None:
    """Against the schedulers themselves: each is copied and asked."""
    rng = random.Random(seed)
    stages, total = chunks + 1, 8  # the last stage is elsewhere, and does what it does whenever it likes
    work = shared(stages, 2, total // 2, consistency if consistency == "exact" else "delayed(9)")
    uses = [work.uses(tuple(range(1, stages)), stage) for stage in range(stages)]
    schedulers = [Scheduler(s, stages, uses[s], total, Rule(window, defer=defer)) for s in range(chunks)]
    turns = Turns(schedulers, rng.randint(1, 3))
    arriving: list[Op] = []
    while not all(scheduler.done for scheduler in schedulers):
        if arriving and rng.random() < 0.7:
            op = arriving.pop(rng.randrange(len(arriving)))
            schedulers[op.stage].arrived(op.kind, op.microbatch)
        could = [scheduler.stage for scheduler in schedulers if copy.deepcopy(scheduler).next() is not None]
        op_due = turns.next()
        assert (op_due is not None) == bool(could)
        if op_due is None:
            assert arriving
            continue
        stage, kind, n = op_due
        assert stage in could
        schedulers[stage].finished(op_due)
        if kind == "F":
            arriving.append(Op(stage + 1, "F", n) if stage + 1 < chunks else Op(stage, "B", n))
        elif kind == "B" and stage:
            arriving.append(Op(stage - 1, "B", n))


# The simulator


def test_interleaving_two_stages_a_rank_halves_the_bubble_of_a_flush() -> None:
    assert flush(4, 1, 8, "line") == pytest.approx(3 / 8)
    assert flush(4, 2, 8, "loop") == pytest.approx(3 / 16)
    assert flush(4, 2, 8, "v") == pytest.approx(3 / 16)


@pytest.mark.parametrize("prefer", ["backward", "forward"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_a_loop_costs_the_published_bubble_of_interleaved_stages(
    ranks: int, chunks: int, groups: int, prefer: str
) -> None:
    m = groups * ranks
    rule = Rule(2 * ranks * chunks * m, prefer)
    assert flush(ranks, chunks, m, "loop", rule=rule) == pytest.approx((ranks - 1) / (chunks * m))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_a_v_costs_the_same_once_a_step_has_twice_as_many_micro_batches_as_there_are_ranks(ranks: int) -> None:
    assert flush(ranks, 2, 2 * ranks, "v") == pytest.approx((ranks - 1) / (4 * ranks))


def test_the_bubble_is_that_of_ranks_and_what_they_did_adds_up() -> None:
    result = on(shared(4, m=2, steps=1), Placement(2, 2, "loop"))
    assert len(result.busy) == 2
    assert sum(result.busy) == result.work == 4 * 2 * 3
    assert result.bubble == pytest.approx(1 - 24 / (2 * result.time))
    assert result.stages == len(result.peak) == 4


def test_a_message_within_a_rank_takes_no_time_and_every_other_does() -> None:
    # v of 2: stages 0 and 3 on rank 0, 1 and 2 on rank 1. A forward is 1, a backward 2, a message 10.
    result = on(shared(4, m=1, steps=1), Placement(2, 2, "v"), latency=10)
    spans = {str(span.op): (span.start, span.end) for span in result.spans}
    assert spans == {
        "0F0": (0, 1),
        "1F0": (11, 12),
        "2F0": (12, 13),
        "3F0": (23, 24),
        "3B0": (24, 26),
        "2B0": (36, 38),
        "1B0": (38, 40),
        "0B0": (50, 52),
    }
    alone = on(shared(4, m=2, steps=3), Placement(1, 4, "loop"), latency=10)
    assert alone.time == alone.work == 4 * 3 * 6
    assert alone.bubble == 0


def test_what_messages_cost_their_stages_is_not_paid_within_a_rank() -> None:
    cost = with_messages((1, 2, 3), [9.0, 1.0, 2.0, 4.0], Placement(2, 2, "v"))
    assert [cost(Op(stage, "F", 0), 0.0) for stage in range(4)] == [1, 1, 4, 4]


def test_messages_of_both_directions_that_leave_a_rank_for_another_share_a_link() -> None:
    # loop of 2: 0F1 and 2B0 both go from rank 0 to rank 1.
    work = Workload(
        4, 2, 1, lambda n: [(b, b) for b in range(4)], lambda layer: parse("exact"), None, [0.0] + [8.0] * 3
    )
    result = on(work, Placement(2, 2, "loop"), bandwidth=1.0)
    spans = {str(span.op): span for span in result.spans}
    sent = sorted(
        (spans[name].end, spans[other].start)
        for name, other in (
            ("0F0", "1F0"),
            ("0F1", "1F1"),
            ("2F0", "3F0"),
            ("2F1", "3F1"),
            ("2B0", "1B0"),
            ("2B1", "1B1"),
        )
    )
    arrivals = [at for _, at in sent]
    assert arrivals == sorted(arrivals)
    assert all(later - earlier >= 8 for earlier, later in pairwise(arrivals))


@settings(max_examples=120, deadline=None)
@given(
    PLACEMENTS,
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from(["exact", "delayed(2)", "lagged(2)"]),
    st.sampled_from(["backward", "forward", "alternate"]),
    st.booleans(),
    st.integers(0, 3),
    st.floats(0, 3),
)
def test_any_placement_finishes_in_order_within_its_windows_and_does_one_thing_at_a_time(
    placement: Placement,
    m: int,
    steps: int,
    window: int,
    consistency: str,
    prefer: str,
    defer: bool,
    seed: int,
    latency: float,
) -> None:
    work = shared(placement.stages, m, steps, consistency)
    rule = Rule(window, prefer, defer)
    result = on(work, placement, rule, latency=latency, duration=jitter(seed, 0.5), split=0.5 if defer else None)
    kinds = ("F", "B", "W") if defer else ("F", "B")
    ends = {span.op: span.end for span in result.spans}
    assert set(ends) == {Op(s, k, n) for s in range(placement.stages) for k in kinds for n in range(work.total)}
    by_rank = defaultdict(list)
    for span in result.spans:
        by_rank[placement.rank_of(span.op.stage)].append(span)
        stage, kind, n = span.op
        before = {"F": Op(stage - 1, "F", n), "B": Op(stage + 1, "B", n), "W": Op(stage, "B", n)}[kind]
        if before in ends and kind != "W":
            assert span.start >= ends[before] + (
                0 if placement.rank_of(before.stage) == placement.rank_of(stage) else latency
            )
        elif before in ends:
            assert span.start >= ends[before]
    for spans in by_rank.values():
        assert all(later.start >= earlier.end for earlier, later in pairwise(spans))
    assert max(result.peak) <= window
