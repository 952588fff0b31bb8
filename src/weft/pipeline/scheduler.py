"""The scheduler of a stage, as a pure state machine: events go in, the next operation comes out.

An operation is ready when its input has arrived and every layer that it uses has the version that its consistency
demands. Among ready backwards the smallest micro-batch goes first, else the smallest ready forward; at most
``max_in_flight`` micro-batches are in flight on a stage, and the last place is kept for the oldest: without it stages
deadlock.

    2F0   forward of micro-batch 0 on stage 2          1B3   backward of micro-batch 3 on stage 1

The simulator and the runtime step the same object.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from weft.errors import ConsistencyError, nearest

Kind = Literal["F", "B"]

FORWARDS = "forwards"
"""Counts the micro-batches, without a gap from the first on, that have done their forward on a stage."""


class Op(NamedTuple):
    """The forward or the backward of one micro-batch on one stage."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class LayerDependency(NamedTuple):
    """A layer that a micro-batch uses: the slot that its gradient joins, and the versions that it must read."""

    layer: Hashable
    slot: int
    forward: int
    backward: int


DependenciesOf = Callable[[int], Sequence[LayerDependency]]


CanAdmit = Callable[[int], bool]
"""Whether the layers of a micro-batch are on the device or can be loaded."""

Counters = Callable[[Kind, int], Sequence[tuple[Hashable, int]]]
"""What else an operation waits for: counters that only rise, and the value that each must reach."""


SCHEDULES = ("1f1b", "gpipe", "naspipe")


@dataclass(frozen=True, slots=True)
class SchedulePolicy:
    """How ready operations are chosen: ``1f1b`` takes a backward first, ``gpipe`` a forward, ``naspipe`` one after the
    other."""

    max_in_flight: int
    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        if self.max_in_flight < 1:
            raise ConsistencyError(f"max_in_flight={self.max_in_flight}: at least one micro-batch must be in flight")
        if self.schedule not in SCHEDULES:
            raise ConsistencyError(f"unknown schedule '{self.schedule}'{nearest(self.schedule, SCHEDULES)}")


@dataclass(slots=True)
class _Layer:
    """The users of a layer whose gradients are not yet applied, oldest first, and the operations that wait for them."""

    users: deque[tuple[int, int]] = field(default_factory=deque)  # (micro-batch, slot)
    early: set[int] = field(default_factory=set)  # backward done, but an older user's is not
    waiting: list[tuple[int, int, Kind]] = field(default_factory=list)  # heap of (version, micro-batch, kind)

    def has(self, version: int) -> bool:
        """Whether the updates of all slots below the version are applied."""
        return not self.users or self.users[0][1] >= version


