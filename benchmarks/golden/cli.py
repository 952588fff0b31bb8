"""What each verb prints with --json, without times and places."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.golden import digests
from benchmarks.golden.adapter import Word, command
from benchmarks.golden.runner import Case
from benchmarks.golden.serve import OF_A_STUDY, STUDY

CONFIG = """
run = "net"
supernet = "digits-mlp"
data = "digits"
[train]
steps = 24
batch_size = 12
[search]
budget = 12
maximize = "accuracy"
minimize = "flops"
"""
CODE = """
import torch
from torch import nn

def tuned(params):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, params["width"]), nn.ReLU(), nn.Linear(params["width"], 10))

def planned():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)), (torch.zeros(32, 64),)
"""
VERBS: dict[str, tuple[Word, ...]] = {  # in order: later ones read what earlier ones left
    "zoo": ("zoo",),
    "train --dry-run": ("train", "net.toml", "--dry-run"),
    "simulate": ("simulate", "net.toml", "--stages", "1,2,4", "--costs", "equal", "--steps", "60"),
    "simulate --jitter": ("simulate", "net.toml", "--stages", "2", "--costs", "equal", "--jitter", "0.25"),
    "train": ("train", "net.toml"),
    "train --resume": ("train", "net.toml", "--resume"),
    "search": ("search", "runs/net"),
    "search --method": ("search", "net.toml", "--method", "drnas", "--run=mixed", "--train.steps=8"),
    "export": ("export", "runs/net"),
    "verify": ("verify", "net.toml", "--stages", "1,2", "--steps", "6"),
    "tune": ("tune", "tune.toml", *OF_A_STUDY),
    "plan": ("plan", "golden_cli:planned", "--devices", "2"),
    "estimate": ("estimate", "golden_cli:planned"),
    "runs": ("runs",),
    "unknown key": ("train", "net.toml", "--train.stpes=3"),
    "unknown run": ("search", "runs/nowhere"),
}


def printed(*words: Word) -> dict[str, Any]:
    code, text = command(*words, "--json")
    try:
        values = json.loads(text)
    except ValueError:
        lines = text.strip().splitlines()
        return {"exit code": code, "lines": len(lines)}
    return {"exit code": code, "json": digests.lasting(values, ("config", "law"))}


def prepared(folder: Path) -> None:
    """The folder that all verbs work in."""
    import sys

    (folder / "golden_cli.py").write_text(CODE)
    (folder / "net.toml").write_text(CONFIG)
    (folder / "tune.toml").write_text(
        STUDY.replace("golden_net:tuned", "golden_cli:tuned").replace("golden_net:load", "digits")
    )
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join((os.environ.get("PYTHONPATH", ""), str(folder)))


def cases() -> Iterator[Case]:
    yield "the folder", lambda folder: prepared(folder)
    for name, words in VERBS.items():
        yield f"weft {name}", lambda _, words=words: printed(*words)
