"""Measures what training steps take on the GPU: peaks of each phase, and, beside them, what single operators take.

Each configuration has a process of its own: where the driver puts memory depends on what a process had before.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from memory_configurations import OPTIMIZERS, SETS, Configuration, configurations
from memory_models import Batch, Loss, build
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weft.nn.checkpointing import recompute

STEPS = 3
FORK = multiprocessing.get_context("fork")
MAKERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def measure(config: Configuration, model: nn.Module, batch: Batch, loss: Loss) -> dict[str, Any]:
    """The peaks of a configuration: bytes allocated in each phase of each step, and reserved at the end."""
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=400_000)
    began = time.time() * 1e6
    model = copy.deepcopy(model)
    if config.recompute:
        recompute(model)
    model = model.to("cuda")
    batch = {key: value.to("cuda") for key, value in batch.items()}
    optimizer = MAKERS[config.optimizer](model.parameters(), **OPTIMIZERS[config.optimizer])
    peaks: list[list[int]] = []
    marks: list[float] = []

    def boundary() -> int:
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        marks.append(time.time() * 1e6)
        return peak

    for _ in range(STEPS):
        torch.cuda.synchronize()
        boundary()
        optimizer.zero_grad(set_to_none=True)
        low = config.dtype == "bfloat16"
        with torch.autocast("cuda", torch.bfloat16) if low else nullcontext():
            value = model(**batch).loss if loss is None else loss(model(batch["x"]), batch)
        phases = [boundary()]
        value.backward()
        phases.append(boundary())
        optimizer.step()
        phases.append(boundary())
        peaks.append(phases)
        torch.cuda.synchronize()
        del value
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    reserved = torch.cuda.memory_reserved()
    found = {"phases": peaks, "allocated": max(map(max, peaks)), "reserved": reserved}
    return found | {"events": _events([e for e in trace if e["time_us"] >= began], marks)}


def _events(trace: list[dict[str, Any]], marks: list[float]) -> list[int]:
    """Sizes of allocations, and the negative numbers of those freed; 0 stands between phases."""
    events: list[int] = []
    number: dict[int, int] = {}
    count, place = 0, 0
    for entry in trace:
        while place < len(marks) and entry["time_us"] > marks[place]:
            events.append(0)
            place += 1
        if entry["action"] == "alloc":
            count += 1
            number[entry["addr"]] = count
            events.append(entry["size"])
        elif entry["action"] == "free_requested" and entry["addr"] in number:
            events.append(-number.pop(entry["addr"]))
    return events


class Probe(TorchDispatchMode):
    """The most bytes that each operator takes beside its results, by its arguments."""

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        torch.cuda.reset_peak_memory_stats()
        result = func(*args, **(kwargs or {}))
        after, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        key = json.dumps([str(func), _shape(args), _shape(kwargs or {})])
        if key not in self.found or self.found[key][0] < peak - after:
            self.found[key] = [peak - after, _shape(result)]
        return result


def _shape(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [str(value.dtype).removeprefix("torch."), list(value.shape), list(value.stride())]
    if isinstance(value, (tuple, list)):
        return [_shape(item) for item in value[:40]]
    if isinstance(value, dict):
        return {key: _shape(item) for key, item in value.items()}
    return value if isinstance(value, (int, float, bool, str, type(None))) else str(value)


def probe(config: Configuration, model: nn.Module, batch: Batch, loss: Loss, found: dict[str, Any]) -> None:
    model = copy.deepcopy(model).to("cuda")
    batch = {key: value.to("cuda") for key, value in batch.items()}
    with Probe(found):
        low = config.dtype == "bfloat16"
        with torch.autocast("cuda", torch.bfloat16) if low else nullcontext():
            value = model(**batch).loss if loss is None else loss(model(batch["x"]), batch)
        value.backward()


def measured(config: Configuration, model: nn.Module, batch: Batch, loss: Loss) -> dict[str, Any]:
    """The row of a configuration, from a process that has never been on the device."""
    here, there = FORK.Pipe(duplex=False)

    def work() -> None:
        try:
            row = measure(config, model, batch, loss)
        except Exception as error:
            row = {"error": repr(error)[:500]}
        there.send(row)

    process = FORK.Process(target=work)
    process.start()
    there.close()
    try:
        row: dict[str, Any] = here.recv()
    except EOFError:
        row = {"error": "the process ended"}
    process.join()
    return row


def main(which: str, number: int, folder: str, probed: bool) -> None:
    """Measures a model of a set; one line a configuration, so that a crash loses no more than one."""
    torch.set_num_threads(1)  # threads of a pool do not survive a fork
    before: tuple[str, Any] = ("", None)
    todo: dict[str, Any] = {}
    out = Path(folder)
    family, size, _ = SETS[which][number]
    with (out / f"{number}.jsonl").open("w") as rows:
        for config in configurations(which):
            if (config.family, config.size) != (family, size):
                continue
            key = f"{config.size} {config.batch}"
            if before[0] != key:
                torch.manual_seed(0)
                before = (key, build(config.family, config.size, config.batch))
            row = measured(config, *before[1])
            todo.setdefault(f"{key} {config.dtype}", (config, *before[1]))
            print(json.dumps({"name": config.name} | row), file=rows, flush=True)
    if probed:
        found: dict[str, Any] = {}
        for case in todo.values():
            probe(*case, found)
        (out / f"{number}.probe.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], len(sys.argv) > 4)
