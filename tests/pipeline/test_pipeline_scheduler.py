"""The scheduler against a symbolic model: no tensors, only which gradients a layer has had, and an adversary for a
clock."""

from __future__ import annotations

import copy
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import event as note
from hypothesis import strategies as st

from weft.engine.consistency import Bounded, Consistency, Delayed, Exact, Lagged, VersionSchedule, version_schedule
from weft.errors import ConsistencyError
from weft.pipeline import scheduler as scheduler_module
from weft.pipeline.scheduler import Kind, LayerDependency, Op, SchedulePolicy, Scheduler

Layer = tuple[int, int]
"""A layer's name: (block, choice)."""

scripts = st.binary(max_size=48)
seeds = st.integers(0, 2**32 - 1)
quiet = settings(suppress_health_check=list(HealthCheck))

SCHEDULES = ("1f1b", "gpipe", "naspipe")


@dataclass(frozen=True)
class Case:
    """A run as a schedule sees it: the layers' consistencies, what micro-batches pick, where the chain is cut."""

    consistencies: tuple[tuple[Consistency, ...], ...]  # per block, per choice
    picks: tuple[tuple[int | None, ...], ...]  # per micro-batch, per block; None: the block is skipped
    m: int
    cut: tuple[int, ...]
    policies: tuple[SchedulePolicy, ...]

    @property
    def stages(self) -> int:
        return len(self.cut) + 1

    @property
    def total(self) -> int:
        return len(self.picks)

    def layers(self, n: int, stage: int) -> list[Layer]:
        """The layers of a stage that micro-batch n uses."""
        ends = (0, *self.cut, len(self.consistencies))
        chosen = ((block, self.picks[n][block]) for block in range(ends[stage], ends[stage + 1]))
        return [(block, choice) for block, choice in chosen if choice is not None]

    @cached_property
    def used(self) -> list[list[list[Layer]]]:
        return [[self.layers(n, stage) for n in range(self.total)] for stage in range(self.stages)]

    @cached_property
    def users(self) -> dict[Layer, list[int]]:
        """The micro-batches that use each layer, in order."""
        found: dict[Layer, list[int]] = {}
        for n in range(self.total):
            for block, choice in enumerate(self.picks[n]):
                if choice is not None:
                    found.setdefault((block, choice), []).append(n)
        return found

    def clock(self, layer: Layer) -> VersionSchedule:
        block, choice = layer
        blocks, steps = len(self.consistencies), self.total // self.m
        return version_schedule(self.consistencies[block][choice], block, blocks, self.m, steps)

    @cached_property
    def clocks(self) -> dict[Layer, VersionSchedule]:
        return {layer: self.clock(layer) for layer in self.users}

    @cached_property
    def sees(self) -> dict[tuple[Kind, int, Layer], list[int]]:
        """The micro-batches whose gradients an operation must see in a layer: the design's table, not the clocks."""
        return {
            (kind, n, layer): [u for u in users if self._seen(layer, kind, n, u)]
            for layer, users in self.users.items()
            for n in users
            for kind in ("F", "B")
        }

    def _seen(self, layer: Layer, kind: str, n: int, other: int) -> bool:
        block, choice = layer
        step, other_step = n // self.m, other // self.m
        match self.consistencies[block][choice]:
            case Exact():
                return other_step < step
            case Delayed(d):
                return other_step < step - d
            case Lagged(k):
                return other_step // k <= step // k - 2
            case Bounded(k, depth):
                places = depth - block * depth // len(self.consistencies)
                updates = max(n + 1 - places, 0) // k if kind == "F" else n // k
                return other // k < updates
        raise AssertionError


class Event(NamedTuple):
    """What may happen next: an idle stage asks, a running operation ends, a message arrives."""

    what: str
    stage: int
    op: Op | None = None


