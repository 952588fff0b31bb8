"""Studies: what was proposed, reported, pruned and kept, with the tensors of every checkpoint of every trial."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import weft
from benchmarks.golden import digests
from benchmarks.golden.adapter import known, recipe, tune, tune_function
from benchmarks.golden.models import digits, trial_mlp
from benchmarks.golden.runner import Case


def parabola(trial: Any) -> float:
    """Three reports on the way to (x - 0.3)^2 + y."""
    value = (float(trial["x"]) - 0.3) ** 2 + float(trial["y"])
    for step in (1, 2, 3):
        trial.report(value + 1 / step, step)
    return value


def two(trial: Any) -> dict[str, float]:
    x, y = float(trial["x"]), float(trial["y"])
    return {"near": (x - 0.3) ** 2 + y, "far": x * y}


def counting(trial: Any) -> float:
    """Five steps, each kept; trial 1 kills its process in the third, once."""
    state = trial.directory / "state.json"
    at, total, lives = json.loads(state.read_text()) if state.exists() else (0, 0.0, 0)
    lives += 1
    while at < 5:
        total += float(trial["x"]) * (at + 1)
        at += 1
        if at == 3 and lives == 1:
            state.write_text(json.dumps([at - 1, total - float(trial["x"]) * at, lives]))
            if trial.number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        trial.report(total, at)
    return total


def plane() -> Any:
    space = weft.Space()
    space.real("x", 0.0, 1.0)
    space.categorical("y", [0, 1, 2])
    return space


def grid() -> Any:
    space = weft.Space()
    space.categorical("x", [0.0, 0.25, 0.5])
    space.categorical("y", [0, 1])
    return space


def networks() -> Any:
    space = weft.Space()
    space.integer("width", [16, 64, 192])
    space.real("lr", 1e-3, 1e-1, log=True)
    space.real("dropout", 0.0, 0.3)
    return space


def training(**given: Any) -> Any:
    fields = {"steps": 8, "batch_size": 32, "report_every": 4, "metrics": {"accuracy": weft.accuracy}, **given}
    return recipe(model=trial_mlp, data=digits, **fields)


def widths(*wanted: int) -> list[dict[str, Any]]:
    return [{"width": width, "lr": 0.01 + 0.001 * at, "dropout": 0.1} for at, width in enumerate(wanted)]


Study = tuple[Callable[[], Any], Callable[[], Any], dict[str, Any]]
STUDIES: dict[str, Study] = {  # the objective, the space, and the options of weft.tune
    "function": (lambda: parabola, plane, {"trials": 12, "minimize": "value", "max_concurrent": 3}),
    "pruned": (
        lambda: parabola,
        plane,
        {"trials": 12, "minimize": "value", "pruner": "median", "sampler": "random", "max_concurrent": 2},
    ),
    "objectives": (
        lambda: two,
        plane,
        {"trials": 10, "minimize": ("near",), "maximize": ("far",), "sampler": "nsga2", "max_concurrent": 2},
    ),
    "grid": (lambda: parabola, grid, {"trials": 6, "minimize": "value", "sampler": "grid"}),
    "killed": (lambda: counting, plane, {"trials": 3, "minimize": "value", "sampler": "random"}),
    "recipe": (
        training,
        networks,
        {"trials": 4, "minimize": "loss", "pruner": "median", "max_concurrent": 2, "jobs_per_device": 1},
    ),
    "schedule": (
        lambda: training(
            optimizer="sgd", optimizer_options={"momentum": 0.9}, lr_schedule="cosine", warmup_steps=2, precision="bf16"
        ),
        networks,
        {"trials": 2, "minimize": "loss", "sampler": "random", "jobs_per_device": 1},
    ),
    "fused": (
        training,
        networks,
        {
            "trials": 4,
            "minimize": "loss",
            "sampler": "random",
            "enqueue": widths(16, 64, 16, 16),
            "fuse": 4,
            "max_concurrent": 4,
        },
    ),
    "small memory": (  # of these, one has to be trained in micro-batches or by recomputing
        lambda: training(batch_size=256),
        networks,
        {"trials": 2, "minimize": "loss", "enqueue": widths(16, 64), "sampler": "random", "devices": ["cpu=350KiB"]},
    ),
    "split": (
        lambda: training(steps=4, report_every=None),
        networks,
        {
            "trials": 1,
            "minimize": "loss",
            "enqueue": widths(192),
            "sampler": "random",
            "devices": ["cpu=760KiB", "cpu=760KiB"],
        },
    ),
    "study": (training, networks, {"trials": 4, "minimize": "loss", "max_concurrent": 1, "jobs_per_device": 1}),
}


def run(name: str, folder: Path, **more: Any) -> Any:
    objective, space, given = STUDIES[name]
    return tune(objective(), space(), name=name.replace(" ", "-"), folder=folder, seed=5, **{**given, **more})


def whole(name: str, folder: Path, **more: Any) -> dict[str, Any]:
    """The values of a study from beginning to end."""
    found = run(name, folder, **more)
    told = {
        "best": [record.number for record in getattr(found, "best_trials", getattr(found, "front", ()))],
        "importances": {key: value.hex() for key, value in found.importances.items()},
    }
    return told | {f"trial {record.number}": trial(record, found.path) for record in found.trials}


def trial(record: Any, path: Path) -> dict[str, Any]:
    notes = getattr(record, "info", None) or getattr(record, "notes", {})
    fit = notes.get("fit") or {}
    strategy = fit.get("strategy") or fit.get("way")
    folder = path / "trials" / str(record.number)
    return {
        "params": dict(record.params),
        "values": None if record.values is None else [float(value).hex() for value in record.values],
        "state": record.state,
        "reports": {str(step): [float(value).hex() for value in values] for step, values in record.reports.items()},
        "fit": {"full_batch": "whole"}.get(strategy, strategy),
        "fused": notes.get("fused"),
        "checkpoints": digests.safetensors_in(folder),
        "kept": kept(folder),
    }


def kept(folder: Path) -> dict[str, str]:
    """The plain values beside the tensors of each checkpoint, but for the words of a version."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*.json")):
        body = json.loads(path.read_text())
        if isinstance(body, Mapping) and "meta" in body:
            meta = {key: value for key, value in body["meta"].items() if key not in ("law", "config")}
            found[path.relative_to(folder).as_posix()] = digests.sha([body.get("step"), meta])
    return found


def resumed(folder: Path) -> dict[str, Any]:
    half_done("study", folder)
    return whole("study", folder, resume=True)


def half_done(name: str, folder: Path) -> None:
    """A study whose driver is interrupted when the second of its trials has ended."""
    seen: list[int] = []

    def stop(board: Any) -> None:
        events = [event for event in weft.Run.open(folder / name).events.read() if event["event"] == "ended"]
        if len(events) >= 2 and not seen:
            seen.append(1)
            raise KeyboardInterrupt

    try:
        run(name, folder, **{watch(): stop})
    except KeyboardInterrupt:
        return
    raise AssertionError(f"the study '{name}' was not interrupted")


def watch() -> str:
    """The word for what is told of a study's progress."""
    return "watch" if "watch" in known(tune_function()) else "callback"


def cases() -> Iterator[Case]:
    for name in STUDIES:
        yield f"study/{name}", lambda folder, name=name: whole(name, folder)
    yield "study/study/resumed", resumed
