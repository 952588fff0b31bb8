"""The planner: from a model and a machine to where everything goes.

``weft.plan(model, batch, "h100", devices=8)`` is ``planner.plan``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from weft.utils.imports import make_callable

if TYPE_CHECKING:
    from torch import nn

    from weft.hardware.machine import DeviceSpec, Link, Machine
    from weft.hardware.presets import PRESETS
    from weft.plan.chain import ChainPlan, plan_chain
    from weft.plan.options import PlanOptions
    from weft.plan.plan import Plan
    from weft.plan.planner import load

_HOMES = {
    "PRESETS": "weft.hardware.presets",
    "ChainPlan": "weft.plan.chain",
    "DeviceSpec": "weft.hardware.machine",
    "Link": "weft.hardware.machine",
    "Machine": "weft.hardware.machine",
    "Plan": "weft.plan.plan",
    "PlanOptions": "weft.plan.options",
    "load": "weft.plan.planner",
    "plan_chain": "weft.plan.chain",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'weft.plan' has no attribute '{name}'")


def _plan(
    model: nn.Module,
    batch: Any,
    machine: Any = "h100",
    *,
    devices: int,
    loss: Any = None,
    options: PlanOptions | None = None,
    **fields: Any,
) -> Plan:
    """The fastest way to train the model with this batch on so many devices; see ``weft.plan.planner.plan``."""
    from weft.plan.planner import plan

    return plan(model, batch, machine, devices=devices, loss=loss, options=options, **fields)


make_callable(__name__, _plan)

__all__ = ["PRESETS", "ChainPlan", "DeviceSpec", "Link", "Machine", "Plan", "PlanOptions", "load", "plan_chain"]