class Pipeline:
    """One scheduler a stage, beside a log of what happened. Every rule is checked from the log, at every event."""

    def __init__(self, case: Case) -> None:
        self.case = case
        stages = range(case.stages)
        self.asked: list[list[int]] = [[] for _ in stages]  # micro-batches that `uses` was called for
        self.arrived: list[set[tuple[str, int]]] = [set() for _ in stages]
        self.order: list[list[Op]] = [[] for _ in stages]  # operations in the order of their start
        self.finished: list[set[tuple[str, int]]] = [set() for _ in stages]
        self.flying: list[set[int]] = [set() for _ in stages]
        self.running: list[Op | None] = [None] * case.stages
        self.wakeful = [True] * case.stages  # something happened since the stage last asked in vain
        self.messages: list[Op] = []
        self.applied: dict[Layer, list[int]] = {layer: [] for layer in case.users}
        self.peak = [0] * case.stages
        self.schedulers = [
            Scheduler(stage, case.stages, self._uses(stage), case.total, case.policies[stage]) for stage in stages
        ]
        self._feed()

    def _uses(self, stage: int) -> Callable[[int], list[LayerDependency]]:
        def uses(n: int) -> list[LayerDependency]:
            self.asked[stage].append(n)
            clocks = ((layer, self.case.clocks[layer]) for layer in self.case.used[stage][n])
            return [LayerDependency(layer, c.slot(n), c.forward_reads(n), c.backward_reads(n)) for layer, c in clocks]

        return uses

    def _feed(self) -> None:
        """The first stage has its inputs at hand, and as many forwards as its window wait there."""
        while self._waiting(0) < self.case.policies[0].max_in_flight and len(self._forwards(0)) < self.case.total:
            self.arrived[0].add(("F", len(self._forwards(0))))

    def _forwards(self, stage: int) -> list[int]:
        return [n for kind, n in self.arrived[stage] if kind == "F"]

    def _waiting(self, stage: int) -> int:
        return len(self._forwards(stage)) - sum(op.kind == "F" for op in self.order[stage])

    def options(self) -> list[Event]:
        found = [Event("arrive", op.stage, op) for op in self.messages]
        for stage, op in enumerate(self.running):
            if op is not None:
                found.append(Event("finish", stage, op))
            elif self.wakeful[stage]:
                found.append(Event("ask", stage))
        return found

    def happen(self, event: Event) -> None:
        _, stage, op = event
        self.wakeful[stage] = True
        if event.what == "ask":
            self._ask(stage)
        elif event.what == "arrive":
            assert op is not None
            self.messages.remove(op)
            self.arrived[stage].add((op.kind, op.microbatch))
            self.schedulers[stage].arrived(op.kind, op.microbatch)
        else:
            assert op is not None
            self._finish(op)
        assert self.schedulers[stage].in_flight == self.flying[stage]
        self._check_buffers()

    def _ask(self, stage: int) -> None:
        expected = self.expected(stage)
        found = self.schedulers[stage].next()
        assert found == expected, f"stage {stage}: {found} instead of {expected}, in {self.case} after {self.order}"
        if found is None:
            self.wakeful[stage] = False
            return
        assert found not in self.order[stage]
        assert (found.kind, found.microbatch) in self.arrived[stage]
        self._check_versions(found)
        self.order[stage].append(found)
        self.running[stage] = found
        if found.kind == "F":
            self.flying[stage].add(found.microbatch)
            if stage == 0:
                self._feed()
        self._check_window(stage)

    def _finish(self, op: Op) -> None:
        stage, kind, n = op
        self.running[stage] = None
        self.finished[stage].add((kind, n))
        if kind == "B":
            self.flying[stage].remove(n)
            for layer in self.case.used[stage][n]:  # a gradient that comes early waits
                users, applied = self.case.users[layer], self.applied[layer]
                while len(applied) < len(users) and ("B", users[len(applied)]) in self.finished[stage]:
                    applied.append(users[len(applied)])
        self.schedulers[stage].complete_op(op)
        if kind == "F" and stage == self.case.stages - 1:
            self.arrived[stage].add(("B", n))
        to = stage + (1 if kind == "F" else -1)
        if 0 <= to < self.case.stages:
            self.messages.append(Op(to, kind, n))
            self.messages.sort()
        if kind == "B":
            self._check_applied(stage, n)

    def oldest(self, stage: int) -> int:
        return next((n for n in range(self.case.total) if ("B", n) not in self.finished[stage]), self.case.total)

    def ready(self, stage: int, kind: Kind) -> list[int]:
        """Brute force: what has arrived, was not started, and finds every version that the table demands."""
        started = {(op.kind, op.microbatch) for op in self.order[stage]}
        return sorted(
            n
            for k, n in self.arrived[stage] - started
            if k == kind
            and all(
                ("B", user) in self.finished[stage]
                for layer in self.case.used[stage][n]
                for user in self.case.sees[kind, n, layer]
            )
        )

    def allowed(self, stage: int, n: int) -> bool:
        """Rule 2 of the design, to the letter."""
        window, oldest, count = self.case.policies[stage].max_in_flight, self.oldest(stage), len(self.flying[stage])
        return count < (window if n == oldest or oldest in self.flying[stage] else window - 1)

    def expected(self, stage: int) -> Op | None:
        backwards = self.ready(stage, "B")
        forwards = [n for n in self.ready(stage, "F") if self.allowed(stage, n)]
        last = self.order[stage][-1].kind if self.order[stage] else "B"
        backward_first = {"1f1b": True, "gpipe": False, "naspipe": last == "F"}[self.case.policies[stage].schedule]
        if backwards and (backward_first or not forwards):
            return Op(stage, "B", backwards[0])
        return Op(stage, "F", forwards[0]) if forwards else None

    def _check_versions(self, op: Op) -> None:
        """What the operation reads, taken from the weights by the clock, is what the table says, in that order."""
        stage, kind, n = op
        for layer in self.case.used[stage][n]:
            at = self.case.clocks[layer]
            version = at.forward_reads(n) if kind == "F" else at.backward_reads(n)
            read = [user for user in self.applied[layer] if at.slot(user) < version]
            assert read == self.case.sees[kind, n, layer], f"{op} reads {read} of {layer} in {self.case}"

    def _check_window(self, stage: int) -> None:
        window, flying = self.case.policies[stage].max_in_flight, self.flying[stage]
        self.peak[stage] = max(self.peak[stage], len(flying))
        assert len(flying) <= window
        if self.oldest(stage) not in flying and self.oldest(stage) < self.case.total:
            assert len(flying) <= window - 1, f"no place for {self.oldest(stage)} on stage {stage}"

    def _check_buffers(self) -> None:
        """A receive buffer holds the window of the stage that sends."""
        for stage in range(self.case.stages):
            sender = self.case.policies[max(stage - 1, 0)]
            sent = sum(op.stage == stage and op.kind == "F" for op in self.messages)
            assert sent + self._waiting(stage) <= sender.max_in_flight

    def _check_applied(self, stage: int, n: int) -> None:
        """The version that a scheduler states is that of the oldest gradient that is not applied in order."""
        for layer in self.case.used[stage][n]:
            left = self.case.users[layer][len(self.applied[layer]) :]
            known = self.asked[stage]
            stated = self.schedulers[stage].version(layer)
            assert stated == (self.case.clocks[layer].slot(left[0]) if left and left[0] in known else None)

    def check_end(self) -> None:
        everything = sorted((kind, n) for kind in ("B", "F") for n in range(self.case.total))
        for stage, scheduler in enumerate(self.schedulers):
            order = [(op.kind, op.microbatch) for op in self.order[stage]]
            assert sorted(order) == everything, f"the schedule cannot go on: {self.case} after {self.order}"
            assert self.finished[stage] == set(everything)
            position = {op: at for at, op in enumerate(order)}
            assert all(position["F", n] < position["B", n] for n in range(self.case.total))
            assert self.asked[stage] == list(range(self.case.total))
            assert scheduler.done
            assert not any(
                (scheduler.in_flight, scheduler._dependencies, scheduler._missing, scheduler._done)
            )  # no leaks
            assert not any(layer.users or layer.early or layer.waiting for layer in scheduler._layers.values())
        assert self.applied == self.case.users

    def state(self) -> str:
        """Everything that the future depends on."""
        schedulers = [{k: v for k, v in vars(s).items() if k != "_dependencies_of"} for s in self.schedulers]
        return repr((schedulers, self.arrived, self.running, self.finished, self.messages, self.wakeful))

    def clone(self) -> Pipeline:
        other = copy.copy(self)
        for name in ("asked", "arrived", "order", "finished", "flying"):
            setattr(other, name, [copy.copy(part) for part in getattr(self, name)])
        for name in ("running", "wakeful", "messages", "peak"):
            setattr(other, name, list(getattr(self, name)))
        other.applied = {layer: list(users) for layer, users in self.applied.items()}
        other.schedulers = [copy.copy(scheduler) for scheduler in self.schedulers]
        for stage, scheduler in enumerate(other.schedulers):
            for name, value in vars(scheduler).items():
                if isinstance(value, (set, dict)):
                    setattr(scheduler, name, copy.deepcopy(value))
            scheduler._dependencies_of = other._uses(stage)
        return other


