"""Many trainings on one device: how long one study of 64 candidates takes, by the way it is run.

    python benchmarks/tune.py [--device cuda:0|cpu] [--json FILE] [--quick] [--scale S]
                              [--parts ways fusable uneven memory]
                              [--ways one n_jobs=2 ... fixed=4 fixed=4+graphs packed packed-eager fused] [--seconds S]

The study mixes small and large transformers, convolutional nets and perceptrons (benchmarks/tune_models.py), and every
way trains the same candidates for the same steps. `one`: one trial at a time in one process that has the whole device.
`n_jobs=K`: Optuna's own, K threads of one process. `fixed=K`: K processes, each with a K-th of the memory, as a fixed
fraction of a device a trial would be; a candidate that does not fit is run again alone. `packed`: weft, admitted by
estimated memory and by measured slowdown. `fused`: the same, and candidates of one shape train as one. Steps of weft's
own ways are replayed as CUDA graphs on a GPU, those of the others run as they are, since that is what people have;
`one+graphs` and `fixed=K+graphs` replay them too, `packed-eager` and `fused-eager` do not, so that each gain can be
told apart (`n_jobs` has no such form: threads of one process cannot capture side by side). Rows are `part, way, graphs,
mps, makespan_s, ratio, oom, mean_memory_used, communication_share, trials, failed, same`: `ratio` is to `one`,
`mean_memory_used` the device's mean over the makespan as its driver tells it (part of all of it), `oom` the trials that
ran out of memory (`exceeded`: which, with the bytes that each was given and needed), `spans` when each ran, `same`
those whose result is that of `one` to the bit. On one device nothing is communicated. Rows that FILE holds already are
not run again; after `--seconds` nothing is begun.

Part `fusable` runs the candidates that can be fused by themselves; `uneven` is the study with large candidates that
take a third to more than half of the device, so that no fraction is right for all; `memory` packs candidates of all
sizes with a few steps each, to see whether any estimate was too small.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import read_rows, write
from tune_models import candidates, fusable, recipe, space, various

import weft
from weft.runs import Events
from weft.space import Value
from weft.tune.devices import CONTROL
from weft.tune.recipe import trial_config
from weft.tune.training.cuda_graphs import MIN_STEPS
from weft.tune.training.memory_limit import OutOfMemory
from weft.tune.training.run_job import Trial
from weft.tune.training.trainer import train
from weft.utils.units import parse_bytes

WAYS = (
    *("one", "packed", "fused", "fixed=4", "fixed=8", "fixed=2", "n_jobs=4", "n_jobs=8", "n_jobs=2"),
    *("one+graphs", "fixed=8+graphs", "packed-eager", "fused-eager"),
)
UNEVEN = ("packed", "fused", "fixed=4", "one", "fixed=2", "fixed=8")
Params = dict[str, Value]


def trained(trial: Trial, graphs: bool = False) -> float:
    """A candidate as a function: what a fixed fraction runs."""
    made = trial_config(recipe(cuda_graphs=graphs), trial.params)
    found = train(made, None, device=trial.device, directory=trial.directory, report=lambda step, values: False)
    return found.values[0]


def replayed(trial: Trial) -> float:
    """The same with CUDA graphs."""
    return trained(trial, True)


@contextmanager
def watched(device: str) -> Iterator[list[float]]:
    """Samples the memory that the device's driver says is used, as a part of all of it."""
    found: list[float] = []
    done = threading.Event()

    def look() -> None:
        index = device.partition(":")[2] or "0"
        asked = ["nvidia-smi", f"--id={index}", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]
        while not done.wait(0.25):
            used, total = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split(",")
            found.append(float(used) / float(total))

    thread = threading.Thread(target=look, daemon=True) if device.startswith("cuda") else None
    if thread:
        thread.start()
    try:
        yield found
    finally:
        done.set()
        if thread:
            thread.join()


