"""Runs the cases of an area, each for itself: one that fails becomes a line, and the rest goes on."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Case = tuple[str, Callable[[Path], Any]]
"""A name, and what takes an empty folder and gives the values."""

CHECKOUT = Path(__file__).parents[2]
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


def run_area(area: str, out: Path, *arguments: str) -> None:
    """All cases of an area in this very process; the file is written after each."""
    import torch

    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    module = importlib.import_module(f"benchmarks.golden.{area}")
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        for number, (name, work) in enumerate(module.cases(*arguments)):
            place = Path(folder) / str(number)
            place.mkdir()
            began = time.process_time()
            try:
                found[name] = work(place)
            except Exception as problem:
                text = " ".join(f"{type(problem).__name__}: {problem}".replace(folder, "FOLDER").split())
                found[name] = {"error": text[:300]}
                print(f"  {area}: {name}: {text[:300]}", file=sys.stderr, flush=True)
            if os.environ.get("GOLDEN_TIMES"):
                print(f"  {area}: {name}: {time.process_time() - began:.1f} s", file=sys.stderr, flush=True)
            out.write_text(json.dumps(found, default=str))


def in_process(area: str, *arguments: str) -> tuple[dict[str, Any], float]:
    """The values of an area, made in a process of its own on one thread, and the CPU seconds that it took."""
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        out = Path(folder) / "values.json"
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(CHECKOUT))))
        command = [sys.executable, "-m", "benchmarks.golden", "--area", area, "--out", str(out), *arguments]
        before = os.times()
        ended = subprocess.run(command, cwd=folder, env={**os.environ, **THREADS, "PYTHONPATH": path}, check=False)
        after = os.times()
        seconds = after.children_user + after.children_system - before.children_user - before.children_system
        found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
        if ended.returncode:
            found["the area"] = {"error": f"its process ended with exit code {ended.returncode}"}
        return found, seconds
