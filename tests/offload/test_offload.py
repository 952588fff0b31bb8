"""Layers that live on the host: with any budget, under any timing of copies, every bit is that of a run without."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import stages
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stages import CPU, Outcome, Task, in_stages, make_task, run_engine, saved_at, sequentially
from torch import Tensor

from weft.engine.optimizer import GlobalNorm, Optimizer
from weft.engine.reference import SequentialReference
from weft.errors import TrainError
from weft.offload import OffloadConfig, OffloadManager
from weft.offload.copy_engine import CopyEngine
from weft.offload.setup import attach
from weft.pipeline.stage import Stage


@dataclass(eq=False)
class Job:
    """A copy that has not been made yet."""

    target: Tensor
    source: Tensor
    after: list[Job] = field(default_factory=list)
    done: bool = False

    def run(self) -> None:
        if not self.done:
            for job in self.after:
                job.run()
            self.target.copy_(self.source)
            self.done = True


class Late(CopyEngine):
    """Copies as late as it may, and in any order: whoever reads without waiting finds something else."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.jobs: list[Job] = []

    def to_device(self, target: Tensor, source: Tensor, after: Sequence[Job | None]) -> Job:
        job = Job(target, source, [ticket for ticket in after if ticket is not None])
        if all(other.done for other in job.after) and not any(_overlap(target, other.source) for other in self.jobs):
            target.fill_(255)  # as floats, not a number
        self.jobs.append(job)
        self._some()
        return job

    to_host = to_device

    def _some(self) -> None:
        for job in self.rng.sample(self.jobs, len(self.jobs)):
            if self.rng.random() < 0.2:
                job.run()
        self.jobs = [job for job in self.jobs if not job.done]

    def wait(self, ticket: Job | None) -> None:
        if ticket is not None:
            ticket.run()
        self._some()

    synchronize = wait

    def done(self, ticket: Job | None) -> bool:
        return ticket is None or ticket.done


class Early(CopyEngine):
    """Copies at the earliest time that its tickets allow: what the device does after a mark comes too late."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        """Of the device, once there is one."""
        self.count = 0

    def to_device(self, target: Tensor, source: Tensor, after: Sequence[Moment | None]) -> Moment:
        assert torch.equal(self._then(after, target), target), "written to after it was given up"
        target.copy_(source)
        return self.record()

    def to_host(self, target: Tensor, source: Tensor, after: Sequence[Moment | None]) -> Moment:
        target.copy_(self._then(after, source))
        return self.record()

    def record(self) -> Moment:
        self.count += 1
        return Moment(self.count, self.memory.clone())

    def done(self, ticket: Moment | None) -> bool:
        return ticket is None

    def _then(self, after: Sequence[Moment | None], part: Tensor) -> Tensor:
        """What was there when the last of the tickets was done."""
        moments = sorted((moment for moment in after if moment is not None), key=lambda moment: moment.count)
        at = part.data_ptr() - self.memory.data_ptr()
        return moments[-1].memory[at : at + part.numel()] if moments else part


@dataclass(eq=False)
class Moment:
    """The memory of the device at some time."""

    count: int
    memory: Tensor


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.numel() and b.data_ptr() < a.data_ptr() + a.numel()


def least_of(task: Task) -> int:
    sequential = SequentialReference(task.chain(), task.config, CPU)
    attach(sequential, OffloadConfig("1TiB", prefetch=0))
    assert sequential.offload is not None
    return sequential.offload.least


def resided(task: Task, config: OffloadConfig, seed: int | None = None) -> tuple[Outcome, OffloadManager]:
    sequential = SequentialReference(task.chain(), task.config, CPU)
    attach(sequential, config, copy_engine=None if seed is None else Late(seed))
    memory = sequential.offload
    assert memory is not None
    return run_engine(sequential, task), memory


@contextmanager
def stages_reside(config: dict[int, OffloadConfig], mover: Callable[[], Any]) -> Any:
    """Within the block every stage that is made has its layers on the host."""
    made: list[OffloadManager] = []

    def make(*arguments: Any, **options: Any) -> Stage:
        stage = Stage(*arguments, **options)
        attach(stage, config[stage.index], copy_engine=(own := mover()))
        assert stage.offload is not None
        if isinstance(own, Early):
            own.memory = stage.offload.device.memory
        made.append(stage.offload)
        return stage

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "Stage", make)
        yield made


ADAM = Optimizer("adamw", lr=1e-3, weight_decay=0.01)
KINDS = ("text", "convolutional", "encoder-decoder", "plain")
CONSISTENCIES = ("exact", "delayed(2)", "lagged(2)", "bounded(2, 3)", "bounded(4, 2)", "stashed(2, 3)")


def same(one: Outcome, other: Outcome) -> None:
    assert one.losses == other.losses
    assert one.layers == other.layers


@pytest.mark.parametrize("consistency", CONSISTENCIES)
@pytest.mark.parametrize("m", [1, 2])
def test_the_least_budget_gives_the_same_bits_however_late_copies_come(consistency: str, m: int) -> None:
    task = make_task("text", m=m, consistency=consistency, optimizer=ADAM)
    budget = least_of(task)
    found, memory = resided(task, OffloadConfig(budget), seed=1)
    same(found, sequentially(task))
    assert memory.stats()["peak"] <= budget
    if consistency == "exact":  # else nothing would have been tried
        assert memory.stats()["evicted_bytes"] > 0


@pytest.mark.parametrize("consistency", CONSISTENCIES)
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_nothing_is_copied_before_the_device_has_done_what_it_was_given_to_do(consistency: str, factor: float) -> None:
    task = make_task("text", m=2, steps=7, consistency=consistency, optimizer=ADAM)
    sequential, mover = SequentialReference(task.chain(), task.config, CPU), Early()
    attach(sequential, OffloadConfig(int(least_of(task) * factor)), copy_engine=mover)
    assert sequential.offload is not None
    mover.memory = sequential.offload.device.memory
    same(run_engine(sequential, task), sequentially(task))


class HalfRate(torch.optim.Adam):
    """An optimizer of a user, whose step reads what is no part of its state."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, lr)
        self.share = 0.5

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["weight_decay"] = self.share
        return super().step(closure)