class Scheduler:
    """The state of one stage that does the micro-batches ``first`` to ``total - 1``.

    A decision costs no more than the layers that the micro-batch uses here.
    """

    def __init__(
        self,
        stage: int,
        stages: int,
        dependencies_of: DependenciesOf,
        total: int,
        policy: SchedulePolicy,
        first: int = 0,
        counters: Counters | None = None,
        can_admit: CanAdmit | None = None,
    ) -> None:
        self.stage, self.stages, self.total, self.policy = stage, stages, total, policy
        self.in_flight: set[int] = set()
        self.finished_count = first
        self.oldest = first
        """The oldest micro-batch whose backward is not finished here."""
        self.known = first
        """Micro-batches below this are registered with their layers."""
        self._dependencies_of = dependencies_of
        self._layers: defaultdict[Hashable, _Layer] = defaultdict(_Layer)
        self._dependencies: dict[int, Sequence[LayerDependency]] = {}
        self._done: set[int] = set()
        self._missing: dict[tuple[Kind, int], int] = {}  # layers that an operation still waits for
        self._ready: dict[Kind, list[int]] = {"F": [], "B": []}
        self._counters = counters
        self._can_admit = can_admit
        self._reached: dict[Hashable, int] = {FORWARDS: first}
        self._waiting_for: dict[Hashable, list[tuple[int, int, Kind]]] = {}  # heaps of (count, micro-batch, kind)
        self._forwarded: set[int] = set()
        self._waiting_forwards = 0
        self._last: Kind = "B"
        self._admit()

    def arrived(self, kind: Kind, microbatch: int) -> None:
        """The input of an operation is here: activations for a forward, a gradient for a backward."""
        if kind == "F":
            self._waiting_forwards += 1
        missing = 0
        self._register(microbatch + 1)
        for dependency in self._dependencies[microbatch]:
            version = dependency.backward if kind == "B" else dependency.forward
            layer = self._layers[dependency.layer]
            if not layer.has(version):
                heapq.heappush(layer.waiting, (version, microbatch, kind))
                missing += 1
        for counter, count in self._counters(kind, microbatch) if self._counters is not None else ():
            if self._count_of(counter) < count:
                heapq.heappush(self._waiting_for.setdefault(counter, []), (count, microbatch, kind))
                missing += 1
        if missing:
            self._missing[kind, microbatch] = missing
        else:
            heapq.heappush(self._ready[kind], microbatch)

    def advance_counter(self, counter: Hashable, count: int) -> None:
        """Raises a counter that operations may wait for."""
        self._reached[counter] = count
        held = self._waiting_for.get(counter)
        while held and held[0][0] <= self._count_of(counter):
            _, microbatch, kind = heapq.heappop(held)
            self._release(kind, microbatch)

    @property
    def forwarded(self) -> int:
        """All micro-batches below this have done their forward here."""
        return self._reached[FORWARDS]

    def next(self) -> Op | None:
        """The operation to start now, which is then in flight; None where the stage has to wait."""
        backward_first = self.policy.schedule == "1f1b" or (self.policy.schedule == "naspipe" and self._last == "F")
        order: tuple[Kind, ...] = ("B", "F") if backward_first else ("F", "B")
        for kind in order:
            ready = self._ready[kind]
            if ready and (kind == "B" or self._may_start(ready[0])):
                microbatch = heapq.heappop(ready)
                if kind == "F":
                    self.in_flight.add(microbatch)
                    self._waiting_forwards -= 1
                    self._admit()
                self._last = kind
                return Op(self.stage, kind, microbatch)
        return None

    def complete_op(self, op: Op) -> list[tuple[Hashable, int]]:
        """To be called after an operation; returns, after a backward, the (layer, micro-batch) pairs whose turn it is.

        In the order of the list a layer gets its gradients in micro-batch order; an early gradient comes up later.
        """
        if op.kind == "F":
            self._forwarded.add(op.microbatch)
            if self.stage == self.stages - 1:
                self.arrived("B", op.microbatch)
            count = self.forwarded
            while count in self._forwarded:
                self._forwarded.remove(count)
                count += 1
            if count > self.forwarded:
                self.advance_counter(FORWARDS, count)
            return []
        self.in_flight.remove(op.microbatch)
        self.finished_count += 1
        self._done.add(op.microbatch)
        while self.oldest in self._done:
            self._done.remove(self.oldest)
            self.oldest += 1
        turns: list[tuple[Hashable, int]] = []
        used = self._dependencies.pop(op.microbatch)
        for layer in dict.fromkeys(dependency.layer for dependency in used):  # tied weights: once
            turns += self._apply(layer, op.microbatch)
        return turns

    def version(self, layer: Hashable) -> int | None:
        """Updates of all slots below this are applied; None where no known micro-batch uses the layer any more."""
        known = self._layers.get(layer)
        return known.users[0][1] if known and known.users else None

    def end(self, total: int) -> None:
        """Ends the run before this micro-batch, which must not have been admitted."""
        if total < self.known:
            raise ConsistencyError(f"the run cannot end at micro-batch {total}: {self.known - 1} is already under way")
        self.total = total
        self.advance_counter(FORWARDS, self.forwarded)

    def dependencies(self, op: Op) -> Sequence[LayerDependency]:
        return self._dependencies[op.microbatch]

    def complete(self, layer: Hashable, slot: int, last: int) -> bool:
        """Whether every gradient of a slot of the layer, whose last micro-batch is ``last``, has had its turn."""
        known = self._layers.get(layer)
        return last < self.known and (known is None or known.has(slot + 1))

    @property
    def done(self) -> bool:
        return self.finished_count == self.total

    def _count_of(self, counter: Hashable) -> float:
        """The value of a counter; infinite for forwards once all are done, so that nothing waits for later ones."""
        return math.inf if counter == FORWARDS and self.forwarded >= self.total else self._reached.get(counter, 0)

    def _may_start(self, microbatch: int) -> bool:
        free = self.policy.max_in_flight - len(self.in_flight)
        reserved = microbatch != self.oldest and self.oldest not in self.in_flight
        return free > reserved and (self._can_admit is None or self._can_admit(microbatch))

    def _admit(self) -> None:
        # The first stage makes its own inputs, no further ahead than the receive buffers of the others hold.
        if self.stage == 0:
            while self.known < self.total and self._waiting_forwards < self.policy.max_in_flight:
                self.arrived("F", self.known)

    def _register(self, until: int) -> None:
        for microbatch in range(self.known, until):
            dependencies = self._dependencies[microbatch] = self._dependencies_of(microbatch)
            for dependency in dependencies:
                layer = self._layers[dependency.layer]
                if not layer.users or layer.users[-1][0] != microbatch:
                    layer.users.append((microbatch, dependency.slot))
        self.known = max(self.known, until)

    def _apply(self, key: Hashable, microbatch: int) -> list[tuple[Hashable, int]]:
        layer = self._layers[key]
        if layer.users[0][0] != microbatch:
            layer.early.add(microbatch)
            return []
        layer.users.popleft()
        turns = [(key, microbatch)]
        while layer.users and layer.users[0][0] in layer.early:
            early = layer.users.popleft()[0]
            layer.early.remove(early)
            turns.append((key, early))
        while layer.waiting and layer.has(layer.waiting[0][0]):
            _, waiting, kind = heapq.heappop(layer.waiting)
            self._release(kind, waiting)
        return turns

    def _release(self, kind: Kind, microbatch: int) -> None:
        """An operation has one thing less to wait for."""
        self._missing[kind, microbatch] -= 1
        if not self._missing[kind, microbatch]:
            del self._missing[kind, microbatch]
            heapq.heappush(self._ready[kind], microbatch)
