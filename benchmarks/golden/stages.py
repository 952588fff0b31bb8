"""The runs of `core` on 2 and 3 processes, which must have the same bits; and one resumed on another number of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import weft
from benchmarks.golden.adapter import train
from benchmarks.golden.core import RUNS, STOP, about, options
from benchmarks.golden.models import NETS
from benchmarks.golden.runner import Case

WAYS: dict[str, dict[str, Any]] = {
    "2": {"stages": 2},
    "3": {"stages": 3, "cut": [2, 3]},
}
THREE = ("exact-m2-iid", "bounded", "gpt", "elastic")
"""Runs that three processes train too."""
MORE: dict[str, tuple[str, dict[str, Any]]] = {  # of one run only
    "2-split": ("exact-m2-iid", {"stages": 2, "split_backward": True}),
    "2-narrow": ("delayed", {"stages": 2, "max_in_flight": 1}),
    "2-offload": ("lagged", {"stages": 2, "offload": "720KiB"}),
}


def one(name: str, folder: Path, **way: Any) -> dict[str, Any]:
    kind, given = RUNS[name]
    return shared(train(*NETS[kind], name="staged", folder=folder, **options(**given), **way))


def shared(trained: Any) -> dict[str, Any]:
    """What does not depend on the stages."""
    return {name: value for name, value in about(trained).items() if name not in ("events", "step keys")}


def stopped(net: Any, data: Any, name: str, folder: Path, **given: Any) -> None:
    """A run on several processes that Ctrl-C stops after its first checkpoint, somewhere; it is left there."""

    def stop(event: Any) -> None:
        if event["event"] == "checkpoint" and event["at"] == STOP:
            os.kill(os.getpid(), signal.SIGINT)

    try:
        train(net, data, name=name, folder=folder, callbacks=[stop], **given)
    except KeyboardInterrupt:
        return
    raise AssertionError(f"the run '{name}' was not interrupted")


def elsewhere(folder: Path) -> dict[str, Any]:
    """Begun on two processes, ended on one."""
    kind, given = RUNS["bounded"]
    long = options(**given, steps=400)
    stopped(*NETS[kind], "moved", folder, stages=2, **long)
    moved = shared(train(*NETS[kind], name="moved", folder=folder, resume=True, **long))
    whole = shared(train(*NETS[kind], name="whole", folder=folder, **long))
    assert moved["fingerprint"] == whole["fingerprint"], "a run that moved from two processes to one has other bits"
    return moved


def gradient(folder: Path) -> dict[str, Any]:
    from benchmarks.golden.search import gradient_search

    return gradient_search("drnas", folder, stages=2)


def cases() -> Iterator[Case]:
    assert weft.Run  # torch and weft are loaded before the first case is timed
    for name in RUNS:
        for way, given in WAYS.items() if name in THREE else list(WAYS.items())[:1]:
            yield f"train/{name}/{way}", lambda folder, name=name, given=given: one(name, folder, **given)
    for way, (name, given) in MORE.items():
        yield f"train/{name}/{way}", lambda folder, name=name, given=given: one(name, folder, **given)
    yield "moved/bounded", elsewhere
    yield "search/drnas/2", gradient
