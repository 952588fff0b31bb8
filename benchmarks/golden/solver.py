"""The planner's solver: cost and assignment on PaSE's published tables, and on PaSE's model built here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.golden import digests
from benchmarks.golden.adapter import call, first, tree
from benchmarks.golden.plan import slow_clock
from benchmarks.golden.runner import Case

MOST = 700_000
"""Bytes of the tables that are solved: the larger ones take most of the time and go the same ways."""
BATCH = {"alexnet": 128, "inception3": 128, "rnnlm": 64, "transformer": 64}


def solved(problem: Any) -> dict[str, Any]:
    found = call(first("weft.plan.solver:solve", "weft.plan.solve:solve"), problem, time_limit=120.0)
    assignment = found.assignment if hasattr(found, "assignment") else found.pick
    return {
        "cost": float(found.cost).hex(),
        "bound": float(found.bound).hex(),
        "assignment": digests.sha([int(one) for one in assignment]),
        "optimal": found.optimal,
        "weight": float(found.weight).hex(),
    }


def problem(*tables: Any) -> Any:
    return first("weft.plan.solver:Problem", "weft.plan.solve:Problem")(*tables)


def from_files(stem: Path, limit: float | None = None) -> Any:
    """Tables as PaSE's own code wrote them, perhaps with weights that have to fall below a part of the most."""
    about = json.loads(stem.with_suffix(".json").read_text())
    with np.load(stem.with_suffix(".npz"), allow_pickle=False) as arrays:
        unary = tuple(arrays[f"v{vertex['id']}"] for vertex in about["vertices"])
        pairs = {(i, j): arrays[f"e{i}_{j}"] for i, j in about["edges"]}
    if limit is None:
        return problem(unary, pairs)
    draw = np.random.default_rng(3)
    weights = tuple(draw.gamma(2.0, 1.0, len(costs)) for costs in unary)
    least, most = (sum(float(pick(each)) for each in weights) for pick in (np.min, np.max))
    return problem(unary, pairs, weights, least + limit * (most - least))


def from_model(graph: str, devices: int) -> Any:
    """PaSE's model, which is the library's or the benchmarks'."""
    import sys

    sys.path.append(str(tree() / "benchmarks"))
    tables = first("pase:tables", "benchmarks.pase:tables", "weft.plan.pase:tables")
    unary, pairs, _ = tables(graph, devices, BATCH[graph])
    return problem(tuple(unary), pairs)


def cases() -> Iterator[Case]:
    slow_clock()
    folder = Path(os.environ.get("WEFT_DATA", "")) / "pase"
    if not folder.is_dir():
        print("  solver: no folder pase under $WEFT_DATA: its tables are left out", flush=True)
    for path in sorted(folder.glob("*.npz")) if folder.is_dir() else ():
        if path.stat().st_size <= MOST:
            stem = path.with_suffix("")
            yield f"pase/{path.stem}", lambda _, stem=stem: solved(from_files(stem))
    for name in ("alexnet_p4_b128", "rnnlm_p4_b64"):
        if (folder / f"{name}.npz").exists():
            yield f"pase/{name}/limited", lambda _, stem=folder / name: solved(from_files(stem, 0.3))
    for graph in BATCH:
        yield f"model/{graph}", lambda _, graph=graph: solved(from_model(graph, 4))
