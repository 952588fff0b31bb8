"""What every benchmark writes beside its rows: the command and the machine it ran on."""

from __future__ import annotations

import json
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from weft.utils.files import write_json


def about() -> dict[str, Any]:
    """The command and the machine, for the head of a result file."""
    cpu = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "command": " ".join(["python", *(_short(word) for word in sys.argv)]),
        "machine": {
            "cpu": cpu,
            "cores": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        },
    }


def write(path: str | None, **values: Any) -> None:
    """Writes the result file, if one was asked for, and prints nothing."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_json(Path(path), {**about(), **values})


def read_rows(path: str | None) -> list[dict[str, Any]]:
    """The rows that an earlier, unfinished call left, so that a benchmark can go on."""
    if path and Path(path).exists():
        rows: list[dict[str, Any]] = json.loads(Path(path).read_text()).get("rows", [])
        return rows
    return []


def waiting() -> float:
    """Seconds that the threads of this process were ready and had no core, as Linux counts them; else 0."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):
            total += int(path.read_text().split()[1])
    return total / 1e9


def _short(word: str) -> str:
    # Where a file lies on one machine says nothing on another.
    return Path(word).name if os.path.isabs(word) else word


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