@pytest.mark.parametrize("kind", ["nadam", "adagrad", "adafactor", "rmsprop", "muon", "asgd", HalfRate])
def test_whatever_an_optimizer_keeps_goes_with_its_layer(kind: str | type) -> None:
    task = make_task("text", optimizer=Optimizer(kind, lr=1e-3))
    found, memory = resided(task, OffloadConfig(least_of(task)), seed=2)
    same(found, sequentially(task))
    assert memory.stats()["evicted_bytes"] > 0


def test_a_byte_less_than_the_least_is_refused_with_the_least_and_a_layer_that_is_larger_alone_is_named() -> None:
    task = make_task("text", optimizer=ADAM)
    least = least_of(task)
    for budget, words in (
        (least - 1, f"The least that would do is {least} bytes"),
        ("2KiB", r"layer 'b\d\.\w+' alone"),
    ):
        with pytest.raises(TrainError, match=words):
            resided(task, OffloadConfig(budget))


def test_with_room_for_all_layers_nothing_is_copied_twice() -> None:
    task = make_task("text", steps=12, optimizer=ADAM)
    _, memory = resided(task, OffloadConfig("1MiB"))
    told = memory.stats()
    used = {name for n in range(12) for name in (layer.name for layer in task.chain().route(task.config.stream[n][0]))}
    assert told["loaded_bytes"] == sum(
        memory.layers[name].layout.weight_bytes for name in used if name in memory.layers
    )
    assert told["evicted_bytes"] == 0


def test_what_did_not_change_is_not_written_back() -> None:
    from weft.offload.setup import attach_for_scoring
    from weft.supernet import initialise

    chain = initialise(stages.text, 0)
    memory = attach_for_scoring(chain, CPU, OffloadConfig("12KiB"))
    for name in [*memory.layers, *memory.layers]:
        with memory.pinned_on_device([name]):
            pass
    assert memory.device.evicted_bytes == 0
    assert memory.device.loaded_bytes > memory.device.peak_bytes


def test_a_layer_that_was_not_used_has_no_optimizer_state_to_move() -> None:
    task = make_task("text", steps=1, optimizer=ADAM)
    _, memory = resided(task, OffloadConfig("1MiB"))
    used = {layer.name for layer in task.chain().route(task.config.stream[0][0])}
    for name, home in memory.layers.items():
        assert len(home.copied_host) == (home.layout.copied_bytes if name in used else home.layout.weight_bytes)


