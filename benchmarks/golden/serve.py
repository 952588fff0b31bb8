"""The dashboard's documents about real small runs: their structure, and the values of those that no clock decides."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.golden import digests
from benchmarks.golden.adapter import Word, command, first
from benchmarks.golden.runner import Case

CODE = """
from functools import partial
import torch
from torch import nn
from weft import Chain, Choice, Data, Shared, Space, Tensors

def build(width=16):
    space = Space()
    paths = {"wide": partial(nn.Linear, width, width), "thin": partial(nn.Linear, width, width), "skip": nn.Identity}
    blocks = [Choice(space, f"block{i}", paths) for i in range(4)]
    return Chain(Shared(partial(nn.Linear, 4, width), "stem"), *blocks, Shared(partial(nn.Linear, width, 3), "head"))

def load(samples=64):
    def part(seed):
        x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed))
        return Tensors(x=x, y=x[:, :3].argmax(-1))
    return Data("numbers", part(0), part(1), part(2))

def tuned(params):
    return nn.Sequential(nn.Linear(4, params["width"]), nn.ReLU(), nn.Linear(params["width"], 3))

def planned():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)), (torch.zeros(32, 64),)
"""
CONFIG = """
run = "net"
supernet = "golden_net:build"
data = "golden_net:load"
[train]
steps = 24
batch_size = 8
[search]
budget = 12
maximize = "accuracy"
minimize = "flops"
"""
STUDY = """
[study]
name = "study"
trials = 4
maximize = "accuracy"
[space]
lr = { low = 1e-3, high = 1e-1, log = true }
width = [4, 8]
[recipe]
model = "golden_net:tuned"
data = "golden_net:load"
steps = 8
batch_size = 8
"""
OF_A_STUDY: tuple[Word, ...] = (
    ("--study.jobs_per_device=1", "--study.workers=1"),
    ("--study.max_concurrent=2", "--study.window=1"),
    ("--recipe.report_every=4", "--recipe.report=4"),
)
VALIDATION: Word = ("--run.validation=12", "--train.validate=12")
OF_A_TRACE: tuple[Word, ...] = (
    ("--execution.trace=true", "--train.trace=true"),
    ("--offload.budget=1MiB", "--residency.budget=1MiB"),
)
COMMANDS: tuple[
    tuple[Word, ...], ...
] = (  # what fills the folder: a run on two stages, one on one, and of each kind one
    ("train", "net.toml", "--stages", "2", VALIDATION, *OF_A_TRACE),
    ("train", "net.toml", VALIDATION, ("--run.name=one", "--run=one")),
    ("search", "runs/net"),
    ("search", "net.toml", "--method", "drnas", VALIDATION, ("--run.name=mixed", "--run=mixed"), "--train.steps=8"),
    ("tune", "tune.toml", *OF_A_STUDY),
    ("plan", "golden_net:planned", "--devices", "2", "--save", "small"),
)
VIEWS = ("curves", "pipeline", "search", "tune")
STEADY = ("search",)
"""Views whose values no clock decides."""


def filled(folder: Path) -> None:
    """The folder with its runs, which the process then works in."""
    (folder / "golden_net.py").write_text(CODE)
    (folder / "net.toml").write_text(CONFIG)
    (folder / "tune.toml").write_text(STUDY)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join((os.environ.get("PYTHONPATH", ""), str(folder)))
    for words in COMMANDS:
        code, text = command(*words)
        if code:
            raise AssertionError(f"weft {' '.join(map(str, words))} ended with {code}: {text[-300:]}")


def document(library: Any, *address: str) -> Any:
    return json.loads(library.get(address).body)


def about(found: Any, steady: bool) -> dict[str, Any]:
    told = {"keys": sorted(found), "structure": digests.sha(digests.structure(found))}
    return {**told, "values": digests.sha(digests.lasting(found))} if steady else told


def made() -> Any:
    return first("weft.serve.library:Library").under(Path.cwd() / "runs")


def run(name: str) -> dict[str, Any]:
    """Its line, and each of its views."""
    library, found = made(), {}
    found["line"] = about(document(library, "runs", name), False)
    for view in VIEWS:
        with contextlib.suppress(LookupError):
            found[view] = about(document(library, "runs", name, view), view in STEADY and name != "net")
    return found


def listed() -> dict[str, Any]:
    found = document(made(), "runs")
    return {
        "runs": {line["name"]: sorted(line) for line in found["runs"]},
        "plans": [plan["name"] for plan in found["plans"]],
    }


def report() -> dict[str, Any]:
    """The page as one file: whether it is made, and that it asks for nothing from elsewhere."""
    code, _ = command("report", "runs/one", "--out", "page.html")
    text = Path("page.html").read_text() if Path("page.html").exists() else ""
    return {"exit code": code, "elsewhere": 'src="http' in text, "is a page": text[:15].lower() == "<!doctype html>"}


def cases() -> Iterator[Case]:
    yield "the folder", lambda folder: filled(folder)
    yield "runs", lambda _: listed()
    for name in ("net", "one", "mixed", "study"):
        yield f"run/{name}", lambda _, name=name: run(name)
    yield "plan", lambda _: about(document(made(), "plans", "small"), False)
    yield "report", lambda _: report()
