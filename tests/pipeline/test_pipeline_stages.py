"""Stages against the sequential law, bit for bit, in one process under an adversary's clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stages import KINDS, Numbered, Outcome, Task, in_stages, make_task, sequentially

from weft.engine.optimizer import Optimizer
from weft.errors import NonFiniteError
from weft.pipeline.message import Message
from weft.pipeline.scheduler import SchedulePolicy
from weft.pipeline.stage import Stage
from weft.pipeline.worker import Worker
from weft.trainer.batches import MicroBatches

quiet = settings(deadline=None, suppress_health_check=list(HealthCheck))

OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: Optimizer("sgd", lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda: Optimizer("adamw", lr=1e-2, weight_decay=0.1),
}


def assert_same(whole: Outcome, parts: Outcome) -> None:
    assert whole.losses == parts.losses
    assert whole.layers.keys() == parts.layers.keys()
    assert [name for name in whole.layers if whole.layers[name] != parts.layers[name]] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_number_of_stages_gives_the_bits_of_one(kind: str, m: int, optimizer: str) -> None:
    shared = {
        "stem": "delayed(2)",
        "head": "lagged(2)",
        "embed": "lagged(2)",
        "norm": "delayed(1)",
        "begin": "lagged(3)",
    }
    chain = KINDS[kind][0]()
    shared = {name: consistency for name, consistency in shared.items() if name in chain.layers}
    task = make_task(kind, m=m, consistency=shared, optimizer=OPTIMIZERS[optimizer](), clip=1.0)
    whole, blocks = sequentially(task), len(chain.blocks)
    for cut in ((), (2,), (1, blocks - 1), tuple(range(1, blocks))):
        for seed in (0, 1):
            assert_same(whole, in_stages(task, cut, 2 * len(cut) + 2, seed)[0])


@pytest.mark.parametrize("after", [1, 20])
def test_a_run_that_is_told_to_stop_ends_on_every_stage_at_the_same_whole_step(after: int) -> None:
    task = make_task("text", steps=12, m=2)
    stopped, _ = in_stages(task, (1, 2, 3), 4, after, stop_after=after)
    assert 0 < stopped.steps < 12
    assert_same(in_stages(task, (1, 2, 3), 4, until=stopped.steps)[0], stopped)


def test_the_comparison_can_fail() -> None:
    exact, late = make_task("text"), make_task("text", consistency="delayed(1)")
    assert sequentially(exact).layers["out"] != in_stages(late, (2,), 4)[0].layers["out"]


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


@settings(quiet, max_examples=80)
@given(cases())
def test_any_mixture_cut_window_and_timing_gives_the_bits_of_one_stage(
    case: tuple[Task, tuple[int, ...], int, int],
) -> None:
    task, cut, window, seed = case
    assert_same(sequentially(task), in_stages(task, cut, window, seed)[0])


@settings(quiet, max_examples=40)
@given(cases())
def test_a_backward_that_is_split_gives_the_same_bits(case: tuple[Task, tuple[int, ...], int, int]) -> None:
    task, cut, window, seed = case
    assert_same(sequentially(task), in_stages(task, cut, window, seed, split=True)[0])


@pytest.mark.long
@settings(quiet, max_examples=5000)
@given(cases())
def test_any_mixture_gives_the_bits_of_one_stage_for_thousands_of_cases(
    case: tuple[Task, tuple[int, ...], int, int],
) -> None:
    task, cut, window, seed = case
    assert_same(sequentially(task), in_stages(task, cut, window, seed)[0])


def joined(snapshots: list[Any], at: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors: dict[str, torch.Tensor] = {}
    layers: dict[str, Any] = {}
    for snapshot in snapshots:
        if snapshot.at == at:
            tensors |= snapshot.tensors
            layers |= snapshot.layers
    return tensors, layers


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
    saved = joined(snapshots, step * m)
    assert saved[1].keys() == whole.layers.keys()
    resumed, _ = in_stages(task, other, window, seed + 1, saved=saved, first_step=step)
    assert resumed.layers == whole.layers
    assert resumed.losses == whole.losses[step * m :]


resumes = given(cases(), st.integers(1, 3), st.integers(0, 10), st.data())


@settings(quiet, max_examples=60)
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


def test_never_more_in_flight_than_the_window() -> None:
    task = make_task("convolutional", steps=12, m=2)
    for window in (1, 2, 5):
        assert in_stages(task, (1, 3), window, seed=3)[0].most_in_flight <= window


def nan_in_step(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = torch.nn.functional.cross_entropy(outputs.flatten(0, -2), batch["label"].flatten())
    return loss * torch.where(batch["x"].flatten()[0] > 1.0, float("nan"), 1.0)


def test_a_loss_that_is_not_a_number_leaves_no_trace_where_it_is_skipped() -> None:
    from dataclasses import replace

    task = make_task("convolutional", steps=10, on_nonfinite="skip")
    task = replace(task, config=replace(task.config, loss=nan_in_step))
    whole = sequentially(task)
    assert any(loss != loss for loss in whole.losses)
    assert any(loss == loss for loss in whole.losses)
    parts, _ = in_stages(task, (2, 4), 5, 1)
    assert parts.layers == whole.layers
    assert [repr(loss) for loss in parts.losses] == [repr(loss) for loss in whole.losses]


def test_a_loss_that_is_not_a_number_stops_and_names_the_function() -> None:
    from dataclasses import replace

    task = make_task("convolutional", steps=10)
    task = replace(task, config=replace(task.config, loss=nan_in_step))
    with pytest.raises(NonFiniteError, match=r"micro-batch 0, subnet .*: it first appears in the loss function"):
        in_stages(task, (2, 4), 5, 1)


def test_a_version_stays_for_a_checkpoint_although_every_micro_batch_that_read_it_is_through() -> None:
    # The gradient of micro-batch 0 comes last, and with it five updates at once. A run that goes on from step 2 reads
    # version 0 again in the steps 2, 3 and 4.
    task = make_task("text", steps=6, consistency={"embed": "delayed(4)"})
    sent: list[Message] = []
    stage = Stage(task.chain(), task.config, torch.device("cpu"), (1,), 0)
    stage.train_mode()
    batches = MicroBatches(Numbered(task), 0, 6, 1)  # type: ignore[arg-type]
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
    assert [(snapshot.at, snapshot.layers["embed"]["kept"]) for snapshot in snapshots] == [
        (2, [0, 1]),
        (4, [0, 1]),
    ]