Chooser = Callable[[list[Event]], Event]


def adversary(script: bytes, seed: int) -> Chooser:
    """Follows a script, then a habit: at random, newest first, no question before it must, or some stages stalled."""
    rng = random.Random(seed)
    steps = iter(script)
    habit = seed % 4
    slow = {(what, stage): rng.random() for what in ("ask", "finish", "arrive") for stage in range(8)}

    def choose(options: list[Event]) -> Event:
        step = next(steps, None)
        if step is not None:
            return options[step % len(options)]
        if habit == 1 and rng.random() < 0.9:
            return max(options, key=lambda event: event.op.microbatch if event.op else -1)
        if habit == 2 and rng.random() < 0.95:
            return min(options, key=lambda event: (event.what == "ask", rng.random()))
        if habit == 3 and rng.random() < 0.95:
            return min(options, key=lambda event: slow[event.what, event.stage])
        return rng.choice(options)

    return choose


def play(pipeline: Pipeline, choose: Chooser) -> Pipeline:
    while options := pipeline.options():
        pipeline.happen(choose(options))
    pipeline.check_end()
    return pipeline


def lockstep(pipeline: Pipeline) -> list[str]:
    """Every operation takes one tick and every message none: a row of the timeline for each stage."""
    rows: list[list[str]] = [[] for _ in pipeline.order]
    while True:
        for event in pipeline.options():
            if event.what == "finish":
                pipeline.happen(event)
        while arriving := [event for event in pipeline.options() if event.what == "arrive"]:
            pipeline.happen(arriving[0])
        for event in pipeline.options():
            pipeline.happen(event)
        if not any(pipeline.running):
            pipeline.check_end()
            return [" ".join(row) for row in rows]
        for row, op in zip(rows, pipeline.running, strict=True):
            row.append(str(op)[1:] if op else "..")


