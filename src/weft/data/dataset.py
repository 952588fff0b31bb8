"""A data set: its parts, their description, and stratified splits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from weft.data.source import Indices, Source, Subset, column, move_source
from weft.errors import DataError
from weft.utils.rng import generator

PARTS = {"train": "train", "test": "test"} | dict.fromkeys(("val", "valid", "validation", "dev"), "validation")


@dataclass(frozen=True, slots=True)
class Data:
    """The parts of a data set.

    `info` holds, for images, `shape` (channels, height, width), `classes` and where known `class_names`; for text
    `vocabulary` (the characters by token), `size` (how many) and `shape` (context,).
    """

    name: str
    train: Source
    validation: Source | None = None
    test: Source | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    def parts(self) -> dict[str, Source]:
        """The parts that there are, by name."""
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: part for name, part in named.items() if part is not None}

    def to(self, device: torch.device | str) -> Data:
        """The same data, with every part on the device that can be kept there."""
        parts: dict[str, Any] = {name: move_source(part, device) for name, part in self.parts().items()}
        return replace(self, **parts)

    def fingerprint(self) -> str:
        """SHA-256 over the parts, whatever the name."""
        text = ";".join(f"{name} {part.fingerprint()}" for name, part in self.parts().items())
        return hashlib.sha256(text.encode()).hexdigest()


def split(source: Source, fractions: Sequence[float], seed: int, stratify: str | None = None) -> tuple[Subset, ...]:
    """Cuts a source into disjoint subsets that cover it, drawn by the seed.

    With `stratify`, the key of integer labels, each part holds of each label its fraction to within one sample.
    Raises DataError for fractions that are not positive or do not add up to 1, and for a part that would be empty.
    """
    if not fractions or min(fractions) <= 0 or abs(sum(fractions) - 1) > 1e-6:
        raise DataError(f"fractions must be positive and add up to 1; got {list(fractions)}")
    labels = np.zeros(len(source), dtype=np.int64) if stratify is None else _labels(source, stratify)
    values, totals = np.unique(labels, return_counts=True)
    counts = apportion(totals, fractions)
    if not counts.sum(axis=0).all():
        raise DataError(f"{len(source)} samples are too few for the fractions {list(fractions)}: a part is empty")
    parts: list[list[Indices]] = [[] for _ in fractions]
    for value, row in zip(values, counts, strict=True):
        members = np.flatnonzero(labels == value)
        shuffled = members[generator(seed, "split", int(value)).permutation(len(members))]
        for part, chunk in zip(parts, np.split(shuffled, np.cumsum(row)[:-1]), strict=True):
            part.append(chunk)
    return tuple(Subset(source, np.sort(np.concatenate(part))) for part in parts)


def apportion(totals: Indices, fractions: Sequence[float]) -> Indices:
    """The number of each group in each part: the exact share, rounded so that the sums of the parts are right too.

    >>> apportion(np.array([5, 5]), (0.5, 0.5)).tolist()
    [[3, 2], [2, 3]]
    """
    exact = np.outer(totals, np.asarray(fractions) / sum(fractions))
    counts = np.floor(exact + 1e-9).astype(np.int64)
    owed = exact.sum(axis=0) - counts.sum(axis=0)
    for row, left in enumerate(totals - counts.sum(axis=1)):
        # What rounding down left over goes where most is owed, at most one to each part, and only where it was rounded.
        rounded = exact[row] - counts[row] > 1e-9
        chosen = np.argsort(np.where(rounded, -owed, np.inf), kind="stable")[:left]
        counts[row, chosen] += 1
        owed[chosen] -= 1
    return counts


def evenly_spaced(length: int, limit: int | None) -> Indices:
    """At most `limit` sample numbers, evenly spread, so that data sorted by class keeps all its classes."""
    if limit is not None and limit < 1:
        raise DataError(f"limit must be at least 1; got {limit}")
    if limit is None or limit >= length:
        return np.arange(length)
    return np.arange(limit) * length // limit


def _labels(source: Source, key: str) -> Indices:
    labels = column(source, key)
    if labels.dim() != 1 or labels.is_floating_point():
        raise DataError(
            f"to stratify, '{key}' must be one integer a sample; it is {labels.dtype} {tuple(labels.shape)}"
        )
    return labels.cpu().numpy().astype(np.int64)
