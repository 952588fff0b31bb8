"""Stages against the reference, bit for bit, in one process under an adversary's clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stages import CPU, KINDS, Numbered, Outcome, Task, in_stages, make_task, saved_at, sequentially

from weft.data import MicroBatches
from weft.engine.consistency import Bounded, Exact, Stashed, version_schedule
from weft.engine.optimizer import Optimizer
from weft.pipeline.message import Message
from weft.pipeline.scheduler import SchedulePolicy
from weft.pipeline.stage import Stage
from weft.pipeline.worker import Worker
from weft.pipeline.workload import common_bounded, in_flight_limits, single_copy, virtual_cut

quiet = settings(suppress_health_check=list(HealthCheck))

OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: Optimizer("sgd", lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda: Optimizer("adamw", lr=1e-2, weight_decay=0.1),
}


def assert_same(whole: Outcome, parts: Outcome) -> None:
    assert whole.losses == parts.losses
    assert whole.layers.keys() == parts.layers.keys()
    assert [name for name in whole.layers if whole.layers[name] != parts.layers[name]] == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_stages_gives_the_bits_of_one(kind: str) -> None:
    chain = KINDS[kind][0]()
    wanted = {"stem": "delayed(2)", "head": "lagged(2)", "embed": "lagged(2)", "begin": "lagged(3)"}
    shared = {name: consistency for name, consistency in wanted.items() if name in chain.layers}
    task = make_task(kind, m=2, consistency=shared, optimizer=OPTIMIZERS["adamw"](), clip=1.0)
    whole, blocks = sequentially(task), len(chain.blocks)
    for cut in ((), (2,), (1, blocks - 1), tuple(range(1, blocks))):
        assert_same(whole, in_stages(task, cut, 2 * len(cut) + 2, len(cut))[0])


@pytest.mark.parametrize("after", [1, 20])
def test_a_run_that_is_told_to_stop_ends_on_every_stage_at_the_same_whole_step(after: int) -> None:
    task = make_task("text", steps=12, m=2)
    stopped, _ = in_stages(task, (1, 2, 3), 4, after, stop_after=after)
    assert 0 < stopped.steps < 12
    assert_same(in_stages(task, (1, 2, 3), 4, until=stopped.steps)[0], stopped)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Task, tuple[int, ...], int, int]:
    kind = draw(st.sampled_from(sorted(KINDS)))
    m = draw(st.sampled_from([1, 2, 4]))
    chain = KINDS[kind][0]()
    blocks = len(chain.blocks)
    every = st.integers(1, 3).map(lambda k: k * m)
    consistency = st.one_of(
        st.just("exact"),
        st.integers(0, 4).map(lambda d: f"delayed({d})"),
        st.integers(1, 4).map(lambda k: f"lagged({k})"),
        st.tuples(every, st.integers(1, blocks)).map(lambda pair: f"bounded({pair[0]}, {pair[1]})"),
        st.tuples(every, st.integers(1, blocks)).map(lambda pair: f"stashed({pair[0]}, {pair[1]})"),
    )
    # Bounded layers of one chain share K and depth, as the table means them.
    consistencies = {name: draw(consistency) for name in chain.layers}
    task = make_task(
        kind,
        steps=draw(st.integers(1, 7)),
        m=m,
        consistency=consistencies,
        optimizer=OPTIMIZERS[draw(st.sampled_from(sorted(OPTIMIZERS)))](),
        stream=draw(st.sampled_from(["iid", "fair"])),
        seed=draw(st.integers(0, 3)),
        clip=draw(st.sampled_from([None, 0.5])),
        precision=draw(st.sampled_from(["fp32", "fp32", "bf16"])),
    )
    cut = tuple(sorted(draw(st.sets(st.integers(1, blocks - 1), max_size=blocks - 1))))
    return task, cut, draw(st.integers(1, 9)), draw(st.integers(0, 2**32 - 1))


@settings(quiet, max_examples=50)
@given(cases(), st.booleans())
def test_any_mixture_cut_window_and_timing_gives_the_bits_of_one_stage(
    case: tuple[Task, tuple[int, ...], int, int], split: bool
) -> None:
    task, cut, window, seed = case
    assert_same(sequentially(task), in_stages(task, cut, window, seed, split=split)[0])


@pytest.mark.long
@settings(quiet, max_examples=5000)
@given(cases())
def test_any_mixture_gives_the_bits_of_one_stage_for_thousands_of_cases(
    case: tuple[Task, tuple[int, ...], int, int],
) -> None:
    task, cut, window, seed = case
    assert_same(sequentially(task), in_stages(task, cut, window, seed)[0])


def resumed_elsewhere(
    case: tuple[Task, tuple[int, ...], int, int], every: int, which: int, data: st.DataObject
) -> None:
    """A run with checkpoints, and one that goes on from one of them with another cut: both have the bits of one."""
    task, cut, window, seed = case
    whole = sequentially(task)
    running, snapshots = in_stages(task, cut, window, seed, every=every)
    assert_same(whole, running)
    m = task.config.microbatches
    points = list(range(every, task.config.steps, every))
    assert {snapshot.at for snapshot in snapshots} >= {step * m for step in points}
    if not points:
        return
    step = points[which % len(points)]
    blocks = len(task.chain().blocks)
    other = tuple(sorted(data.draw(st.sets(st.integers(1, blocks - 1), max_size=blocks - 1))))
    saved = saved_at(snapshots, step * m)
    assert saved[1].keys() == whole.layers.keys()
    resumed, _ = in_stages(task, other, window, seed + 1, saved=saved, first_step=step)
    assert resumed.layers == whole.layers
    assert resumed.losses == whole.losses[step * m :]


resumes = given(cases(), st.integers(1, 3), st.integers(0, 10), st.data())


@settings(quiet, max_examples=20)
@resumes
def test_a_checkpoint_taken_in_flight_goes_on_with_the_same_bits_on_any_other_cut(
    case: tuple[Task, tuple[int, ...], int, int], every: int, which: int, data: st.DataObject
) -> None:
    resumed_elsewhere(case, every, which, data)


@pytest.mark.long
@settings(quiet, max_examples=3000)
@resumes
def test_a_checkpoint_goes_on_with_the_same_bits_for_thousands_of_cases(
    case: tuple[Task, tuple[int, ...], int, int], every: int, which: int, data: st.DataObject
) -> None:
    resumed_elsewhere(case, every, which, data)


def nan_in_step(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = torch.nn.functional.cross_entropy(outputs.flatten(0, -2), batch["label"].flatten())
    return loss * torch.where(batch["x"].flatten()[0] > 1.0, float("nan"), 1.0)


def test_a_loss_that_is_not_a_number_leaves_no_trace_where_it_is_skipped() -> None:
    task = make_task("convolutional", steps=10, on_nonfinite="skip")
    task = replace(task, config=replace(task.config, loss=nan_in_step))
    whole = sequentially(task)
    assert any(loss != loss for loss in whole.losses)
    assert any(loss == loss for loss in whole.losses)
    parts, _ = in_stages(task, (2, 4), 5, 1)
    assert parts.layers == whole.layers
    assert [repr(loss) for loss in parts.losses] == [repr(loss) for loss in whole.losses]


def test_a_version_stays_for_a_checkpoint_although_every_micro_batch_that_read_it_is_through() -> None:
    # The gradient of micro-batch 0 comes last, and with it five updates at once. A run that goes on from step 2 reads
    # version 0 again in the steps 2, 3 and 4.
    task = make_task("text", steps=6, consistency={"embed": "delayed(4)"})
    sent: list[Message] = []
    stage = Stage(task.chain(), task.config, CPU, (1,), 0)
    stage.train_mode()
    batches = MicroBatches(Numbered(task), 0, 6, 1, task.config.parts)  # type: ignore[arg-type]
    worker = Worker(stage, SchedulePolicy(9), 0, 6, batches, lambda to, message: sent.append(message), every=2)
    while worker.work() is not None:
        pass
    assert [message.microbatch for message in sent] == [0, 1, 2, 3, 4]
    report = torch.tensor([0.5, 1.0, 0.0, 1.0], dtype=torch.float64)
    snapshots = []
    for n in (1, 2, 3, 4, 0):
        output = sent[n].tensors[0]
        assert output is not None
        worker.receive(Message("B", n, (torch.ones_like(output),), (), report))
        while (done := worker.work()) is not None:
            snapshots += done.snapshots
    assert [(snapshot.at, snapshot.layers["embed"]["kept"]) for snapshot in snapshots] == [(2, [0, 1]), (4, [0, 1])]


# Asynchronous pipelines: one copy of the weights where the real pipeline is the virtual one, and the same bits at


BLOCKS = 6


def test_the_virtual_cut_lies_where_the_windows_change() -> None:
    for blocks in range(1, 12):
        for depth in range(1, blocks + 1):
            at = [version_schedule(Bounded(1, depth), block, blocks, 1, 1).window for block in range(blocks)]
            changes = tuple(block for block in range(1, blocks) if at[block] != at[block - 1])
            assert virtual_cut(depth, blocks) == changes


def test_one_copy_is_enough_only_where_the_pipeline_is_the_virtual_one() -> None:
    bounded = Bounded(4, 3)
    assert single_copy([bounded] * 5, (2, 4), 6)
    assert not single_copy([bounded] * 5, (2, 3), 6)  # another cut
    assert not single_copy([bounded] * 5, (3,), 6)  # fewer stages
    assert not single_copy([bounded, Exact()], (2, 4), 6)
    assert not single_copy([Stashed(4, 3)], (2, 4), 6)
    assert common_bounded([bounded, Bounded(8, 3)]) is None
    assert in_flight_limits(3, True, None) == [3, 2, 1]
    assert in_flight_limits(3, False, None) == [6, 6, 6]
    assert in_flight_limits(3, True, 4) == [4, 4, 4]


def formula(block: int, every: int, depth: int, total: int) -> dict[int, int]:
    """How often each version lag comes up, from the closed form: update counts before forward and backward."""
    window = depth - block * depth // BLOCKS
    if window == 1:
        return {}
    found: dict[int, int] = {}
    for n in range(total):
        lag = n // every - max(n + 1 - window, 0) // every
        found[lag] = found.get(lag, 0) + 1
    return found


@settings(quiet, max_examples=25)
@given(
    depth=st.integers(2, 6),
    every=st.integers(1, 5),
    m=st.sampled_from([1, 2]),
    steps=st.integers(1, 14),
    seed=st.integers(0, 2**32 - 1),
    precision=st.sampled_from(["fp32", "bf16"]),
)
def test_a_pipeline_of_that_depth_keeps_one_copy_and_has_the_bits_of_one_device(
    depth: int, every: int, m: int, steps: int, seed: int, precision: str
) -> None:
    task = make_task("plain", steps=steps, m=m, consistency=f"bounded({every * m}, {depth})", precision=precision)
    found, _ = in_stages(task, virtual_cut(depth, BLOCKS), in_flight_limits(depth, True, None), seed)
    alone = sequentially(task)
    assert found.layers == alone.layers
    assert found.losses == alone.losses
    assert found.most_kept == 0
    assert all(peak <= depth - stage for stage, peak in enumerate(found.in_flight))
    for block, layer in enumerate(task.chain().layers):
        assert found.version_lags[layer] == formula(block, every * m, depth, steps * m), layer


def test_the_version_lag_of_three_stages_is_that_of_the_formula_by_hand() -> None:
    """Three stages, an update every 2 micro-batches, eight of them: the first stage sees 0 0 0 0 1 1 2 2, L = 3."""
    task = make_task("plain", steps=8, consistency="bounded(2, 3)")
    found, _ = in_stages(task, (2, 4), [3, 2, 1], 5)
    #  n           0 1 2 3 4 5 6 7        backward reads 0 0 1 1 2 2 3 3
    #  stage 0     0 0 0 0 1 1 2 2        lag            0 0 1 1 1 1 1 1
    #  stage 1     0 0 0 1 1 2 2 3        lag            0 0 1 0 1 0 1 0
    assert found.version_lags["embed"] == {0: 2, 1: 6}
    assert found.version_lags["layer1"] == {0: 5, 1: 3}
    assert found.version_lags["out"] == {}  # the last stage has none


def test_a_window_too_small_for_one_copy_keeps_versions_instead_of_waiting_for_ever() -> None:
    task = make_task("plain", steps=8, consistency="bounded(1, 3)")
    found, _ = in_stages(task, (2, 4), 1, 3)
    assert found.layers == sequentially(task).layers
    assert found.most_kept > 0


@settings(quiet, max_examples=20)
@given(
    depth=st.integers(2, 6), every=st.sampled_from([2, 4, 6]), until=st.integers(1, 11), seed=st.integers(0, 2**32 - 1)
)
def test_one_copy_can_be_drained_in_the_middle_of_an_update(depth: int, every: int, until: int, seed: int) -> None:
    """Forwards that are to read an old version come after the drain: then it is kept for them."""
    task = make_task("plain", steps=12, m=2, consistency=f"bounded({every}, {depth})")
    found, _ = in_stages(task, virtual_cut(depth, BLOCKS), in_flight_limits(depth, True, None), seed, until=until)
    assert_same(sequentially(task, until), found)
