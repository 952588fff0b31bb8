"""Plans of small models of many kinds: mesh, stages, the split of every operator, and every predicted figure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import weft
from benchmarks.golden.adapter import call, first
from benchmarks.golden.models import ConvNet, Encoder, digits_mlp, gpt2, mixtral, plain_mlp, recurrent, zoo_gpt
from benchmarks.golden.runner import Case

Made = Callable[[], tuple[torch.nn.Module, Any]]


def wide_gpt2() -> tuple[torch.nn.Module, Any]:
    with torch.device("meta"):
        return gpt2(2, 512)


def wide_conv() -> tuple[torch.nn.Module, Any]:
    with torch.device("meta"):
        return ConvNet(128), (torch.zeros(4, 3, 64, 64),)


def wide_encoder() -> tuple[torch.nn.Module, Any]:
    with torch.device("meta"):
        return Encoder(512, 2), (torch.zeros(4, 256, 512),)


PLANS: dict[str, tuple[Made, dict[str, Any]]] = {  # a model and its batch, and the options of weft.plan
    "mlp": (plain_mlp, {"devices": 4}),
    "mlp/sgd/bf16": (plain_mlp, {"devices": 2, "optimizer": "sgd", "dtype": "bfloat16"}),
    "conv": (wide_conv, {"devices": 8}),
    "encoder": (wide_encoder, {"devices": 8}),
    "encoder/mesh": (wide_encoder, {"devices": 8, "mesh": (2, 4), "stages": 1}),
    "encoder/v100": (wide_encoder, {"devices": 4, "machine": "v100", "dtype": "float16"}),
    "lstm": (recurrent, {"devices": 4}),
    "zoo-gpt": (zoo_gpt, {"devices": 2}),
    "gpt2": (wide_gpt2, {"devices": 4}),
    "gpt2/stages": (wide_gpt2, {"devices": 4, "stages": 2, "microbatches": 4}),
    "gpt2/recompute": (wide_gpt2, {"devices": 2, "recompute": True, "microbatches": 2, "stages": 1}),
    "gpt2/limited": (wide_gpt2, {"devices": 4, "memory": "24MiB"}),
    "gpt2/constrained": (wide_gpt2, {"devices": 4, "constraints": {"*.wte": "replicated"}}),
    "mixtral": (mixtral, {"devices": 4}),
}


def slow_clock() -> None:
    """Makes the planner's limits of time a hundred times as long, in CPU time: a busy machine must change no plan."""
    time.monotonic = lambda: time.process_time() / 100  # type: ignore[assignment]


def planned(made: Made, **given: Any) -> Any:
    model, batch = made()
    options = {"tolerance": 0.01, **given}
    machine = options.pop("machine", "h100")
    return call(first("weft.plan.planner:plan", "weft:plan"), model, batch, machine, **options)


def told(plan: Any) -> dict[str, Any]:
    """What a plan says, in words of this file."""
    found = plan.to_json()
    cost = {
        {"step_time": "step", "lower_bound": "bound"}.get(name, name): value for name, value in found["cost"].items()
    }
    return {
        "mesh": found["mesh"],
        "devices": [found["devices"], found.get("idle", found.get("unused_devices"))],
        "stages": found["stages"],
        "microbatches": found["microbatches"],
        "recompute": found["recompute"],
        "cost": {name: float(value).hex() for name, value in cost.items()},
        "splits": found.get("splits", found.get("shardings")),
        "stage": found["stage"],
        "compared": [
            {
                "name": row["name"],
                "mesh": row["mesh"],
                "step": row.get("step", row.get("step_time")),
                "memory": row["memory"],
            }
            for row in found.get("compared", found.get("comparisons", ()))
        ],
    }


def loaded(folder: Path) -> dict[str, Any]:
    """Saved, read, and priced anew."""
    before = planned(wide_gpt2, devices=4, stages=2, microbatches=4)
    before.save(folder / "plan.json")
    model, batch = wide_gpt2()
    try:
        load = first("weft.plan.planner:load", "weft.plan:load")
    except LookupError:
        return told(call(first("weft.plan.planner:plan"), model, batch, "h100", devices=4, load=folder / "plan.json"))
    return told(load(folder / "plan.json", model, batch))


def chain(folder: Path) -> dict[str, Any]:
    """Where a supernet is cut into stages."""
    plan = first("weft.plan:plan_chain", "weft.supernet.partition:plan_chain")
    made = weft.initialise(digits_mlp, 0)
    batch = weft.data.Loader(weft.data.digits().train, 16, 0, shuffle=False).batch(0)
    found = call(plan, made, batch, "h100", devices=2)
    return {name: getattr(found, name) for name in ("cut", "seconds", "bubble") if hasattr(found, name)}


def runs(folder: Path) -> dict[str, Any]:
    """What a plan cannot be run for, and the parts of one that can."""
    plan = planned(plain_mlp, devices=2)
    reasons = getattr(plan, "unsupported", None) or plan.reasons
    return {"reasons": reasons()}


def cases() -> Iterator[Case]:
    slow_clock()
    for name, (made, given) in PLANS.items():
        yield f"plan/{name}", lambda _, made=made, given=given: told(planned(made, **given))
    yield "plan/loaded", loaded
    yield "plan/chain", chain
    yield "plan/reasons", runs
