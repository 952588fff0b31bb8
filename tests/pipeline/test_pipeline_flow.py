"""Validation that flows between micro-batches: its scores belong to the law, and it disturbs nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stages import CPU, KINDS, Batch, Task, in_stages, make_task, sequentially

from weft.pipeline import Sequential
from weft.pipeline.evaluate import Scores
from weft.pipeline.flow import Flow, through

quiet = settings(deadline=None, suppress_health_check=list(HealthCheck))


def held(number: int) -> Batch:
    return KINDS["plain"][1](1000 + number)


def alone(task: Task, every: int, count: int) -> list[tuple[int, dict[str, float]]]:
    """The scores of one device: before micro-batch n, with every layer as the forward of n sees it."""
    run = Sequential(task.chain(), task.law, task.stream, CPU)
    run.train_mode()
    m, found = task.law.microbatches, []
    for step in range(task.law.steps):
        if step and step % every == 0:
            subnet = run.chain.space.subnet() if not run.chain.space.choices else run.chain.largest()
            scores = Scores(task.law.loss, task.law.metrics)
            for number in range(count):
                batch = held(number)
                with torch.no_grad(), run.precision():
                    carry = run.chain.enter(batch)
                    out = through(run.weights, run.chain.route(subnet), step * m, carry, batch, subnet)
                    scores.add(out[0], batch)
            found.append((step * m, scores.means()))
        run.step(step, task.batch(step))
    return found


def test_which_batches_go_before_which_micro_batch() -> None:
    flow = Flow(span=4, picks=2, batches=3, total=12)
    assert [n for n in range(14) if flow.due(n)] == [4, 8]  # after the last step there is nothing to flow past
    assert list(flow.due(4)) == [0, 1, 2, 3, 4, 5]
    assert list(flow.due(8)) == [6, 7, 8, 9, 10, 11]
    assert [flow.at(number) for number in (0, 5, 6, 11)] == [4, 4, 8, 8]
    assert [flow.before(n) for n in (0, 3, 4, 7, 8, 11, 12)] == [0, 0, 6, 6, 12, 12, 12]


@settings(quiet, max_examples=40)
@given(
    kind=st.sampled_from(["plain", "text"]),
    promise=st.sampled_from(["exact", "bounded(2, 3)", "bounded(2, 5)", "stashed(2, 3)", "delayed(2)", "lagged(2)"]),
    m=st.sampled_from([1, 2]),
    every=st.integers(1, 4),
    cut=st.sets(st.integers(1, 4), max_size=4).map(lambda cut: tuple(sorted(cut))),
    window=st.integers(1, 6),
    precision=st.sampled_from(["fp32", "bf16"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_scores_and_weights_are_those_of_one_device_at_any_cut_and_timing(
    kind: str, promise: str, m: int, every: int, cut: tuple[int, ...], window: int, precision: str, seed: int
) -> None:
    task = make_task(kind, steps=9, m=m, consistency=promise, precision=precision)
    chain = task.chain()
    pick = chain.largest() if chain.space.choices else chain.space.subnet()
    found, _ = in_stages(task, cut, window, seed, evaluated=(every, {"largest": pick}, held, 3))
    assert [(n, scores) for n, _, _, scores in found.scores] == alone(task, every, 3)
    assert found.layers == sequentially(task).layers


def test_several_picks_are_scored_in_turn() -> None:
    task = make_task("text", steps=6)
    chain = task.chain()
    picks = {"largest": chain.largest(), "smallest": chain.smallest()}
    found, _ = in_stages(task, (2, 4), 4, 1, evaluated=(2, picks, held, 2))
    assert [(n, name) for n, name, _, _ in found.scores] == [
        (2, "largest"),
        (2, "smallest"),
        (4, "largest"),
        (4, "smallest"),
    ]
    only, _ = in_stages(task, (), 4, 1, evaluated=(2, {"smallest": picks["smallest"]}, held, 2))
    assert [scores for _, name, _, scores in found.scores if name == "smallest"] == [s for *_, s in only.scores]


def test_one_copy_stays_one_copy_with_validation_that_flows() -> None:
    task = make_task("plain", steps=12, consistency="bounded(3, 3)")
    picks = {"only": task.chain().space.subnet()}
    found, _ = in_stages(task, (2, 4), [3, 2, 1], 7, evaluated=(2, picks, held, 4))
    assert found.most_kept == 0
    assert found.layers == sequentially(task).layers
    assert [(n, scores) for n, _, _, scores in found.scores] == alone(task, 2, 4)


@pytest.mark.parametrize("at", [1, 2])
def test_a_run_that_goes_on_scores_what_is_still_to_come(at: int) -> None:
    task = make_task("plain", steps=12, consistency="bounded(2, 3)")
    picks = {"only": task.chain().space.subnet()}
    whole, snapshots = in_stages(task, (2, 4), [3, 2, 1], 3, every=4, evaluated=(2, picks, held, 2))
    own = [snapshot for snapshot in snapshots if snapshot.at == 4 * at]
    saved = (
        {name: tensor for snapshot in own for name, tensor in snapshot.tensors.items()},
        {name: told for snapshot in own for name, told in snapshot.layers.items()},
    )
    rest, _ = in_stages(task, (1,), 5, 4, saved=saved, first_step=4 * at, evaluated=(2, picks, held, 2))
    assert rest.scores == [score for score in whole.scores if score[0] > 4 * at]
    assert rest.layers == whole.layers