def shared(
    blocks: int, total: int, m: int, policies: list[SchedulePolicy], consistency: Consistency | None = None
) -> Case:
    """One block a stage, and every micro-batch uses all of them."""
    consistencies = ((consistency or Exact(),),) * blocks
    return Case(consistencies, ((0,) * blocks,) * total, m, tuple(range(1, blocks)), tuple(policies))


# By hand.


def test_policies_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConsistencyError, match="max_in_flight=0: at least one"):
        SchedulePolicy(0)
    with pytest.raises(ConsistencyError, match="did you mean '1f1b'"):
        SchedulePolicy(1, "1f1bb")


ONE_F_ONE_B = """
F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
.. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
.. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..
"""

GPIPE = """
F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
.. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..
.. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..
"""


def drawn(picture: str, steps: int, m: int) -> list[str]:
    """The picture of one step, repeated for several: flushed, so that none begins before the last is over."""

    def later(cell: str, step: int) -> str:
        return cell if cell == ".." else f"{cell[0]}{int(cell[1:]) + step * m}"

    rows = [row.split() for row in picture.strip().splitlines()]
    return [" ".join(later(cell, step) for step in range(steps) for cell in row) for row in rows]


def test_layers_that_all_share_become_1f1b_with_flush() -> None:
    case = shared(3, 12, 4, [SchedulePolicy(3 - stage) for stage in range(3)])
    assert lockstep(Pipeline(case)) == drawn(ONE_F_ONE_B, 3, 4)


