"""reference/api.md: the public names of weft with the first words of their docstrings; `make docs` puts in the rest."""

from __future__ import annotations

import inspect
import re
from typing import Any

import weft

OPENING = """# Python names

Made by `python -m docs.scripts` from the docstrings of the names in `weft.__all__`. The site that `make docs`
builds has each docstring whole, with its members. `weft.data`, `weft.elastic`, `weft.zoo` and `weft.plan` are
packages with more: `help(weft.elastic)` lists them.
"""
SECTIONS = {
    "Spaces and streams": ("Space", "Subnet", "Stream", "make_stream"),
    "Supernets": ("Chain", "Shared", "Choice", "Optional", "Elastic", "initialise", "extract", "from_transformers"),
    "Data": ("Data", "Tensors", "Loader", "ShiftFlip"),
    "Training": (
        *("train", "retrain", "load_run", "TrainedRun", "Optimizer", "Validation", "OffloadConfig"),
        *("TensorBoard", "Run"),
    ),
    "Losses and metrics": ("cross_entropy", "Distillation", "accuracy"),
    "Consistency": ("Exact", "Delayed", "Lagged", "Bounded"),
    "Searching": ("search", "search_gradient", "Front"),
    "Tuning and estimates": ("tune", "estimate", "Estimate"),
    "Errors": ("WeftError",),
}


def page() -> str:
    parts = [OPENING]
    for heading, names in SECTIONS.items():
        parts.append(f"\n## {heading}\n")
        parts += [_entry(name) for name in names]
    return "".join(parts)


def _entry(name: str) -> str:
    thing = _home(name)
    kind = "class" if inspect.isclass(thing) else "function"
    return f"\n### `weft.{name}`\n\n{kind} `{thing.__module__}.{thing.__qualname__}`: {_first(thing)}\n"


def _home(name: str) -> Any:
    """What a public name stands for; `search` and `tune` are packages that can be called."""
    if name in ("search", "tune"):
        return getattr(__import__(f"weft.{name}.api", fromlist=[name]), name)
    return getattr(weft, name)


def _first(thing: Any) -> str:
    """The first sentence of a docstring."""
    text = " ".join(inspect.cleandoc(thing.__doc__ or "").split("\n\n")[0].split()).replace("``", "`")
    return re.split(r"(?<=[.:;])\s+(?=[A-Z`])", text)[0]
