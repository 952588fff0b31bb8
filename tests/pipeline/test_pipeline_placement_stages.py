"""Ranks with several stages stepped in one process under an adversary's clock: the bits of the sequential law."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stages import CPU, Numbered, Outcome, Task, in_stages, make_task, sequentially, through_bytes
from torch import Tensor

from weft.pipeline.batches import Batches
from weft.pipeline.crew import Crew
from weft.pipeline.message import Layout, Message, assemble, disassemble, handed
from weft.pipeline.placement import Placement
from weft.pipeline.scheduler import Rule
from weft.pipeline.stage import Stage
from weft.pipeline.state import layer_digest
from weft.pipeline.worker import Worker
from weft.plan.cut import Cut


def on_ranks(
    task: Task, cut: Cut, placement: Placement, window: int, seed: int = 0, stop_after: int | None = None
) -> tuple[Outcome, int]:
    """Steps the ranks in an order drawn from the seed; messages between them are late as they like, and those within
    one are handed over. The first stage is told to stop after so many operations of all. Also the steps done."""
    rng = random.Random(seed)
    m = task.law.microbatches
    links: dict[tuple[int, int], deque[Message]] = {}

    def sender(rank: int) -> Callable[[int, Message], None]:
        def send(stage: int, message: Message) -> None:
            to, told = placement.rank_of(stage), message.to(stage)
            assert to == rank or to in placement.neighbours(rank), f"ranks {rank} and {to} have no link"
            passed = handed(told, CPU) if to == rank else through_bytes(told)
            links.setdefault((rank, to), deque()).append(passed)

        return send

    crews = []
    for rank in range(placement.ranks):
        workers = []
        for index in placement.stages_of(rank):
            stage = Stage(task.chain(), task.law, task.stream, CPU, cut, index, placement=placement)
            stage.train_mode()
            parts = Batches(Numbered(task), 0, task.law.steps, m)  # type: ignore[arg-type]
            workers.append(Worker(stage, Rule(window), 0, task.law.steps * m, parts, sender(rank)))
        crews.append(Crew(workers, placement.group))
    ops = 0
    while not all(crew.done for crew in crews):
        if ops == stop_after:
            crews[0].first.end(-(-crews[0].first.scheduler.known // m) * m)
            stop_after = None
        choices: list[Any] = [*crews, *(link for link, queue in links.items() if queue)]
        rng.shuffle(choices)
        for choice in choices:
            if not isinstance(choice, Crew):
                crews[choice[1]].receive(links[choice].popleft())
                break
            if choice.work() is not None:
                ops += 1
                break
        else:
            raise AssertionError("no rank can go on")
    workers = [worker for crew in crews for worker in crew.workers]
    for worker in workers:
        worker.finish()
        worker.stage.eval_mode()
    first = next(worker for worker in workers if worker.stage.is_first)
    losses = [float(report[0]) for _, report in sorted(first.reports, key=lambda pair: pair[0])]
    layers = {name: layer_digest(w, wk.stage.updater) for wk in workers for name, w in wk.stage.weights.items()}
    assert len({worker.scheduler.total for worker in workers}) == 1
    return Outcome(layers, losses, max(worker.figures.peak for worker in workers)), first.scheduler.total // m


SHAPES = [
    Placement(2, 2, "loop"),
    Placement(2, 2, "v"),
    Placement(1, 3, "loop"),
    Placement(3, 2, "v"),
    Placement(1, 2, "v"),
]


@pytest.mark.parametrize("placement", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["convolutional", "text", "encoder-decoder"])
@pytest.mark.parametrize("m", [1, 4])
def test_any_placement_gives_the_bits_of_one_process(kind: str, m: int, placement: Placement) -> None:
    task = make_task(kind, steps=6, m=m)
    one = sequentially(task)
    many, steps = on_ranks(task, tuple(range(1, placement.stages)), placement, window=8)
    assert steps == 6
    assert many.losses == one.losses
    assert many.layers == one.layers


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(SHAPES),
    st.sampled_from(["exact", "delayed(2)", "lagged(2)", "bounded(2,4)"]),
    st.integers(1, 5),
    st.integers(0, 1000),
)
def test_timing_and_windows_change_nothing(placement: Placement, consistency: str, window: int, seed: int) -> None:
    task = make_task("text", steps=5, m=2, consistency=consistency)
    one = sequentially(task)
    many, _ = on_ranks(task, tuple(range(1, placement.stages)), placement, window, seed)
    assert (many.losses, many.layers) == (one.losses, one.layers)
    assert many.most_in_flight <= window


@pytest.mark.parametrize("placement", SHAPES, ids=str)
def test_a_run_that_is_told_to_stop_ends_on_every_stage_at_the_same_whole_step(placement: Placement) -> None:
    task, cut = make_task("text", steps=12, m=2), tuple(range(1, placement.stages))
    for after in (1, 20):
        many, steps = on_ranks(task, cut, placement, window=4, seed=after, stop_after=after)
        assert 0 < steps < 12
        line, _ = in_stages(task, cut, 4, until=steps)
        assert (many.losses, many.layers) == (line.losses, line.layers)


# What is handed over within a process


def tensors() -> dict[str, Tensor]:
    base = torch.arange(240, dtype=torch.float32)
    return {
        "dense": base.reshape(4, 60),
        "turned": base.reshape(4, 60).t(),
        "channels last": base.reshape(2, 4, 5, 6).contiguous(memory_format=torch.channels_last),
        "with gaps": base.reshape(4, 60)[:, 3:40:2],
        "off a line": base[7:50],
        "shown many times": base[:5].expand(3, 5),
        "empty": base[:0].reshape(0, 4),
        "one number": base[3],
        "integers": torch.arange(6),
        "flags": torch.tensor([True, False, True]),
        "half": base.to(torch.bfloat16)[3:9],
    }


@pytest.mark.parametrize("name", tensors())
def test_a_tensor_is_handed_over_as_it_would_come_through_a_wire(name: str) -> None:
    tensor = tensors()[name]
    message = Message("F", 3, (tensor, None, tensor), (True, False, False), None, "a note").to(5)
    got, sent = handed(message, CPU), disassemble(assemble(message), CPU)
    assert (got.kind, got.microbatch, got.wanted, got.note, got.stage) == ("F", 3, (True, False, False), "a note", 5)
    assert (sent.kind, sent.microbatch, sent.wanted, sent.note, sent.stage) == (
        "F",
        3,
        (True, False, False),
        "a note",
        5,
    )
    assert got.tensors[1] is None
    for mine, theirs in zip(got.tensors[::2], sent.tensors[::2], strict=True):
        assert mine is not None
        assert theirs is not None
        assert Layout.of(mine) == Layout.of(theirs) == Layout.of(tensor)
        assert mine.equal(tensor)
        assert not mine.requires_grad


def test_what_is_handed_over_belongs_to_the_one_who_gets_it() -> None:
    weight = torch.ones(3, requires_grad=True)
    (expected,) = torch.autograd.grad(torch.tanh(weight).sum(), weight)
    out = torch.tanh(weight)  # autograd keeps it for the backward
    report = torch.tensor([1.0, 1.0], dtype=torch.float64)
    got = handed(Message("B", 0, (out,), (), report), CPU)
    assert got.tensors[0] is not None
    got.tensors[0].requires_grad_(True)
    got.tensors[0].data.zero_()
    assert got.report is report
    assert got.stage is None
    assert torch.autograd.grad(out.sum(), weight)[0].equal(expected)
