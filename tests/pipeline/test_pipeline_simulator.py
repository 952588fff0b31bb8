"""The simulator against schedules that can be drawn or computed by hand, and the figures of the design."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data import digits
from weft.pipeline.bound import lower_bound
from weft.pipeline.consistency import Consistency, Exact, parse
from weft.pipeline.cut import best_cut
from weft.pipeline.profile import profile_chain
from weft.pipeline.scheduler import Rule
from weft.pipeline.simulator import Simulated, jitter, simulate
from weft.pipeline.workload import Workload, chain_workload
from weft.space import Space, make_stream
from weft.supernet import initialise
from weft.zoo import digits_conv


def shared(blocks: int, m: int, steps: int, consistency: str = "exact") -> Workload:
    """A plain network: every micro-batch uses every layer."""
    return Workload(blocks, m, steps, lambda n: [(b, b) for b in range(blocks)], lambda layer: parse(consistency))


def spaced(blocks: int, choices: int, stream: str, steps: int, m: int = 1) -> Workload:
    space = Space()
    for block in range(blocks):
        space.categorical(f"b{block}", [f"c{choice}" for choice in range(choices)])
    steps_of = make_stream(space, stream, 0)

    def picks(n: int) -> list[tuple[int, Hashable]]:
        return [(b, (b, choice)) for b, choice in enumerate(steps_of[n // m][0].values.values())]

    def promised(layer: Hashable) -> Consistency:
        return Exact()

    return Workload(blocks, m, steps, picks, promised)


def on(work: Workload, stages: int, **options: object) -> Simulated:
    return simulate(work, best_cut(work.expected_costs(), stages), Rule(2 * stages), **options)  # type: ignore[arg-type]


def test_two_stages_one_flush_drawn_by_hand() -> None:
    # stage 0: F0 F1 .  B0 B0 B1 B1          forward 1, backward 2, two micro-batches of one step
    # stage 1: .  F0 B0 B0 F1 B1 B1
    # With backward first, stage 1 goes back through 0 before it looks at 1; stage 0 waits for it.
    result = on(shared(2, m=2, steps=1), 2)
    spans = {str(span.op): (span.start, span.end) for span in result.spans}
    assert spans["0F0"] == (0, 1)
    assert spans["0F1"] == (1, 2)
    assert spans["1F0"] == (1, 2)
    assert spans["1B0"] == (2, 4)
    assert spans["1F1"] == (4, 5)
    assert spans["0B0"] == (4, 6)
    assert spans["1B1"] == (5, 7)
    assert spans["0B1"] == (7, 9)
    assert result.time == 9


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [1, 4, 8])
def test_layers_that_all_steps_share_exactly_cost_the_bubble_of_a_flush(stages: int, m: int) -> None:
    """Every step is a pipeline of its own: m + S - 1 turns of forward and backward for the work of m."""
    result = simulate(shared(8, m, steps=5), best_cut([1.0] * 8, stages), Rule(stages + m, "forward"))
    assert result.bubble == pytest.approx((stages - 1) / (m + stages - 1))


def test_one_device_never_waits() -> None:
    result = on(spaced(6, 3, "iid", 30), 1)
    assert result.bubble == 0
    assert result.speedup == 1
    assert result.peak == (1,)


def test_subnets_that_share_nothing_fill_the_pipeline() -> None:
    work = spaced(16, 24, "spaced", 200)
    result = on(work, 8)
    assert result.steady_bubble < 0.01
    assert result.bubble < 0.05
    assert on(spaced(16, 24, "iid", 200), 8).bubble > 0.5


@pytest.mark.parametrize(("stages", "least"), [(8, 0.017), (16, 0.036)])
def test_a_spaced_stream_costs_no_more_than_filling_and_draining(stages: int, least: float) -> None:
    """The figures of the design: 400 subnets of NLP.c1, 48 blocks of 72 choices, forward 1 and backward 2."""
    assert on(spaced(48, 72, "spaced", 400), stages, keep_spans=False).bubble == pytest.approx(least, abs=0.002)


def test_shared_layers_that_lag_do_not_stall_and_exact_ones_do() -> None:
    stalled = on(shared(8, 1, 200), 4)
    lagging = on(shared(8, 1, 200, "lagged(8)"), 4)
    delayed = on(shared(8, 1, 200, "delayed(8)"), 4)
    assert stalled.steady_bubble == pytest.approx(0.75)
    assert lagging.steady_bubble < 0.02
    assert delayed.steady_bubble < 0.02


def test_messages_take_their_time() -> None:
    quick, slow = on(shared(2, 1, 3), 2), on(shared(2, 1, 3), 2, latency=0.5)
    assert slow.time == quick.time + 3 * 2 * 0.5


def test_jitter_belongs_to_the_operation_and_the_seed() -> None:
    work = spaced(8, 6, "spaced", 50)
    found = [on(work, 4, duration=jitter(seed, 0.25)).time for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 6), st.sampled_from(["iid", "fair"]), st.integers(0, 3))
def test_every_operation_is_simulated_once_and_time_adds_up(
    stages: int, m: int, steps: int, stream: str, seed: int
) -> None:
    work = spaced(5, 3, stream, steps, m)
    result = on(work, stages, duration=jitter(seed, 0.5))
    assert sorted(span.op for span in result.spans) == sorted({span.op for span in result.spans})
    assert len(result.spans) == 2 * stages * m * steps
    for stage in range(stages):
        own = sorted((span.start, span.end) for span in result.spans if span.op.stage == stage)
        assert all(before[1] <= after[0] for before, after in pairwise(own))
        assert sum(end - start for start, end in own) == pytest.approx(result.busy[stage])
        assert result.peak[stage] <= 2 * stages
    assert 0 <= result.bubble < 1


def test_a_real_chain_is_profiled_and_simulated() -> None:
    chain = initialise(digits_conv)
    batch = {"image": digits().train.take(range(8))["image"]}  # type: ignore[arg-type]
    costs = profile_chain(chain, batch, repeats=1)
    assert set(costs) == set(chain.layers)
    assert all(forward > 0 and backward > 0 for forward, backward in costs.values())
    promised: dict[str, Consistency] = {name: parse("lagged(4)") for name in chain.layers}
    work = chain_workload(chain, make_stream(chain.space, "iid", 0), promised, 1, 20, dict(costs))
    result = on(work, 3)
    assert len(result.spans) == 2 * 3 * 20
    everything = sum(sum(costs[name]) for n in range(20) for _, name in work.picks(n))
    assert sum(result.busy) == pytest.approx(everything)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 8),
    st.sampled_from(["exact", "delayed(2)", "lagged(2)"]),
    st.sampled_from([0.0, 0.5]),
)
def test_no_schedule_is_faster_than_the_bound(stages: int, m: int, steps: int, told: str, latency: float) -> None:
    for work in (shared(5, m, steps, told), spaced(5, 3, "iid", steps, m)):
        cut = best_cut([1.0] * 5, stages)
        result = simulate(work, cut, Rule(100), latency)
        assert result.time >= lower_bound(work, cut, latency) - 1e-9


def test_the_bound_is_reached_where_nothing_can_be_better() -> None:
    """Strictly one after the other: every step waits for the one before. And one stage: nothing ever waits."""
    stalled = shared(4, 1, 10)
    assert on(stalled, 4).time == lower_bound(stalled, best_cut([1.0] * 4, 4)) == 10 * 4 * 3
    alone = spaced(4, 3, "iid", 10)
    assert on(alone, 1).time == lower_bound(alone, ()) == 10 * 4 * 3