def test_a_micro_batch_gets_its_layers_once_even_if_an_older_one_that_has_not_started_loses_its_own() -> None:
    task = make_task("text", optimizer=ADAM)
    sequential = SequentialReference(task.chain(), task.config, CPU)
    attach(sequential, OffloadConfig(2 * least_of(task), prefetch=2))
    memory = sequential.offload
    assert memory is not None
    memory.begin_run(0, 3)
    memory.start(1)
    with pytest.raises(TrainError, match="cannot hold"), memory.pinned_on_device(memory.layers):
        pass
    for n in (0, 2):
        memory.start(n)
    for n in (1, 0, 2):
        memory.finish(n)
    memory.flush()  # which would put back what is still admitted
    assert not any(home.users for home in memory.layers.values())


@dataclass(frozen=True)
class Case:
    """A run on stages, each with so many times its least budget."""

    task: Task
    cut: tuple[int, ...]
    window: int
    factor: float
    seed: int
    how: dict[str, Any] = field(default_factory=dict)
    early: bool = False

    def budgets(self, cut: tuple[int, ...] | None = None) -> dict[int, int]:
        return {
            index: int(least * self.factor) for index, least in self.least(self.cut if cut is None else cut).items()
        }

    def least(self, cut: tuple[int, ...]) -> dict[int, int]:
        found = {}
        for index in range(len(cut) + 1):
            stage = Stage(self.task.chain(), self.task.config, CPU, cut, index)
            attach(stage, OffloadConfig("1TiB", prefetch=0))
            assert stage.offload is not None
            found[index] = max(stage.offload.least, 1)
        return found


def cuts(blocks: int, most: int = 2) -> st.SearchStrategy[tuple[int, ...]]:
    return st.sets(st.integers(1, blocks - 1), max_size=most).map(lambda cut: tuple(sorted(cut)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from((*KINDS, "tied")))
    m = draw(st.sampled_from([1, 2]))
    chain = (stages.KINDS | stages.ALIKE)[kind][0]()
    mixed = kind != "tied" and draw(st.booleans())
    one = draw(st.sampled_from(["exact", "bounded(2, 3)"] if kind == "tied" else CONSISTENCIES))
    consistency: Any = {name: draw(st.sampled_from(CONSISTENCIES)) for name in chain.layers} if mixed else one
    together = not mixed and one in ("exact", "bounded(2, 3)", "stashed(2, 3)")
    task = make_task(
        kind,
        steps=6,
        m=m,
        consistency=consistency,
        optimizer=draw(st.sampled_from([None, ADAM, Optimizer("sgd", lr=0.05, momentum=0.9, foreach=True)])),
        seed=draw(st.integers(0, 9)),
        clip=draw(st.sampled_from([None, 0.5, GlobalNorm(0.2)] if together else [None, 0.5])),
        precision=draw(st.sampled_from(["fp32", "bf16"])),
    )
    how: dict[str, Any] = draw(st.sampled_from([{}, {"split": True}]))
    return Case(
        task,
        draw(cuts(len(chain.blocks))),
        draw(st.integers(1, 5)),
        draw(st.sampled_from([1.0, 1.3, 2.0, 5.0])),
        draw(st.integers(0, 10**6)),
        how,
        draw(st.booleans()),
    )


def run_case(case: Case, **options: Any) -> tuple[Outcome, list[Any]]:
    cut = options.pop("cut", case.cut)
    budgets = case.budgets(cut)
    config = {index: OffloadConfig(budget) for index, budget in budgets.items()}
    with stages_reside(config, Early if case.early else partial(Late, case.seed)) as made:
        found = in_stages(case.task, cut, case.window, case.seed, **case.how, **options)
    for index, memory in enumerate(made):
        assert memory.stats()["peak"] <= budgets[index]
        assert not any(home.users or home.spares or home.pins for home in memory.layers.values())
    return found


@settings(max_examples=12)
@given(case=cases(), cut=st.sampled_from([(2,), ()]), at=st.sampled_from([2, 4]), factor=st.sampled_from([1.0, 3.0]))
def test_any_budget_stages_and_timing_give_the_same_bits_and_a_run_goes_on_with_another_budget(
    case: Case, cut: tuple[int, ...], at: int, factor: float
) -> None:
    whole, snapshots = run_case(case, every=2)
    same(whole, sequentially(case.task))
    saved = saved_at(snapshots, at * case.task.config.microbatches)
    rest, _ = run_case(replace(case, factor=factor), saved=saved, first_step=at, cut=cut)
    assert rest.layers == whole.layers
    assert rest.losses == whole.losses[at * case.task.config.microbatches :]