def by_weft(wanted: Sequence[Params], device: str, folder: Path, fused: bool = False, **options: Any) -> dict[str, Any]:
    """A study of weft's own, each candidate enqueued."""
    began = time.time()
    found = weft.tune(
        options.pop("objective", recipe()),
        space(),
        trials=len(wanted),
        enqueue=wanted,
        maximize="accuracy",
        sampler="random",
        max_concurrent=len(wanted) + 1,
        fuse=len(wanted) if fused else 1,
        devices=[device],
        name="study",
        folder=folder,
        **options,
    )
    events = list(Events(found.path / "events.jsonl").read())
    short = [event for event in events if event["event"] == "exceeded"]
    return {
        "oom": len({number for event in short for number in event["trials"]}),
        "exceeded": [{key: event[key] for key in ("trials", "memory", "needed")} for event in short],
        "spans": spans(events, began),
        "failed": sum(record.state == "failed" for record in found.trials),
        "values": [None if record.values is None else record.values[0] for record in found.trials],
    }


def spans(events: Sequence[Mapping[str, Any]], began: float) -> list[tuple[int, float, float, float]]:
    """Of every attempt at a trial: its number, when it was given a device and when it ended, in seconds from the start,
    and how many of them it ran, without the start of its process."""
    placed: dict[int, float] = {}
    found = []
    for event in events:
        for number in event["trials"] if event["event"] in ("placed", "exceeded", "ended") else ():
            at = round(event["time"] - began, 2)
            if event["event"] == "placed":
                placed[number] = at
            elif number in placed:
                found.append((number, placed.pop(number), at, round(event.get("seconds") or 0.0, 2)))
    return found


