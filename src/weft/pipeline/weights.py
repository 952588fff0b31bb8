"""The weights of one layer through time: the newest, the older versions that are still to be read, and the gradients
that wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import ConsistencyError, SupernetError
from weft.pipeline import foreach
from weft.pipeline.binding import Binding
from weft.pipeline.consistency import Bounded, Clock, Exact
from weft.pipeline.statistics import Record, Statistics
from weft.supernet import Carry, Layer, run_layer


class Weights:
    """A layer's versions under its clock.

    The newest version lies in the module's own parameters. Version v is "after the updates of all slots below v";
    ``kept`` maps the number at which an older version began to its tensors. Where micro-batches that read different
    versions can be in flight at once, they compute with aliases of the parameters; an update then gives the parameters
    new memory, and the aliases, with the memory that they know, become the older version.
    """

    def __init__(self, layer: Layer, module: nn.Module, clock: Clock, compute: torch.dtype | None = None) -> None:
        self.layer = layer
        self.module = module
        self.clock = clock
        for name, _ in (*module.named_parameters(), *module.named_buffers()):
            if set("#@+") & set(name):
                raise SupernetError(
                    f"'{name}' of layer '{layer.name}' cannot be saved: '#', '@' and '+' have a meaning there. "
                    "Rename it"
                )
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.names = list(trained)
        self.parameters: list[nn.Parameter] = list(trained.values())
        self._binding = Binding(module, self.parameters)
        self._aliases: list[Tensor] | None = None
        # Every reader of a version is through with it before the update that ends it: one set of tensors is enough.
        self._single = isinstance(clock.consistency, Exact) or (
            isinstance(clock.consistency, Bounded) and clock.window == 1
        )
        self.newest = 0
        self.kept: dict[int, list[Tensor]] = {}
        self.pending: Pending | None = None
        single = isinstance(clock.consistency, Exact) and clock.m == 1
        self.statistics = Statistics(layer.name, module, single)
        self._reads_buffers = single
        self._watched = True
        self.revocable = False
        """Whether a forward can be taken back by ``forget``, which costs a copy of the buffers that it may change."""
        self.trains: Callable[[int], bool] | None = None
        """Which steps train the layer; None: all."""
        self._own_buffers: dict[str, Tensor] = {}
        self._born = {name: (id(b), b._version) for name, b in module.named_buffers()}
        self._several = clock.span > 1
        self._working: list[Tensor] | None = None
        self._working_version = -1
        if isinstance(clock.consistency, Bounded) and clock.window > 1:
            # Autograd keeps views of a weight that share its storage, so a backward under newer weights than its
            # forward means to change the storage between the two: these leaves have one of their own. Autocast would
            # save a copy of each matrix as the forward saw it, so in low precision the leaf itself is the cast, made
            # once per version. What autocast leaves wide, embeddings and norms, stays wide here too.
            wide = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)
            kept_wide = {id(p) for part in module.modules() if isinstance(part, wide) for p in part.parameters()}
            self._working = [
                p.detach()
                .to(p.dtype if compute is None or p.dim() < 2 or id(p) in kept_wide else compute, copy=True)
                .requires_grad_()
                for p in self.parameters
            ]

    def forward(self, n: int, carry: Carry, side: Mapping[str, Any], trains: bool = True) -> tuple[Carry, list[Tensor]]:
        """Output of micro-batch n under the version that it must see, and the leaves to differentiate by.

        Unless the layer ``trains`` they are constants to autograd, which spares their gradients.
        """
        version = self.clock.forward_reads(n)
        before = self.buffer_state() if self._watched else None
        if self.revocable and self._reads_buffers:
            self._own_buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        if self._working is not None:
            self._load(version)
            leaves = self._working
        elif version >= self.newest:
            leaves = self._newest()
        else:
            leaves = self._at(version)
        if not trains:
            leaves = [leaf.detach() for leaf in leaves]
        try:
            block = self.bound(leaves)
            if block is None:
                out = run_layer(self.layer, self.module, carry, side)
            else:
                with block:
                    out = run_layer(self.layer, self.module, carry, side)
        except RuntimeError as problem:
            if isinstance(problem, torch.OutOfMemoryError):
                raise
            shapes = ", ".join(str(tuple(x.shape)) for x in carry)
            raise SupernetError(f"layer '{self.layer.name}' fails on inputs of shape {shapes}: {problem}") from problem
        if before is not None:
            self._check_buffers(before)
        return out, leaves

    def bound(self, leaves: list[Tensor]) -> AbstractContextManager[None] | None:
        """A block in which the module computes with the leaves; None where they are its own parameters anyway.

        The backward needs it too: a checkpointed layer is recomputed there.
        """
        return None if not leaves or leaves[0] is self.parameters[0] else self._binding.to(leaves)

    def refuse_buffers(self) -> None:
        """A forward that changes the layer's own buffers raises: nothing would keep such forwards in order."""
        self._reads_buffers = False

    def forget(self) -> None:
        """Takes back what the last forward did to the buffers: its micro-batch does not count."""
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
        """The leaves hold the version that the backward of micro-batch n must see."""
        if self._working is not None:
            self._load(self.clock.backward_reads(n))

    def add(self, n: int, gradients: list[Tensor | None], record: Record | None = None) -> None:
        """The gradient of micro-batch n joins those of its slot, in micro-batch order.

        ``record`` holds the batch statistics of its forward; None: it is the last forward that this layer did.
        """
        slot = self.clock.slot(n)
        pairs = zip(self.parameters, gradients, strict=True)
        filled = [torch.zeros_like(p) if g is None else g if g.dtype is p.dtype else g.to(p.dtype) for p, g in pairs]
        # The last of a slot is used at once; an earlier one has to outlive what autograd and the norms do next.
        kept = self._several and self.clock.last(slot) != n
        if self.pending is None:
            self.pending = Pending(slot, [g.clone() for g in filled] if kept else filled, [])
        else:
            foreach.add_(self.pending.gradients, filled)
        if self.statistics.norms:
            self.pending.records.append(self.statistics.record(copy=kept) if record is None else record)

    def completes(self) -> int:
        """The micro-batch with which the slot that waits is complete; its step's learning rate is the update's."""
        assert self.pending is not None
        return self.clock.last(self.pending.slot)

    def take(self, oldest: int) -> list[Tensor]:
        """The mean gradient of the finished slot; the version before its update is kept if a micro-batch from
        ``oldest``, the first that is not through, still reads it."""
        assert self.pending is not None
        slot = self.pending.slot
        steps = self._steps(slot)
        # Never in place: autograd may have handed one tensor to several parameters.
        gradients = foreach.div(self.pending.gradients, steps) if steps > 1 else self.pending.gradients
        # The versions that are read only grow, so this one has a reader yet if those to come reach from below to above
        # it.
        begun = oldest < self.clock.total and self.clock.forward_reads(oldest) <= slot
        if not self._single and begun and self.newest <= self.clock.forward_reads(self.clock.total - 1):
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
        self._working_version = -1
        self.pending = None
        self.prune(oldest)

    def prune(self, oldest: int) -> None:
        """Forgets the versions that no micro-batch from ``oldest`` on reads."""
        for begin in set(self.kept) - set(self.needed(oldest)):
            del self.kept[begin]

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

    def _newest(self) -> list[Tensor]:
        if self._single:
            return list(self.parameters)
        if self._aliases is None:  # .data has a version counter of its own: an update is not seen as a change of these
            self._aliases = [p.data.requires_grad_() for p in self.parameters]
        return self._aliases

    def _at(self, version: int) -> list[Tensor]:
        return self.kept[max(begin for begin in self.kept if begin <= version)]

    def _load(self, version: int) -> None:
        assert self._working is not None
        if version != self._working_version:
            source: list[Any] = self.parameters if version >= self.newest else self._at(version)
            foreach.copy_([leaf.data for leaf in self._working], [tensor.data for tensor in source])
            self._working_version = version

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


class Pending:
    """Gradients of an unfinished slot, summed in micro-batch order, and the statistics that go with them."""

    __slots__ = ("gradients", "records", "slot")

    def __init__(self, slot: int, gradients: list[Tensor], records: list[Record]) -> None:
        self.slot = slot
        self.gradients = gradients
        self.records = records
