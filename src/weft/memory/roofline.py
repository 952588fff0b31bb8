"""The time of a step by a roofline model: each traced operator is one kernel of so many FLOP and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from weft.errors import PlanError
from weft.hardware.machine import Machine

Work = dict[str, list[tuple[float, float]]]
"""By dtype, (FLOP, bytes read and written) of each kernel of a step."""


class WorkCounter:
    """Adds up what operators do; views and operators without tensors are no kernels."""

    def __init__(self) -> None:
        self.work: Work = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if func.is_view or not isinstance(func, torch._ops.OpOverload):
            return
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        moved = sum(tensor.numel() * tensor.element_size() for tensor in (*given, *made))
        if not moved:
            return
        count = flop_registry.get(func._overloadpacket)
        flops = float(count(*args, **kwargs, out_val=result)) if count is not None else 0.0
        dtype = next((str(t.dtype).removeprefix("torch.") for t in given if t.is_floating_point()), "float32")
        self.work.setdefault(dtype, []).append((flops, float(moved)))

    def count_foreach(self, args: tuple[Any, ...]) -> None:
        """An optimizer's kernel over lists of tensors."""
        lists = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        moved = sum(tensor.numel() * tensor.element_size() for tensor in lists)
        self.work.setdefault("float32", []).append((0.0, float(moved)))


def step_seconds(work: Work, machine: Machine) -> float:
    """Seconds of the kernels one after the other, but no less than the host needs to launch them.

    `PlanError` where the machine has no peak for a dtype of the step."""
    busy, kernels = 0.0, 0
    for dtype, rows in work.items():
        name = dtype if dtype in ("float16", "bfloat16") else "float32"
        busy += float(machine.compute_seconds([r[0] for r in rows], [r[1] for r in rows], name).sum())
        kernels += len(rows)
    if not kernels:
        raise PlanError("the step has no kernel to time")
    return max(busy, kernels * machine.device.launch)