@pytest.mark.parametrize("window", [4, 5, 64])
def test_forwards_first_and_a_window_of_a_step_are_gpipe(window: int) -> None:
    case = shared(3, 12, 4, [SchedulePolicy(window, "gpipe")] * 3)
    assert lockstep(Pipeline(case)) == drawn(GPIPE, 3, 4)


def test_a_delay_of_a_step_fills_the_gap_between_steps() -> None:
    """PipeDream with a delay of the run's own: two stages, one micro-batch a step."""
    case = shared(2, 5, 1, [SchedulePolicy(2), SchedulePolicy(1)], Delayed(1))
    assert lockstep(Pipeline(case)) == [
        "F0 F1 .. B0 F2 B1 F3 B2 F4 B3 .. B4",
        ".. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 ..",
    ]


def test_a_layer_that_a_microbatch_uses_twice_on_a_stage_is_one_layer() -> None:
    """Weights tied across two blocks of one stage, delayed by a step, and a backward that overtakes an older one."""

    def tied(n: int) -> list[LayerDependency]:
        return [LayerDependency("a", n, max(n - 1, 0), max(n - 1, 0))] * 2

    stage = Scheduler(0, 2, tied, 4, SchedulePolicy(4))
    assert [stage.next(), stage.next(), stage.next()] == [Op(0, "F", 0), Op(0, "F", 1), None]
    for n in (1, 0):
        stage.complete_op(Op(0, "F", n))
        stage.arrived("B", n)
        assert stage.next() == Op(0, "B", n)
        stage.complete_op(Op(0, "B", n))
    assert stage.version("a") == 2
    assert [stage.next(), stage.next()] == [Op(0, "F", 2), Op(0, "F", 3)]


# The rules, under an adversary.


Number = Callable[[int, int], int]
"""A number between two, both included: drawn by Hypothesis, which shrinks well, or at random, which spreads well."""


def some_promise(number: Number, kind: int, m: int, blocks: int) -> Consistency:
    made: list[Callable[[], Consistency]] = [
        Exact,
        lambda: Delayed(number(0, 3)),
        lambda: Lagged(number(1, 3)),
        lambda: Bounded(m * number(1, 3), number(1, blocks)),
    ]
    return made[kind]()