def by_optuna(jobs: int, wanted: Sequence[Params], device: str, folder: Path) -> dict[str, Any]:
    """Optuna's `n_jobs`: threads of this process."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize")
    for number in range(len(wanted)):
        study.enqueue_trial({"number": number})
    values: list[float | None] = [None] * len(wanted)
    short = 0

    def objective(trial: optuna.Trial) -> float:
        nonlocal short
        number = trial.suggest_int("number", 0, len(wanted) - 1)
        made = trial_config(recipe(cuda_graphs=False), wanted[number])
        place = folder / str(number)
        place.mkdir()
        try:
            found = train(made, None, device=device.partition("=")[0], directory=place, report=lambda step, seen: False)
        except OutOfMemory:
            short += 1
            raise
        values[number] = found.values[0]
        return found.values[0]

    study.optimize(objective, n_trials=len(wanted), n_jobs=jobs, catch=(Exception,))
    return {"oom": short, "failed": sum(value is None for value in values), "values": values}


def runner(way: str, total: int, mps: str) -> Callable[[Sequence[Params], str, Path], dict[str, Any]]:
    """How a study is run, by the name of the way."""
    name, _, count = bare(way).partition("=")
    if name == "n_jobs" and not graphs(way):
        return partial(by_optuna, int(count))
    if name not in ("one", "fixed", "packed", "fused"):
        raise ValueError(f"there is no way '{way}'")
    objective = replayed if graphs(way) else trained
    if name == "fixed":
        return partial(by_weft, objective=objective, workers=int(count), memory=total // int(count), mps=mps)
    if name == "one":
        return partial(by_weft, objective=objective, jobs_per_device=1, mps=mps)
    return partial(by_weft, fused=name == "fused", mps=mps, objective=recipe(cuda_graphs=graphs(way)))


def graphs(way: str) -> bool:
    """Whether steps are replayed as CUDA graphs, where there is a GPU."""
    return way.endswith("+graphs") or way in ("packed", "fused")


def bare(way: str) -> str:
    return way.removesuffix("+graphs").removesuffix("-eager")


def measured(part: str, way: str, mps: str, wanted: Sequence[Params], device: str, total: int) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="weft-tune-"))
    try:
        with watched(device) as used:
            began = time.perf_counter()
            told = runner(way, total, mps)(wanted, device, folder)
            seconds = time.perf_counter() - began
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "part": part,
        "way": way,
        "graphs": graphs(way) and device.startswith("cuda"),
        "asked": mps,
        "mps": mps == "auto" and device.startswith("cuda") and shutil.which(CONTROL) is not None,
        "makespan_s": round(seconds, 2),
        "mean_memory_used": round(sum(used) / len(used), 4) if used else None,
        "communication_share": 0.0,
        "trials": len(wanted),
        **told,
    }


def finished(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with their ratio to one at a time, and how many results are the same."""
    found = []
    for row in rows:
        base = next((other for other in rows if (other["part"], other["way"]) == (row["part"], "one")), None)
        ratio = None if base is None else round(base["makespan_s"] / row["makespan_s"], 3)
        same = None if base is None else sum(a == b for a, b in zip(row["values"], base["values"], strict=True))
        found.append({**row, "ratio": ratio, "same": same})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu=4GiB")
    parser.add_argument("--json")
    parser.add_argument("--quick", action="store_true", help="few candidates, few steps")
    parser.add_argument("--scale", type=float, default=1.0, help="of the steps of every candidate")
    parser.add_argument("--parts", nargs="+", default=["ways", "fusable", "uneven", "memory"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which nothing is begun")
    arguments = parser.parse_args()
    device, quick, start = arguments.device, arguments.quick, time.perf_counter()
    torch.set_num_threads(1)
    name, _, memory = device.partition("=")
    total = int(parse_bytes(memory)) if memory else torch.cuda.get_device_properties(name).total_memory
    rows = read_rows(arguments.json)
    # In the order of what is wanted most. With MPS processes share the device at once; threads of one need none.
    shared, off = [way for way in arguments.ways if bare(way) != "one" and "n_jobs" not in way], "off"
    ways = [("ways", way, "auto") for way in shared]
    plans = [("ways", "one", off), *ways[:2]]
    plans += [("fusable", "one", off), ("fusable", "fused", "auto"), ("fusable", "packed", "auto")]
    plans += [("ways", "one+graphs", off)]
    plans += [("fusable", way, "auto") for way in shared if way in ("fused-eager", "packed-eager")]
    plans += [("uneven", way, off if way == "one" else "auto") for way in UNEVEN]
    plans += [*ways[2:], ("ways", "packed", off), ("ways", "fused", off), ("memory", "packed", "auto")]
    plans += [("ways", way, off) for way in arguments.ways if "n_jobs" in way] + [("ways", "fixed=4", off)]
    plans = [each for each in plans if each[0] not in ("ways", "uneven") or each[1] in arguments.ways]
    lists: dict[str, list[Params]] = {
        "ways": candidates(16, 0.02, tiny=True) if quick else candidates(scale=arguments.scale),
        # Fewer steps would not be captured.
        "memory": [{**one, "steps": MIN_STEPS} for one in (various(16, 64) if quick else various())],
    }
    lists["uneven"] = lists["ways"] if quick else candidates(scale=arguments.scale, huge=True)
    lists["fusable"] = [one for one in lists["ways"] if fusable(one)]
    measured("start", "packed", "off", candidates(1, 0.01, tiny=True), device, total)  # libraries are read once
    for part, way, mps in plans:
        done = any((row["part"], row["way"], row["asked"]) == (part, way, mps) for row in rows)
        if done or part not in arguments.parts or time.perf_counter() - start > arguments.seconds:
            continue
        rows.append(measured(part, way, mps, lists[part], device if memory else name, total))
        shown = {key: value for key, value in finished(rows)[-1].items() if key not in ("values", "spans")}
        print(shown, flush=True)
        write(arguments.json, rows=finished(rows), candidates={name: lists[name] for name in arguments.parts})


if __name__ == "__main__":
    main()
