"""Runs and a study that are left half done by one tree, and finished by another: formats on disk must be read for good.

`--freeze` makes them, `--resume` goes on with copies. Each is compared with the same run done at one go by the tree
that resumes; and both with what the old tree gives.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import weft
from benchmarks.golden.adapter import search_gradient, train
from benchmarks.golden.core import STOP, options, stopped
from benchmarks.golden.models import NETS
from benchmarks.golden.runner import Case

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("conv", {"metrics": {"accuracy": weft.accuracy}, "consistency": {"shared": "lagged(2)"}, "clip": 1.0}),
    "gpt": ("gpt", {"optimizer": ("adamw", {"lr": 1e-3}), "consistency": "bounded(2, 4)", "microbatches": 2}),
    "elastic": ("elastic", {"warmup_steps": 3}),
    "distil": ("mlp", {"stream": "sandwich:1", "microbatches": 3, "distill": True}),
    "offload": ("mlp", {"offload": "560KiB", "microbatches": 2}),
}
GRADIENT: dict[str, tuple[str, dict[str, Any]]] = {
    "drnas": ("elastic", {"method": "drnas"}),
    "darts": ("mlp", {"method": "darts"}),
}
STAGES = ("bounded", ("mlp", {"consistency": "bounded(4, 3)", "microbatches": 2, "stages": 2}))
STUDY = "study"
README = """Half-trained runs, made by `python -m benchmarks.golden --freeze FOLDER` with PYTHONPATH at the old tree.
`--resume FOLDER` goes on with copies of them; this folder is only read.
"""


def freeze(folder: Path) -> None:
    """Leaves every run here half done."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True)
    for name, (kind, given) in RUNS.items():
        stopped(*NETS[kind], name, folder, **options(**given))
    for name, (kind, given) in GRADIENT.items():
        _stopped_search(*NETS[kind], name, folder, **options(**given))
    from benchmarks.golden.stages import stopped as stopped_stages

    name, (kind, given) = STAGES
    stopped_stages(*NETS[kind], name, folder, **_long(given))
    from benchmarks.golden.tune import half_done

    half_done(STUDY, folder)
    (folder / "README").write_text(README)
    print(f"{len(RUNS) + len(GRADIENT) + 2} half-done runs -> {folder}")


def _long(given: dict[str, Any]) -> dict[str, Any]:
    """Ctrl-C reaches stages a little later: the run is long enough not to be over by then."""
    return options(**given, steps=1000, checkpoint_every=STOP)


def _stopped_search(net: Any, data: Any, name: str, folder: Path, **given: Any) -> None:
    def stop(event: Any) -> None:
        if event["event"] == "checkpoint" and event["at"] == STOP:
            raise KeyboardInterrupt

    try:
        search_gradient(net, data, name=name, folder=folder, callbacks=[stop], bn_batches=0, **given)
    except KeyboardInterrupt:
        return
    raise AssertionError(f"the search '{name}' was not interrupted")


def run(frozen: Path, name: str, folder: Path) -> dict[str, Any]:
    kind, given = RUNS[name]
    return _both(
        frozen,
        name,
        folder,
        lambda called, **more: train(*NETS[kind], name=called, folder=folder, **options(**given), **more).fingerprint,
    )


def staged(frozen: Path, folder: Path) -> dict[str, Any]:
    name, (kind, given) = STAGES

    def work(called: str, **more: Any) -> Any:
        return train(*NETS[kind], name=called, folder=folder, **{**_long(given), **more}).fingerprint

    found = _both(frozen, name, folder, work)
    shutil.copytree(frozen / name, folder / "on-one")
    return {**found, "on one process": work("on-one", resume=True, stages=1)}


def search(frozen: Path, name: str, folder: Path) -> dict[str, Any]:
    kind, given = GRADIENT[name]

    def work(called: str, **more: Any) -> Any:
        found = search_gradient(*NETS[kind], name=called, folder=folder, bn_batches=0, **options(**given), **more)
        return [found.trained.fingerprint, found.subnet.id]

    return _both(frozen, name, folder, work)


def study(frozen: Path, folder: Path) -> dict[str, Any]:
    from benchmarks.golden.tune import whole

    shutil.copytree(frozen / STUDY, folder / STUDY)
    (folder / "new").mkdir()
    return {"resumed": whole(STUDY, folder, resume=True), "whole": whole(STUDY, folder / "new")}


def _both(frozen: Path, name: str, folder: Path, work: Any) -> dict[str, Any]:
    shutil.copytree(frozen / name, folder / name)
    at = weft.Run.open(folder / name).checkpoints.steps()[-1]
    return {"at": at, "resumed": work(name, resume=True), "whole": work("whole")}


def cases(frozen: str) -> Iterator[Case]:
    there = Path(frozen)
    for name in RUNS:
        yield f"run/{name}", lambda folder, name=name: run(there, name, folder)
    for name in GRADIENT:
        yield f"search/{name}", lambda folder, name=name: search(there, name, folder)
    yield "run/stages", lambda folder: staged(there, folder)
    yield "study", lambda folder: study(there, folder)
