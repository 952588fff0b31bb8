"""A dispatch mode that records what every operator of a step allocates, and when it is freed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from weft.errors import PlanError
from weft.hardware.gpus import CPU, Kernels
from weft.memory import cudnn_rnn
from weft.memory.timeline import AllocationTimeline, OperatorCall, sum_in_place, to_shapes
from weft.memory.workspaces import has_rule, workspaces

MOST_ASSUMPTIONS = 2_000
"""Values of data that a step may ask for: a loop that waits for one to change would never end."""
OPTIMIZER_STEPS = 100.0
"""What an optimizer is told when it reads a tensor, such as its count of steps: RAdam allocates more from its sixth
step on."""
_PRODUCTS = ("aten.mm.", "aten.bmm.", "aten.addmm.", "aten.baddbmm.", "aten.addmv.", "aten.mv.", "aten._cudnn_rnn")


class AllocationTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records an allocation timeline. It is entered over a fake mode; the caller sets ``phase`` and ``module``.

    The foreach kernels of optimizers are not run at all: only their results are made.
    """

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = kernels
        self.phase = "setup"
        self.module = ""
        self.assumptions: list[str] = []
        self.counter: WorkCounter | None = None
        """Adds up the work of operators, if given."""
        self._events: list[int] = []
        self._sizes: list[int] = []
        self._categories: list[str] = []
        self._modules: list[str] = []
        self._phases: list[str] = ["setup"]
        self._calls: list[OperatorCall] = []
        self._blocks: dict[int, int] = {}  # by storage
        self._sums: dict[int, tuple[int, ...]] = {}
        self._adding = False
        self._seen: set[tuple[str, bool]] = set()  # lasting workspaces: by kind and whether of the backward's thread

    def begin_phase(self, phase: str) -> None:
        self.phase = phase
        self._events.append(0)
        self._phases.append(phase)

    def register(self, tensor: Tensor, part: str, module: str = "") -> None:
        """Assigns a tensor, new or known, to a category and a module."""
        place = self._blocks.get(tensor.untyped_storage()._cdata)
        if place is None:
            self._see(tensor, part, module)
        else:
            self._categories[place], self._modules[place] = part, module

    def timeline(self) -> AllocationTimeline:
        order, taken = sum_in_place(self._events, self._sums)
        for block, old in taken.items():
            if self._categories[block] != "activations":
                self._categories[old], self._modules[old] = self._categories[block], self._modules[block]
        kinds = (tuple(self._categories), tuple(self._modules), tuple(self._phases))
        return AllocationTimeline(tuple(order), tuple(self._sizes), *kinds, tuple(self._calls))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = str(func), kwargs or {}
        if name.startswith(("aten._foreach_", "aten._fused_")):
            result = _foreach_result(name, args)
            if self.counter is not None:
                self.counter.work.setdefault("float32", []).append((0.0, _bytes(_tensors(args))))
        elif name == "aten._local_scalar_dense.default":
            return self._scalar(func, args)
        else:
            result = func(*args, **kwargs)
            if func is torch.ops.aten.mkldnn_rnn_layer.default and args[-1] and torch.is_grad_enabled():
                result = (*result[:3], cudnn_rnn.onednn_kept(args))
        if self.phase == "optimizer":
            for tensor in _tensors(result):
                if tensor.dim():  # the counts of steps lie in host memory
                    self._see(tensor, "workspaces")
            return result
        made = _tensors(result)
        if name == "aten.native_dropout.default":  # the kernel makes its mask first
            made.reverse()
        start = len(self._events)
        fresh = [place for tensor in made if (place := self._see(tensor, "activations")) is not None]
        if name == "aten.add.Tensor" and (self.phase == "backward" or self._adding) and fresh:
            self._note_sum(fresh[0], args)
        if self.kernels != CPU:
            self._workspaces(name, args, result, start)
        if self.counter is not None:
            self.counter(func, args, kwargs, result)
        return result

    def _workspaces(self, name: str, args: tuple[Any, ...], result: Any, start: int) -> None:
        """What a GPU's kernel takes beside its results, whose blocks begin at ``start`` in the order."""
        if name.startswith(_PRODUCTS):
            self._keep_workspace("product", self.kernels.blas)
            if name.startswith("aten.addmm."):
                self._keep_workspace("biased", self.kernels.blas_biased)
        if not has_rule(name):
            return
        first = len(self._sizes)
        call = OperatorCall(first, name, to_shapes(args), to_shapes(result))
        self._calls.append(call)
        for size in workspaces(name, call.args, call.result, self.kernels):
            self._add(size, "workspaces", self.module)
        copies, *after = ((block + 1, -block - 1) for block in range(first, len(self._sizes)))
        done = self._events[start:]
        # The images' gradient is done before the weights' is begun.
        early = 1 if name == "aten.convolution_backward.default" and args[10][0] else len(done)
        rest = [event for pair in after[1:] for event in pair]
        self._events[start:] = [copies[0], *done[:early], *after[0], *done[early:], *rest, copies[1]]

    def _see(self, tensor: Tensor, part: str, module: str | None = None) -> int | None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._blocks or not storage.nbytes():
            return None
        place = self._blocks[key] = len(self._sizes)
        self._events.append(place + 1)
        self._add(storage.nbytes(), part, self.module if module is None else module)
        # PyTorch keeps the Python object of a storage for as long as the storage itself, so they end together.
        weakref.finalize(storage, self._forget, key).atexit = False
        return place

    def _add(self, size: int, part: str, module: str) -> None:
        self._sizes.append(size)
        self._categories.append(part)
        self._modules.append(module)

    def _forget(self, key: int) -> None:
        self._events.append(-self._blocks.pop(key) - 1)

    @contextmanager
    def in_place_sums(self) -> Iterator[None]:
        """A block in which sums would be formed in place if the tensors held data."""
        self._adding, before = True, self._adding
        try:
            yield
        finally:
            self._adding = before

    def _keep_workspace(self, kind: str, size: int) -> None:
        """A library's workspace: allocated by the first call of each thread, and kept."""
        if (kind, self.phase == "backward") not in self._seen:
            self._seen.add((kind, self.phase == "backward"))
            self._events.append(len(self._sizes) + 1)
            self._add(size, "workspaces", "")

    def _note_sum(self, result: int, args: tuple[Any, ...]) -> None:
        pair = [a for a in args[:2] if isinstance(a, Tensor)]
        if self._adding:
            pair = pair[:1]
        elif len(pair) < 2 or pair[0].shape != pair[1].shape or pair[0].dtype != pair[1].dtype:
            pair = []
        if pair:
            blocks = [self._blocks.get(one.untyped_storage()._cdata) for one in pair]
            self._sums[result] = tuple(b for b in blocks if b is not None and self._sizes[b] == self._sizes[result])

    def _scalar(self, func: Any, args: tuple[Any, ...]) -> Any:
        if self.phase == "optimizer":
            return OPTIMIZER_STEPS
        try:
            return func(*args)
        except Exception:
            if len(self.assumptions) == MOST_ASSUMPTIONS:
                raise PlanError(
                    f"module '{self.module}' asks for values of data without end, perhaps in a loop until they "
                    "converge: its step cannot be traced without data. Give the loop a number of turns"
                ) from None
            self.assumptions.append(f"a value that module '{self.module}' asks for is taken as 1")
            kind = args[0].dtype
            return True if kind == torch.bool else 1.0 if kind.is_floating_point else 1


Work = dict[str, list[tuple[float, float]]]
"""By dtype, (FLOP, bytes read and written) of each kernel of a step."""


class WorkCounter:
    """Adds up what operators do, each as one kernel; views and operators without tensors are no kernels."""

    def __init__(self) -> None:
        self.work: Work = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if func.is_view or not isinstance(func, torch._ops.OpOverload):
            return
        given = _tensors((args, kwargs))
        moved = _bytes([*given, *_tensors(result)])
        if not moved:
            return
        count = flop_registry.get(func._overloadpacket)
        flops = float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0
        dtype = next((str(t.dtype).removeprefix("torch.") for t in given if t.is_floating_point()), "float32")
        self.work.setdefault(dtype, []).append((flops, moved))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _bytes(tensors: list[Tensor]) -> float:
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def _foreach_result(name: str, args: tuple[Any, ...]) -> Any:
    if name.split(".")[1].endswith("_"):
        return None
    if name.startswith("aten._foreach_norm"):
        return [one.new_empty(()) for one in args[0]]
    return [torch.empty_like(one) for one in args[0]]
