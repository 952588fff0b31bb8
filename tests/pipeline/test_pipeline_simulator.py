"""The simulator against schedules that can be drawn or computed by hand, and the figures of the design."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from weft.data import digits
from weft.engine.consistency import Consistency, Exact, parse_consistency
from weft.errors import ConsistencyError
from weft.pipeline.profiler import message_bytes, profile_chain
from weft.pipeline.scheduler import Op, SchedulePolicy
from weft.pipeline.simulator import Simulated, Span, jitter, simulate
from weft.pipeline.workload import Workload, chain_workload
from weft.space import Space, make_stream
from weft.supernet import Chain, Shared, initialise
from weft.supernet.partition import best_cut
from weft.zoo import digits_conv


def shared(blocks: int, m: int, steps: int, consistency: str = "exact") -> Workload:
    """A plain network: every micro-batch uses every layer."""
    return Workload(
        blocks, m, steps, lambda n: [(b, b) for b in range(blocks)], lambda layer: parse_consistency(consistency)
    )


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
    return simulate(work, best_cut(work.expected_costs(), stages), SchedulePolicy(2 * stages), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("picture", "m", "steps", "options"),
    [
        pytest.param(
            # stage 0: F0 F1 .  B0 B0 B1 B1          forward 1, backward 2, two micro-batches of one step
            # stage 1: .  F0 B0 B0 F1 B1 B1
            # With backward first, stage 1 goes back through 0 before it looks at 1; stage 0 waits for it.
            "0F0 0-1, 0F1 1-2, 1F0 1-2, 1B0 2-4, 1F1 4-5, 0B0 4-6, 1B1 5-7, 0B1 7-9",
            *(2, 1, {}),
            id="two stages, one flush",
        ),
        pytest.param(
            # stage 0: F0 F1 .  .  .  B0 B0 B1 B1    F1 arrives on stage 1 when F0 ends there: GPipe does it first
            # stage 1: .  F0 F1 B0 B0 B1 B1
            "0F0 0-1, 0F1 1-2, 1F0 1-2, 1F1 2-3, 1B0 3-5, 1B1 5-7, 0B0 5-7, 0B1 7-9",
            *(2, 1, {"schedule": "gpipe"}),
            id="what arrives at the moment of a choice can be chosen",
        ),
        pytest.param(
            # Eight bytes at two a unit take the link 4, and arrive 0.5 after that.
            # forward link:   [1 - 5) of 0, then [5 - 9) of 1      backward link: [8.5 - 12.5) of 0, [12.5 - 16.5) of 1
            "0F0 0-1, 0F1 1-2, 1F0 5.5-6.5, 1B0 6.5-8.5, 1F1 9.5-10.5, 1B1 10.5-12.5, 0B0 13-15, 0B1 17-19",
            *(2, 1, {"latency": 0.5, "bandwidth": 2.0}),
            id="messages queue on their link, and the two directions do not meet",
        ),
        pytest.param(
            # stage 0: F0 .  .  b0 b0 F1 .  .  b1 b1     half of a backward finds the gradient of the input
            # stage 1: .  F0 b0 b0 .  .  F1 b1 b1 .      F1 uses the same layer: not before B0 is at its end
            "0F0 0-1, 1F0 1-2, 1B0 2-4, 0B0 3-5, 0F1 5-6, 1F1 6-7, 1B1 7-9, 0B1 8-10",
            *(1, 2, {"split": 0.5}),
            id="a split backward sends its message early, and its updates count at its end",
        ),
        pytest.param(
            *("0F0 0-1, 1F0 1-3, 1B0 3-7, 0B0 7-9", 1, 1, {"speeds": [1.0, 0.5]}),
            id="a slow stage takes longer for the same work",
        ),
    ],
)
def test_two_stages_drawn_by_hand(picture: str, m: int, steps: int, options: dict[str, Any]) -> None:
    schedule = options.pop("schedule", "1f1b")
    result = simulate(replace(shared(2, m, steps), sizes=[0.0, 8.0]), (1,), SchedulePolicy(4, schedule), **options)
    assert {f"{span.op} {span.start:g}-{span.end:g}" for span in result.spans} == set(picture.split(", "))
    assert result.time == max(span.end for span in result.spans)
    assert result.work == 6 * m * steps
    assert result.speedup == pytest.approx(result.work / result.time)
    assert result.bubble == pytest.approx(1 - sum(result.busy) / (2 * result.time))


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [1, 4, 8])
def test_layers_that_all_steps_share_exactly_cost_the_bubble_of_a_flush(stages: int, m: int) -> None:
    """Every step is a pipeline of its own: m + S - 1 turns of forward and backward for the work of m."""
    result = simulate(shared(8, m, steps=5), best_cut([1.0] * 8, stages), SchedulePolicy(stages + m, "gpipe"))
    assert result.bubble == pytest.approx((stages - 1) / (m + stages - 1))


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.sampled_from([1.0, 0.1, 0.3, 1 / 3, 1e-3]))
def test_forwards_first_is_gpipe_whatever_the_costs_round_to(stages: int, m: int, steps: int, cost: float) -> None:
    work = replace(shared(stages, m, steps), costs=dict.fromkeys(range(stages), (cost, 2 * cost)))
    result = simulate(work, tuple(range(1, stages)), SchedulePolicy(stages + m, "gpipe"), latency=0.7 * cost)
    for stage in range(stages):
        order = [span.op for span in result.spans if span.op.stage == stage]
        for step in range(steps):
            own = [op.kind for op in order if op.microbatch // m == step]
            assert own == ["F"] * m + ["B"] * m


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"speeds": [1.0]}, "2 stages need 2 speeds"),
        ({"speeds": [1.0, 0.0]}, "each more than 0"),
        ({"split": 0.0}, "above 0 and at most 1"),
        ({"split": 1.5}, "above 0 and at most 1"),
        ({"bandwidth": 1.0}, "give the workload its sizes"),
        ({"bandwidth": 0.0}, "more than 0"),
        ({"latency": -1.0}, "latency"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConsistencyError, match=told):
        simulate(shared(2, 1, 1), (1,), SchedulePolicy(4), **options)


def test_every_layer_reads_by_its_own_consistency() -> None:
    told = ["exact", "delayed(1)", "lagged(2)", "exact"]
    work = Workload(4, 1, 6, lambda n: list(enumerate(range(4))), lambda layer: parse_consistency(told[layer]))  # type: ignore[call-overload]
    assert work.dependencies_of((3,), 0)(5) == [(0, 5, 5, 5), (1, 5, 4, 4), (2, 2, 1, 1)]
    assert work.dependencies_of((3,), 1)(5) == [(3, 5, 5, 5)]
    frozen = replace(work, consistency=lambda layer: None if layer == 1 else Exact())
    assert [need.layer for need in frozen.dependencies_of((3,), 0)(5)] == [0, 2]
    assert frozen.stage_costs((3,), 5) == [(3, 6), (1, 2)]


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


def test_jitter_belongs_to_the_operation_and_the_seed() -> None:
    work = spaced(8, 6, "spaced", 50)
    found = [on(work, 4, duration=jitter(seed, 0.25)).time for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


MACHINES = st.fixed_dictionaries(
    {
        "latency": st.sampled_from([0.0, 0.4, 3.0]),
        "bandwidth": st.sampled_from([None, 1.0, 10.0]),
        "speeds": st.lists(st.sampled_from([0.5, 1.0, 1.5]), min_size=5, max_size=5),
        "split": st.sampled_from([None, 0.3, 0.5, 1.0]),
    }
)


def some(stages: int, m: int, steps: int, told: str, stream: str | None) -> Workload:
    """A plain network or a stream of subnets, with messages of different sizes."""
    work = shared(5, m, steps, told) if stream is None else spaced(5, 3, stream, steps, m)
    return replace(work, sizes=[1.0, 4.0, 0.0, 2.0, 3.0])


@settings(max_examples=150)
@given(
    stages=st.integers(1, 5),
    m=st.integers(1, 3),
    steps=st.integers(1, 6),
    told=st.sampled_from(["exact", "delayed(2)", "lagged(2)", "bounded(6, 2)"]),
    stream=st.sampled_from([None, "iid", "fair"]),
    max_in_flight=st.integers(1, 8),
    schedule=st.sampled_from(["1f1b", "gpipe", "naspipe"]),
    seed=st.integers(0, 3),
    machine=MACHINES,
)
def test_the_rules_hold_on_every_machine(
    stages: int,
    m: int,
    steps: int,
    told: str,
    stream: str | None,
    max_in_flight: int,
    schedule: str,
    seed: int,
    machine: dict[str, Any],
) -> None:
    work, cut = some(stages, m, steps, told, stream), best_cut([1.0] * 5, stages)
    machine = {**machine, "speeds": machine["speeds"][:stages]}
    vary = jitter(seed, 0.5) if seed else None
    result = simulate(work, cut, SchedulePolicy(max_in_flight, schedule), duration=vary, **machine)
    spans = {span.op: span for span in result.spans}

    # Every operation once, one at a time on a stage, no more in flight than the window, and time adds up.
    assert len(spans) == len(result.spans) == 2 * stages * m * steps
    assert result.time == pytest.approx(max(span.end for span in result.spans))
    for stage in range(stages):
        own = sorted((span.start, span.end) for span in result.spans if span.op.stage == stage)
        assert all(before[1] <= after[0] for before, after in pairwise(own))
        assert sum(end - start for start, end in own) == pytest.approx(result.busy[stage])
        assert 1 <= result.peak[stage] <= max_in_flight
    assert 0 <= result.bubble < 1
    if vary is None:
        assert result.work == pytest.approx(15 * m * steps)

    # No version is read before the updates that make it are applied, at the ends of whole backwards.
    for stage in range(stages):
        uses = work.dependencies_of(cut, stage)
        users: dict[Hashable, list[tuple[int, float]]] = defaultdict(list)
        for n in range(m * steps):
            for need in uses(n):
                users[need.layer].append((need.slot, _of(spans, stage, "B", n).end))
        for n in range(m * steps):
            for need in uses(n):
                for kind, version in (("F", need.forward), ("B", need.backward)):
                    start = _of(spans, stage, kind, n).start
                    assert all(end <= start for slot, end in users[need.layer] if slot < version)

    # No input is used before its message is through the link, behind those that were sent before it.
    early = machine["split"] or 1.0
    for link, size in enumerate(work.sizes[block] for block in cut):  # type: ignore[index]
        taken = size / machine["bandwidth"] if machine["bandwidth"] else 0.0
        for kind, sender, receiver in (("F", link, link + 1), ("B", link + 1, link)):
            free = 0.0
            for span in sorted((s for s in result.spans if s.op[:2] == (sender, kind)), key=lambda span: span.start):
                share = 1.0 if kind == "F" else early
                free = max(free, span.start + share * (span.end - span.start)) + taken
                used = _of(spans, receiver, kind, span.op.microbatch).start
                assert used >= (free + machine["latency"]) * (1 - 1e-8)


def _of(spans: dict[Op, Span], stage: int, kind: Any, microbatch: int) -> Span:
    return spans[Op(stage, kind, microbatch)]


def test_splitting_the_backward_shortens_the_round_trip_where_that_is_what_is_waited_for() -> None:
    whole, split = (on(spaced(16, 8, "iid", 100), 8, split=share) for share in (None, 0.5))
    assert whole.time / split.time > 1.2
    assert split.work == whole.work
    assert on(spaced(16, 8, "iid", 100), 8, split=1.0) == whole


def test_the_bytes_of_messages_are_those_that_enter_the_block() -> None:
    def build() -> Chain:
        return Chain(
            Shared(nn.Flatten, "flat"),
            Shared(lambda: nn.Linear(64, 16), "body"),
            Shared(lambda: nn.Linear(16, 10), "head"),
        )

    assert message_bytes(initialise(build), {"image": torch.zeros(8, 1, 8, 8)}) == [2048, 2048, 512]


def test_a_real_chain_is_profiled_and_simulated() -> None:
    chain = initialise(digits_conv)
    batch = {"image": digits().train.take(range(8))["image"]}  # type: ignore[arg-type]
    costs = profile_chain(chain, batch, repeats=1)
    assert set(costs) == set(chain.layers)
    assert all(forward > 0 and backward > 0 for forward, backward in costs.values())
    promised: dict[str, Consistency] = {name: parse_consistency("lagged(4)") for name in chain.layers}
    work = chain_workload(chain, make_stream(chain.space, "iid", 0), promised, 1, 20, dict(costs))
    result = on(work, 3)
    assert len(result.spans) == 2 * 3 * 20
    everything = sum(sum(costs[name]) for n in range(20) for _, name in work.picks(n))
    assert sum(result.busy) == pytest.approx(everything)
