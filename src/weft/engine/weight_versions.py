"""The weights of one layer through time: the newest, the older versions that are still to be read, and the gradients
that wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from weft.engine.batch_stats import BatchStats, BatchStatsRecord
from weft.engine.consistency import Bounded, Exact, VersionSchedule, VirtualPipeline
from weft.engine.inplace_weights import InPlace, ParameterSwap, RecomputeGuard
from weft.errors import ConsistencyError, SupernetError
from weft.supernet import Activations, Layer, failure, run_layer
from weft.utils import foreach

T = TypeVar("T")

MARKS = "#@+~"
"""What sets names in a checkpoint apart from those of weights; see ``state``."""


class MovableMemory(Protocol):
    """The memory of one layer that comes to the device and goes; see ``weft.offload``."""

    def wait(self, begin: int | None) -> None: ...
    def synchronize(self) -> None: ...
    def stash(self, begin: int) -> list[Tensor]: ...
    def drop(self, begin: int) -> None: ...


class Offload(Protocol):
    """What brings the layers of an engine to the device, micro-batch by micro-batch; see ``weft.offload``."""

    def begin_run(self, first: int, total: int) -> None: ...
    def can_start(self, n: int) -> bool: ...
    def start(self, n: int) -> None: ...
    def finish(self, n: int) -> None: ...
    def prefetch_during(self, work: Callable[[], T]) -> T: ...
    def apply_updates(
        self, group: Sequence[VersionedLayer], apply: Callable[[Sequence[VersionedLayer]], None]
    ) -> None: ...
    def pinned_on_device(self, names: Iterable[str]) -> AbstractContextManager[None]: ...
    def bind_restored(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...


class VersionedLayer:
    """A layer's versions under its clock.

    The newest version lies in the module's own parameters. Version v is "after the updates of all slots below v";
    ``kept`` maps the number at which an older version began to its tensors. Where micro-batches that read different
    versions can be in flight at once, they compute with aliases of the parameters; an update then gives the parameters
    new memory, and the aliases, with the memory that they know, become the older version. Under ``bounded`` a backward
    moves on to the newest version: see ``inplace``.
    """

    def __init__(
        self, layer: Layer, module: nn.Module, clock: VersionSchedule, compute: torch.dtype | None = None
    ) -> None:
        self.layer = layer
        self.module = module
        self.clock = clock
        for name, _ in (*module.named_parameters(), *module.named_buffers()):
            if set(MARKS) & set(name):
                raise SupernetError(
                    f"'{name}' of layer '{layer.name}' cannot be saved: '#', '@', '+' and '~' have a meaning there. "
                    "Rename it"
                )
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.names = list(trained)
        self.parameters: list[nn.Parameter] = list(trained.values())
        self._binding = ParameterSwap(module, self.parameters)
        self._aliases: list[Tensor] | None = None
        # Every reader of a version is through with it before the update that ends it: one set of tensors is enough.
        self._single = isinstance(clock.consistency, Exact) or (
            isinstance(clock.consistency, VirtualPipeline) and clock.window == 1
        )
        self.drifts: Counter[int] = Counter()
        """By how many updates a backward was ahead of its forward, and how often; where that may be any."""
        self._seen: dict[int, int] = {}
        self._updates = 0
        self.newest = 0
        self.kept: dict[int, list[Tensor]] = {}
        self.pending: PendingGradients | None = None
        single = isinstance(clock.consistency, Exact) and clock.m == 1
        self.statistics = BatchStats(layer.name, module, single)
        self._reads_buffers = single
        self._watched = True
        self.revocable = False
        """Whether a forward can be taken back by ``forget``, which costs a copy of the buffers that it may change."""
        self.trains: Callable[[int], bool] | None = None
        """Which steps train the layer; None: all."""
        self._own_buffers: dict[str, Tensor] = {}
        self._born = {name: (id(b), b._version) for name, b in module.named_buffers()}
        self._several = clock.span > 1
        self.recompute_guard = RecomputeGuard(layer.name, module, clock)
        self._inplace: InPlace | None = None
        self.memory: MovableMemory | None = None
        """Where the layer's memory is, if that changes in the course of the run."""
        if isinstance(clock.consistency, Bounded) and clock.window > 1:
            self._inplace = InPlace(module, self.parameters, compute)

    def forward(
        self, n: int, carry: Activations, side: Mapping[str, Any], trains: bool = True
    ) -> tuple[Activations, list[Tensor]]:
        """Output of micro-batch n under the version that it must see, and the leaves to differentiate by.

        Unless the layer ``trains`` they are constants to autograd, which spares their gradients.
        """
        leaves = self.leaves(n)
        if not trains:
            leaves = [leaf.detach() for leaf in leaves]
        before = self.buffer_state() if self._watched else None
        if self.revocable and self._reads_buffers:
            self._own_buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        out = self.run(leaves, carry, side)
        if before is not None:
            self._check_buffers(before)
        return out, leaves

    def leaves(self, n: int) -> list[Tensor]:
        """The tensors with which the forward of micro-batch n computes: the version that it must see."""
        version = self.clock.forward_reads(n)
        if self.clock.drift:
            begin = self.begin(version)
            self._seen[n] = self._updates - (0 if begin is None else sum(other >= begin for other in self.kept))
        return self.at(version)

    def at(self, version: int) -> list[Tensor]:
        """The tensors of a version, which must still be there."""
        begin = self.begin(version)
        if self.memory is not None:
            self.memory.wait(begin)
        if self._inplace is None:
            return self._newest() if begin is None else self.kept[begin]
        if begin is None:
            self._inplace.newest()
        else:
            self._inplace.old(begin, self.kept[begin])
        return self._inplace.leaves

    @property
    def fixed(self) -> list[Tensor] | None:
        """The tensors that every forward computes with, if they are the same ones for the whole run."""
        if self._inplace is not None:
            return self._inplace.leaves
        return list(self.parameters) if self._single else None

    def current(self) -> list[Tensor]:
        """The tensors of the newest version."""
        if self.memory is not None:
            self.memory.wait(None)
        return self._newest()

    def run(self, leaves: list[Tensor], carry: Activations, side: Mapping[str, Any]) -> Activations:
        """What the layer makes of the carry with these leaves for its parameters."""
        try:
            with self.bound(leaves) or nullcontext():
                return run_layer(self.layer, self.module, carry, side)
        except (RuntimeError, IndexError) as problem:
            raise failure(self.layer, carry, problem) from problem

    def bound(self, leaves: list[Tensor]) -> AbstractContextManager[None] | None:
        """A block in which the module computes with the leaves; None where they are its own parameters anyway.

        The backward needs it too: a checkpointed layer is recomputed there.
        """
        return None if not leaves or leaves[0] is self.parameters[0] else self._binding.to(leaves)

    def refuse_buffers(self) -> None:
        """A forward that changes the layer's own buffers raises: nothing would keep such forwards in order."""
        self._reads_buffers = False

    def forget(self, n: int) -> None:
        """Takes back what the forward of micro-batch n, the last one, did to the buffers: it does not count."""
        self._seen.pop(n, None)
        self.statistics.clear()
        for name, buffer in self.module.named_buffers():
            if name in self._own_buffers:
                buffer.data.copy_(self._own_buffers[name])

    def volatile(self) -> dict[str, Tensor]:
        """Buffers that a state dict leaves out and that training has changed: a resumed run needs them all the same."""
        kept = self.module.state_dict().keys()
        return {
            name: buffer
            for name, buffer in self.module.named_buffers()
            if name not in kept and self._born.get(name) != (id(buffer), buffer._version)
        }

    def before_backward(self, n: int) -> None:
        """The leaves hold the version that the backward of micro-batch n must see; counts by how much it is newer."""
        if n in self._seen:
            drift = self._updates - self._seen.pop(n)
            if drift > self.clock.drift:
                raise ConsistencyError(
                    f"layer '{self.layer.name}': the backward of micro-batch {n} is {drift} updates ahead of its "
                    f"forward, but {self.clock.consistency} allows {self.clock.drift} in its virtual stage. "
                    "This is a mistake of weft: please report it with the run's trace"
                )
            self.drifts[drift] += 1
        self.to_newest()

    def to_newest(self) -> None:
        """The parameters hold the newest version, even where a forward has just read an older one in their place."""
        if self._inplace is not None:
            self._inplace.newest()

    def add(self, n: int, gradients: list[Tensor | None], record: BatchStatsRecord | None = None) -> None:
        """The gradient of micro-batch n joins those of its slot, in micro-batch order.

        ``record`` holds the batch statistics of its forward; None: it is the last forward that this layer did.
        """
        slot = self.clock.slot(n)
        pairs = zip(self.parameters, gradients, strict=True)
        filled = [torch.zeros_like(p) if g is None else g if g.dtype is p.dtype else g.to(p.dtype) for p, g in pairs]
        # The last of a slot is used at once; an earlier one has to outlive what autograd and the norms do next.
        kept = self._several and self.clock.last(slot) != n
        if self.pending is None:
            self.pending = PendingGradients(slot, [g.clone() for g in filled] if kept else filled, [])
        else:
            foreach.add_(self.pending.gradients, filled)
        if self.statistics.norms:
            self.pending.records.append(self.statistics.record(copy=kept) if record is None else record)

    def completes(self) -> int:
        """The micro-batch with which the slot that waits is complete; its step's learning rate is the update's."""
        assert self.pending is not None
        return self.clock.last(self.pending.slot)

    @property
    def slot(self) -> int:
        """The slot that waits."""
        assert self.pending is not None
        return self.pending.slot

    def mean(self) -> list[Tensor]:
        """The mean gradient of the finished slot."""
        assert self.pending is not None
        if self.pending.mean is None:
            steps = self._steps(self.pending.slot)
            # Never in place: autograd may have handed one tensor to several parameters.
            self.pending.mean = foreach.div(self.pending.gradients, steps) if steps > 1 else self.pending.gradients
        return self.pending.mean

    def take(self, oldest: int) -> list[Tensor]:
        """The mean gradient of the finished slot; the version before its update is kept if a micro-batch from
        ``oldest``, the first that is not through, still reads it."""
        slot, gradients = self.slot, self.mean()
        self.to_newest()
        # The versions that are read only grow, so this one has a reader yet if those to come reach from below to above
        # it.
        begun = oldest < self.clock.total and self.clock.forward_reads(oldest) <= slot
        if not self._single and begun and self.newest <= self.clock.forward_reads(self.clock.total - 1):
            if self.memory is not None:
                self.kept[self.newest] = self.memory.stash(self.newest)
            elif self._inplace is not None:
                self.kept[self.newest] = [parameter.data.clone() for parameter in self.parameters]
            else:
                self.kept[self.newest] = self._newest()
                for parameter in self.parameters:
                    parameter.data = parameter.data.clone()
                self._aliases = None
        return gradients

    def updated(self, oldest: int, applied: bool) -> None:
        """Called after the update of the finished slot: it is the newest version now; versions that nobody reads any
        more go."""
        assert self.pending is not None
        if applied:
            for record in self.pending.records:
                self.statistics.fold(record)
        self.newest = self.pending.slot + 1
        self._updates += 1
        self.pending = None
        if self._inplace is not None:
            self._inplace.updated()
        self.prune(oldest)

    def readable(self) -> None:
        """The host comes to read the layer: its memory holds what the device has made of it."""
        if self.memory is not None:
            self.memory.synchronize()

    def moved(self) -> None:
        """The parameters have other memory, with the same values."""
        self._aliases = None

    @property
    def inplace(self) -> InPlace | None:
        """The leaves that updates write into, under ``bounded``."""
        return self._inplace

    @property
    def single(self) -> bool:
        """Whether one set of tensors is enough: every reader of a version is through before the update that ends it."""
        return self._single

    def restored(self) -> None:
        """Other values were put into the parameters."""
        if self._inplace is not None:
            self._inplace.updated()

    def prune(self, oldest: int) -> None:
        """Forgets the versions that no micro-batch from ``oldest`` on reads."""
        if not self.kept:
            return
        for begin in set(self.kept) - set(self.needed(oldest)):
            del self.kept[begin]
            if self.memory is not None:
                self.memory.drop(begin)
        if self._inplace is not None and not self.kept:
            self._inplace.settled()

    def needed(self, oldest: int) -> list[int]:
        """Those of the kept versions that a micro-batch from ``oldest`` on reads, by where they began."""
        if not self.kept or oldest >= self.clock.total:
            return []
        begins = sorted(self.kept)
        read = self.clock.forward_reads(oldest)
        return [begin for begin, end in zip(begins, begins[1:] + [self.newest], strict=True) if end > read]

    def _steps(self, slot: int) -> int:
        """Over how many steps the gradients of a slot are averaged: those that train the layer."""
        if self.trains is None or self.clock.span <= self.clock.m:
            return self.clock.steps(slot)
        first, last = slot * self.clock.span // self.clock.m, self.clock.last(slot) // self.clock.m
        return sum(map(self.trains, range(first, last + 1)))

    def begin(self, version: int) -> int | None:
        """Where the kept tensors of a version begin; None where it is the newest."""
        return None if version >= self.newest else max(begin for begin in self.kept if begin <= version)

    def _newest(self) -> list[Tensor]:
        if self._single:
            return list(self.parameters)
        if self._aliases is None:  # .data has a version counter of its own: an update is not seen as a change of these
            self._aliases = [p.data.requires_grad_() for p in self.parameters]
        return self._aliases

    def buffer_state(self) -> list[tuple[int, int]]:
        scratch = {id(tensor) for tensor in self.statistics.record(copy=False)}
        return [(id(b), b._version) for b in self.module.buffers() if id(b) not in scratch]

    def _check_buffers(self, before: list[tuple[int, int]]) -> None:
        # Which layers have buffers of their own to watch is known after the first forward.
        self._watched = bool(before) and not self._reads_buffers
        if self.buffer_state() != before and not self._reads_buffers:
            raise ConsistencyError(
                f"layer '{self.layer.name}' changes its own buffers in training, which needs 'exact', one "
                "micro-batch a step and, on several stages, weights that are trained; "
                f"here it is {self.clock.consistency} with {self.clock.m}"
            )


class PendingGradients:
    """Gradients of an unfinished slot, summed in micro-batch order, and the statistics that go with them."""

    __slots__ = ("gradients", "mean", "records", "slot")

    def __init__(self, slot: int, gradients: list[Tensor], records: list[BatchStatsRecord]) -> None:
        self.slot = slot
        self.gradients = gradients
        self.mean: list[Tensor] | None = None
        self.records = records
