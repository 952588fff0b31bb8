"""The weights of one layer: the newest version, older versions that are still read, and gradients that wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from weft.engine.batch_stats import BatchStats, BatchStatsRecord
from weft.engine.consistency import Bounded, Exact, VersionSchedule, VirtualPipeline
from weft.engine.inplace_weights import InPlaceWeights, ParameterSwap, RecomputeGuard
from weft.errors import ConsistencyError, SupernetError
from weft.supernet import Activations, Layer, failure, run_layer
from weft.utils import foreach

T = TypeVar("T")

MARKS = "#@+~"
"""What marks names in a checkpoint that are not those of weights; see ``layer_state``."""


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
    """A layer's versions under its schedule.

    The newest version lies in the module's own parameters. Version v is "after the updates of all slots below v";
    ``kept`` maps the number at which an older version began to its tensors. Where micro-batches that read different
    versions can be in flight at once, they compute with aliases of the parameters; an update then gives the parameters
    new memory, and the aliases, with the memory that they know, become the older version. Under ``bounded`` a backward
    reads the newest version: see ``inplace_weights``.
    """

    def __init__(
        self, layer: Layer, module: nn.Module, schedule: VersionSchedule, compute: torch.dtype | None = None
    ) -> None:
        self.layer = layer
        self.module = module
        self.schedule = schedule
        for name, _ in (*module.named_parameters(), *module.named_buffers()):
            if set(MARKS) & set(name):
                raise SupernetError(
                    f"'{name}' of layer '{layer.name}' cannot be saved: '#', '@', '+' and '~' have a meaning there. "
                    "Rename it"
                )
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.names = list(trained)
        self.parameters: list[nn.Parameter] = list(trained.values())
        self._swap = ParameterSwap(module, self.parameters)
        self._aliases: list[Tensor] | None = None
        exact = isinstance(schedule.consistency, Exact)
        self.single_copy = exact or (isinstance(schedule.consistency, VirtualPipeline) and schedule.window == 1)
        """Whether one set of tensors is enough: every reader of a version is done before the update that ends it."""
        self.version_lags: Counter[int] = Counter()
        """By how many updates the weights of a backward were newer than those of its forward, and how often."""
        self._seen: dict[int, int] = {}
        self._updates = 0
        self.newest = 0
        self.kept: dict[int, list[Tensor]] = {}
        self.pending: PendingGradients | None = None
        self.may_read_buffers = exact and schedule.m == 1
        """Whether a forward may change the layer's own buffers: else nothing keeps such forwards in order."""
        self.batch_stats = BatchStats(layer.name, module, self.may_read_buffers)
        self._watched = True
        self.can_undo_forward = False
        """Whether ``undo_forward`` works, which costs a copy of the buffers that a forward may change."""
        self.trains: Callable[[int], bool] | None = None
        """Which steps train the layer; None: all."""
        self._buffers_before: dict[str, Tensor] = {}
        self._initial_buffers = {name: (id(b), b._version) for name, b in module.named_buffers()}
        self.recompute_guard = RecomputeGuard(layer.name, module, schedule)
        self.inplace: InPlaceWeights | None = None
        """The leaves that updates write into, under ``bounded``."""
        self.memory: MovableMemory | None = None
        """Where the layer's memory is, if that changes in the course of the run."""
        if isinstance(schedule.consistency, Bounded) and schedule.window > 1:
            self.inplace = InPlaceWeights(module, self.parameters, compute)

    def forward(
        self, n: int, activations: Activations, extra: Mapping[str, Any], trains: bool = True
    ) -> tuple[Activations, list[Tensor]]:
        """Output of micro-batch n under the version that it must read, and the leaves to differentiate by.

        Unless the layer ``trains`` they are constants to autograd, which spares their gradients.
        """
        leaves = self.leaves(n)
        if not trains:
            leaves = [leaf.detach() for leaf in leaves]
        before = self.buffer_state() if self._watched else None
        if self.can_undo_forward and self.may_read_buffers:
            self._buffers_before = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        out = self.run(leaves, activations, extra)
        if before is not None:
            self._check_buffers(before)
        return out, leaves

    def leaves(self, n: int) -> list[Tensor]:
        """The tensors with which the forward of micro-batch n computes: the version that it must read."""
        version = self.schedule.forward_reads(n)
        if self.schedule.max_version_lag:
            begin = self.begin_of(version)
            self._seen[n] = self._updates - (0 if begin is None else sum(other >= begin for other in self.kept))
        return self.tensors_at(version)

    def tensors_at(self, version: int) -> list[Tensor]:
        """The tensors of a version, which must be the newest or kept."""
        begin = self.begin_of(version)
        if self.memory is not None:
            self.memory.wait(begin)
        if self.inplace is None:
            return self._newest() if begin is None else self.kept[begin]
        if begin is None:
            self.inplace.load_newest()
        else:
            self.inplace.load_version(begin, self.kept[begin])
        return self.inplace.leaves

    @property
    def fixed_tensors(self) -> list[Tensor] | None:
        """The tensors that every forward computes with, if they are the same ones for the whole run."""
        if self.inplace is not None:
            return self.inplace.leaves
        return list(self.parameters) if self.single_copy else None

    def run(self, leaves: list[Tensor], activations: Activations, extra: Mapping[str, Any]) -> Activations:
        """The layer's outputs with these leaves for its parameters."""
        try:
            with self.bound(leaves) or nullcontext():
                return run_layer(self.layer, self.module, activations, extra)
        except (RuntimeError, IndexError) as problem:
            raise failure(self.layer, activations, problem) from problem

    def bound(self, leaves: list[Tensor]) -> AbstractContextManager[None] | None:
        """A block in which the module computes with the leaves; None where they are its own parameters anyway.

        The backward needs it too: a checkpointed layer is recomputed there.
        """
        return None if not leaves or leaves[0] is self.parameters[0] else self._swap.to(leaves)

    def undo_forward(self, n: int) -> None:
        """Restores the buffers as they were before the forward of micro-batch n, the last one: it does not count."""
        self._seen.pop(n, None)
        self.batch_stats.clear()
        for name, buffer in self.module.named_buffers():
            if name in self._buffers_before:
                buffer.data.copy_(self._buffers_before[name])

    def volatile(self) -> dict[str, Tensor]:
        """Buffers that a state dict leaves out and that training has changed: a resumed run needs them too."""
        kept = self.module.state_dict().keys()
        return {
            name: buffer
            for name, buffer in self.module.named_buffers()
            if name not in kept and self._initial_buffers.get(name) != (id(buffer), buffer._version)
        }

    def before_backward(self, n: int) -> None:
        """Puts the version in place that the backward of micro-batch n must read; counts by how much it is newer."""
        if n in self._seen:
            lag = self._updates - self._seen.pop(n)
            assert lag <= self.schedule.max_version_lag, f"micro-batch {n} is {lag} updates behind"
            self.version_lags[lag] += 1
        self.to_newest()

    def to_newest(self) -> None:
        """The parameters hold the newest version, even where a forward has just read an older one in their place."""
        if self.inplace is not None:
            self.inplace.load_newest()

    def add(self, n: int, gradients: list[Tensor | None], record: BatchStatsRecord | None = None) -> None:
        """The gradient of micro-batch n joins those of its slot, in micro-batch order.

        ``record`` holds the batch statistics of its forward; None: it is the last forward that this layer did.
        """
        slot = self.schedule.slot(n)
        pairs = zip(self.parameters, gradients, strict=True)
        filled = [torch.zeros_like(p) if g is None else g if g.dtype is p.dtype else g.to(p.dtype) for p, g in pairs]
        # The last of a slot is used at once; an earlier one has to outlive what autograd and the norms do next.
        kept = self.schedule.last_microbatch(slot) != n
        if self.pending is None:
            self.pending = PendingGradients(slot, [g.clone() for g in filled] if kept else filled, [])
        else:
            foreach.add_(self.pending.gradients, filled)
        if self.batch_stats.norms:
            self.pending.records.append(self.batch_stats.record(copy=kept) if record is None else record)

    def last_microbatch(self) -> int:
        """The last micro-batch of the slot that waits; its step's learning rate is the update's."""
        return self.schedule.last_microbatch(self.slot)

    @property
    def slot(self) -> int:
        """The slot that waits."""
        assert self.pending is not None
        return self.pending.slot

    def mean_gradients(self) -> list[Tensor]:
        """The mean gradient of the finished slot."""
        assert self.pending is not None
        if self.pending.mean is None:
            steps = self._steps(self.pending.slot)
            # Never in place: autograd may have handed one tensor to several parameters.
            self.pending.mean = foreach.div(self.pending.gradients, steps) if steps > 1 else self.pending.gradients
        return self.pending.mean

    def take_gradients(self, oldest: int) -> list[Tensor]:
        """The mean gradient of the finished slot. Keeps the version before its update if a micro-batch from ``oldest``,
        the first that is not done, still reads it."""
        slot, gradients = self.slot, self.mean_gradients()
        self.to_newest()
        # The versions that are read only rise: this one still has a reader if micro-batches to come read it or an older
        # one, and later ones read a newer one.
        begun = oldest < self.schedule.total and self.schedule.forward_reads(oldest) <= slot
        if not self.single_copy and begun and self.newest <= self.schedule.forward_reads(self.schedule.total - 1):
            if self.memory is not None:
                self.kept[self.newest] = self.memory.stash(self.newest)
            elif self.inplace is not None:
                self.kept[self.newest] = [parameter.data.clone() for parameter in self.parameters]
            else:
                self.kept[self.newest] = self._newest()
                for parameter in self.parameters:
                    parameter.data = parameter.data.clone()
                self._aliases = None
        return gradients

    def on_update(self, oldest: int, applied: bool) -> None:
        """To be called after the update of the finished slot: it is the newest version now. Drops versions without a
        reader."""
        assert self.pending is not None
        if applied:
            for record in self.pending.records:
                self.batch_stats.fold(record)
        self.newest = self.pending.slot + 1
        self._updates += 1
        self.pending = None
        if self.inplace is not None:
            self.inplace.on_update()
        self.prune(oldest)

    def synchronize(self) -> None:
        """Waits until the host may read the layer's tensors."""
        if self.memory is not None:
            self.memory.synchronize()

    def on_rebind(self) -> None:
        """To be called when the parameters have got other memory, with the same values."""
        self._aliases = None

    def on_restore(self) -> None:
        """To be called when other values were put into the parameters."""
        if self.inplace is not None:
            self.inplace.on_update()

    def prune(self, oldest: int) -> None:
        """Drops the versions that no micro-batch from ``oldest`` on reads."""
        if not self.kept:
            return
        for begin in set(self.kept) - set(self.needed(oldest)):
            del self.kept[begin]
            if self.memory is not None:
                self.memory.drop(begin)
        if self.inplace is not None and not self.kept:
            self.inplace.drop_backup()

    def needed(self, oldest: int) -> list[int]:
        """Those of the kept versions that a micro-batch from ``oldest`` on reads, by where they began."""
        if not self.kept or oldest >= self.schedule.total:
            return []
        begins = sorted(self.kept)
        read = self.schedule.forward_reads(oldest)
        return [begin for begin, end in zip(begins, begins[1:] + [self.newest], strict=True) if end > read]

    def _steps(self, slot: int) -> int:
        """Over how many steps the gradients of a slot are averaged: those that train the layer."""
        steps = self.schedule.steps(slot)
        return len(steps) if self.trains is None or len(steps) == 1 else sum(map(self.trains, steps))

    def begin_of(self, version: int) -> int | None:
        """The number at which the kept version began that holds this one; None where it is the newest."""
        return None if version >= self.newest else max(begin for begin in self.kept if begin <= version)

    def _newest(self) -> list[Tensor]:
        if self.single_copy:
            return list(self.parameters)
        if self._aliases is None:  # .data has a version counter of its own: an update is not seen as a change of these
            self._aliases = [p.data.requires_grad_() for p in self.parameters]
        return self._aliases

    def buffer_state(self) -> list[tuple[int, int]]:
        scratch = {id(tensor) for tensor in self.batch_stats.record(copy=False)}
        return [(id(b), b._version) for b in self.module.buffers() if id(b) not in scratch]

    def _check_buffers(self, before: list[tuple[int, int]]) -> None:
        # Which layers have buffers of their own to watch is known after the first forward.
        self._watched = bool(before) and not self.may_read_buffers
        if self.buffer_state() != before and not self.may_read_buffers:
            raise ConsistencyError(
                f"layer '{self.layer.name}' changes its own buffers in training, which needs 'exact', one "
                "micro-batch a step and, on several stages, weights that are trained; "
                f"here it is {self.schedule.consistency} with {self.schedule.m}"
            )


@dataclass(slots=True, eq=False)
class PendingGradients:
    """Gradients of an unfinished slot, summed in micro-batch order, and the statistics that go with them."""

    slot: int
    gradients: list[Tensor]
    records: list[BatchStatsRecord]
    mean: list[Tensor] | None = None
