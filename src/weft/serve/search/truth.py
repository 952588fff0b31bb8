"""Ground truth: how well the scores of a search rank its subnets beside published accuracies of the same space."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.serve.search.shares import Point

if TYPE_CHECKING:
    from weft.search.objective import Objective

DATA = "WEFT_DATA"
"""The variable of the environment that names the folder in which published tables lie."""


@dataclass(frozen=True, slots=True)
class Table:
    """A published table: its place in the folder, and how its key follows from the options of its choices in order."""

    name: str
    file: str
    choices: tuple[str, ...]
    digits: tuple[str, ...]
    read: Callable[[bytes], Mapping[str, float]]

    def key(self, values: Mapping[str, Any]) -> str | None:
        """The key of a subnet; None for one of another space."""
        if values.keys() != set(self.choices) or any(values[name] not in self.digits for name in self.choices):
            return None
        return "".join(str(self.digits.index(values[name])) for name in self.choices)


def tau(points: Sequence[Point], goal: Objective, manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """Kendall's tau between an objective and the published accuracy, over all pairs of subnets that have both.

    None where no table is of this space, none is there (in the folder that WEFT_DATA names, or beside that of the run's
    data), or fewer than two subnets can be compared.
    """
    known = [point.values for point in points if point.values is not None]
    for table in _tables() if known else ():
        if table.key(known[0]) is None:
            continue
        file = next((folder / table.file for folder in _folders(manifest) if (folder / table.file).is_file()), None)
        truth = _read(table, file, file.stat().st_mtime_ns) if file is not None else {}
        pairs = []
        for point in points:
            key = table.key(point.values) if point.values is not None else None
            score = -goal.loss(point.scores)
            if key is not None and key in truth and math.isfinite(score):
                pairs.append((score, truth[key]))
        return _agreement(pairs, table.name)
    return None


def _agreement(pairs: Sequence[tuple[float, float]], name: str) -> dict[str, Any] | None:
    from weft.search.rank import kendall_tau

    value = kendall_tau([score for score, _ in pairs], [true for _, true in pairs]) if len(pairs) > 1 else math.nan
    count = len(pairs) * (len(pairs) - 1) // 2
    return {"value": round(value, 4), "pairs": count, "truth": name} if math.isfinite(value) else None


def _folders(manifest: Mapping[str, Any]) -> Iterator[Path]:
    if os.environ.get(DATA):
        yield Path(os.environ[DATA])
    config = manifest.get("config")
    data = config.get("data") if isinstance(config, Mapping) else None
    path = data.get("path") if isinstance(data, Mapping) else None
    folder = config.get("folder") if isinstance(config, Mapping) else None
    if isinstance(path, str) and isinstance(folder, str):
        yield from list((Path(folder) / path).parents)[:2]


@lru_cache(maxsize=1)
def _tables() -> tuple[Table, ...]:
    from weft.zoo.macro import CANDIDATES
    from weft.zoo.nb201 import NB201_OPERATIONS

    edges = tuple(f"edge{source}{target}" for target in range(1, 4) for source in range(target))
    layers = tuple(f"layer{index}" for index in range(8))
    return (
        Table("nas-bench-macro", "nas-bench-macro/nas-bench-macro_cifar10.json", layers, CANDIDATES, _macro),
        Table("nas-bench-201", "nas-bench-201/nasbench201.csv.gz", edges, NB201_OPERATIONS, _nb201),
    )


@lru_cache(maxsize=4)
def _read(table: Table, file: Path, modified: int) -> Mapping[str, float]:
    try:
        return table.read(file.read_bytes())
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # damaged, or another file of that name


def _macro(content: bytes) -> Mapping[str, float]:
    return {key: float(entry["mean_acc"]) for key, entry in json.loads(content).items()}


def _nb201(content: bytes) -> Mapping[str, float]:
    """The mean of the seeds that there are, on CIFAR-10."""
    found = {}
    for row in csv.DictReader(io.StringIO(gzip.decompress(content).decode())):
        seeds = [float(row[name]) for name in (f"cifar10_val_acc_s{seed}" for seed in range(3)) if row[name]]
        found[row["arch"]] = math.fsum(seeds) / len(seeds) if seeds else math.nan
    return {key: value for key, value in found.items() if math.isfinite(value)}
