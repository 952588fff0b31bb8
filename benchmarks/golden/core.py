"""Training on one device: fingerprints, every step's event, checkpoints; each run again stopped and resumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import weft
from benchmarks.golden import digests
from benchmarks.golden.adapter import train
from benchmarks.golden.models import NETS
from benchmarks.golden.runner import Case

RUNS: dict[str, tuple[str, dict[str, Any]]] = {  # the network, and the options of weft.train
    "exact": ("mlp", {}),
    "exact-m2-iid": ("mlp", {"microbatches": 2, "stream": "iid"}),
    "exact-fair": ("mlp", {"stream": "fair", "schedule": "constant"}),
    "delayed": ("mlp", {"consistency": "delayed(3)"}),
    "lagged": ("mlp", {"consistency": "lagged(4)", "microbatches": 2}),
    "bounded": ("mlp", {"consistency": "bounded(4, 3)", "microbatches": 2, "clip": "global:1.0"}),
    "mixed": ("conv", {"consistency": {"shared": "lagged(2)"}, "clip": 1.0, "warmup_steps": 3}),
    "bf16": ("mlp", {"precision": "bf16", "consistency": "bounded(2, 3)"}),
    "adamw-bn": ("conv", {"optimizer": ("adamw", {"lr": 2e-3, "weight_decay": 0.1})}),
    "sandwich-distil": ("mlp", {"stream": "sandwich:1", "microbatches": 3, "distill": True}),
    "validated": ("mlp", {"validation": 6, "metrics": {"accuracy": weft.accuracy}}),
    "gpt": ("gpt", {"optimizer": ("adamw", {"lr": 1e-3}), "consistency": "bounded(2, 4)", "microbatches": 2}),
    "elastic": ("elastic", {}),
    "elastic-gpt": ("elastic-gpt", {"consistency": "bounded(2, 4)", "microbatches": 2, "clip": "global:1.0"}),
    "muon": ("gpt", {"optimizer": ("muon", {"lr": 1e-2}), "consistency": "delayed(2)"}),
}
TIMED = ("time", "seconds", "law", "train_config", "config")
"""Keys of events that say when, or have the words of a version."""
CLOCKED = ("offload", "residency")
"""Events that come by the clock, under the new word and the old one."""
STOP = 8


def options(**given: Any) -> dict[str, Any]:
    return {"steps": 24, "batch_size": 12, "seed": 3, "checkpoint_every": STOP, "keep_checkpoints": 10, **given}


def about(trained: Any) -> dict[str, Any]:
    """What a finished run is compared by."""
    run = weft.Run.open(trained.path)
    events = [{k: v for k, v in event.items() if k not in TIMED} for event in run.events.read()]
    steps = [event for event in events if event["event"] == "step"]
    loaded = run.checkpoints.load(run.checkpoints.steps()[-1])
    return {
        "fingerprint": trained.fingerprint,
        "steps": digests.sha(steps),
        "step keys": sorted(steps[-1]),
        "loss": steps[-1]["loss"],
        "events": dict(Counter(event["event"] for event in events if event["event"] not in CLOCKED)),
        "checkpoints": run.checkpoints.steps(),
        "checkpoint": digests.tensors(loaded.tensors),
        "names": digests.sha(sorted(loaded.tensors)),
    }


def stopped(net: Any, data: Any, name: str, folder: Path, **given: Any) -> None:
    """A run that is interrupted right after its first checkpoint."""

    def stop(event: Any) -> None:
        if event["event"] == "checkpoint" and event["at"] == STOP:
            raise KeyboardInterrupt

    try:
        train(net, data, name=name, folder=folder, callbacks=[stop], **given)
    except KeyboardInterrupt:
        return
    raise AssertionError(f"the run '{name}' was not interrupted")


def one(name: str, folder: Path) -> dict[str, Any]:
    kind, given = RUNS[name]
    return about(train(*NETS[kind], name=name, folder=folder, **options(**given)))


def resumed(name: str, folder: Path) -> dict[str, Any]:
    kind, given = RUNS[name]
    stopped(*NETS[kind], f"{name}-r", folder, **options(**given))
    return about(train(*NETS[kind], name=f"{name}-r", folder=folder, resume=True, **options(**given)))


def offloaded(folder: Path) -> dict[str, Any]:
    return about(train(*NETS["mlp"], name="offload", folder=folder, offload="420KiB", **options()))


def initial(folder: Path) -> dict[str, Any]:
    """A run that begins with the weights of another."""
    before = train(*NETS["mlp"], name="before", folder=folder, **options(steps=8))
    return about(
        train(*NETS["mlp"], name="after", folder=folder, init_from=weft.Run.open(before.path), **options(steps=8))
    )


def retrained(folder: Path) -> dict[str, Any]:
    """One subnet alone, from scratch and from the supernet's weights."""
    before = train(*NETS["mlp"], name="whole", folder=folder, **options(steps=8))
    subnet = before.chain.largest()
    found = {}
    for name, inherit in (("scratch", False), ("inherited", True)):
        again = weft.retrain(before, subnet, steps=8, inherit=inherit, run=name)
        found[name] = again.fingerprint
    return found


def cases() -> Iterator[Case]:
    for name in RUNS:
        yield f"train/{name}", lambda folder, name=name: one(name, folder)
        yield f"train/{name}/resumed", lambda folder, name=name: resumed(name, folder)
    yield "train/exact/offload", offloaded
    yield "train/init", initial
    yield "retrain", retrained