def some_case(number: Number, most: int) -> Case:
    blocks, m = number(1, 5), number(1, 4)
    kinds = ((0,), (1,), (2,), (3,), (0, 1, 2, 3))[number(0, 4)]  # all layers of one kind, or mixed
    choices = [number(1, 4) for _ in range(blocks)]
    consistencies = tuple(
        tuple(some_promise(number, kinds[number(0, len(kinds) - 1)], m, blocks) for _ in range(count))
        for count in choices
    )
    steps = number(1, max(1, most // m))
    each = m if number(0, 1) else 1  # one subnet a step, or one a micro-batch
    skipping = number(0, 1)
    rows: list[tuple[int | None, ...]] = []
    for _ in range(steps * m // each):
        picked = [(number(0, count - 1 + skipping), count) for count in choices]
        rows.append(tuple(None if choice == count else choice for choice, count in picked))
    picks = tuple(row for row in rows for _ in range(each))
    cut = tuple(block for block in range(1, blocks) if number(0, 2))
    schedule = SCHEDULES[number(0, 2)]
    equal = number(0, 1) and number(1, 2 * len(cut) + 3)
    policies = tuple(SchedulePolicy(equal or number(1, 2 * len(cut) + 3), schedule) for _ in range(len(cut) + 1))
    return Case(consistencies, picks, m, cut, policies)


def cases(most: int = 12) -> st.SearchStrategy[Case]:
    spread = st.builds(lambda seed: some_case(random.Random(seed).randint, most), seeds)
    return st.one_of(spread, shrinking(most))


@st.composite
def shrinking(draw: st.DrawFn, most: int) -> Case:
    return some_case(lambda least, largest: draw(st.integers(least, largest)), most)


@settings(quiet, max_examples=300)
@given(cases(), scripts, seeds)
def test_every_rule_holds_under_any_timing(case: Case, script: bytes, seed: int) -> None:
    """Versions, order, windows, buffers, no deadlock, and each choice as brute force would make it: see Pipeline."""
    pipeline = play(Pipeline(case), adversary(script, seed))
    forwards = [op.microbatch for op in pipeline.order[-1] if op.kind == "F"]
    note(f"{case.stages} stages")
    note("forwards in order" if forwards == sorted(forwards) else "forwards overtaken")


@pytest.mark.long
@settings(quiet, max_examples=20_000)
@given(cases(24), scripts, seeds)
def test_every_rule_holds_under_any_timing_for_tens_of_thousands_of_cases(case: Case, script: bytes, seed: int) -> None:
    play(Pipeline(case), adversary(script, seed))


# All interleavings of small cases.


def explore(case: Case) -> Counter[str]:
    """Walks through every state that any timing can reach, and checks the rules on every event between them."""
    found: Counter[str] = Counter()
    start = Pipeline(case)
    seen, todo = {start.state()}, [start]
    while todo:
        at = todo.pop()
        options = at.options()
        if not options:
            at.check_end()
            found["ends"] += 1
        for chosen in options:
            after = at.clone()
            after.happen(chosen)
            found["events"] += 1
            key = after.state()
            if key not in seen:
                seen.add(key)
                todo.append(after)
    return found


def small(consistency: Consistency, patterns: tuple[str, str], m: int, policies: tuple[SchedulePolicy, ...]) -> Case:
    """Two stages of one block each; a pattern such as `ab.` gives the choice of every micro-batch, `.` for none."""
    consistencies = ((consistency, consistency),) * 2
    picks = tuple(tuple(None if c == "." else "ab".index(c) for c in column) for column in zip(*patterns, strict=True))
    return Case(consistencies, picks, m, (1,), policies)


SMALL = [
    (Exact(), ("aaa", "aaa"), 1, (2, 2), "1f1b"),
    (Exact(), ("aba", "abb"), 1, (3, 2), "1f1b"),
    (Exact(), ("abb", "a.a"), 1, (3, 3), "naspipe"),
    (Exact(), ("ab.", "aab"), 1, (2, 1), "gpipe"),
    (Exact(), ("aaaa", "aaaa"), 2, (3, 2), "1f1b"),
    (Exact(), ("abab", "aabb"), 2, (2, 3), "gpipe"),
    (Delayed(1), ("aaa", "aaa"), 1, (3, 3), "1f1b"),
    (Delayed(1), ("aaaa", "abab"), 2, (2, 2), "naspipe"),
    (Lagged(1), ("aaa", "aaa"), 1, (3, 2), "1f1b"),
    (Bounded(1, 2), ("aaa", "aaa"), 1, (3, 3), "1f1b"),
    (Bounded(1, 2), ("aaa", "bab"), 1, (2, 1), "gpipe"),
    (Bounded(2, 2), ("aaaa", "aaaa"), 1, (2, 2), "1f1b"),
]


@pytest.mark.parametrize(("consistency", "patterns", "m", "windows", "schedule"), SMALL)
def test_every_rule_holds_in_all_interleavings_of_small_cases(
    consistency: Consistency, patterns: tuple[str, str], m: int, windows: tuple[int, int], schedule: str
) -> None:
    found = explore(small(consistency, patterns, m, tuple(SchedulePolicy(window, schedule) for window in windows)))
    assert found["ends"] >= 1


# What a decision costs.


def operations(run: Callable[[], object]) -> int:
    """The lines that the scheduler's module executes, each turn of a loop anew."""
    count = 0

    def trace(frame: Any, what: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != scheduler_module.__file__:
            return None
        count += what == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def wide(window: int, total: int) -> Pipeline:
    """Micro-batches that share nothing, forwards first, so that the window is full for most of the time."""
    picks = tuple((n,) * 2 for n in range(total))
    return Pipeline(Case(((Exact(),) * total,) * 2, picks, 1, (1,), (SchedulePolicy(window, "gpipe"),) * 2))


def test_a_decision_costs_the_same_in_a_wide_window() -> None:
    executed = {}
    for window in (4, 64):
        pipeline = wide(window, 150)
        executed[window] = operations(partial(lockstep, pipeline))
        assert pipeline.peak[0] == window
    assert 0.9 < executed[64] / executed[4] < 1.1  # a scan of the window would be many times as much
