"""Probabilities: what a gradient search said of its mixture step by step, as a few hundred points of each option."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.runs.events import parse
from weft.serve.events.fold import Fold
from weft.serve.events.thin import whole

Array = npt.NDArray[np.float64]

STEPS = 500
NUMBERS = 30_000
"""The most numbers of all options together: a mixture of thousands of options is told at fewer steps."""

DENSE = 16
"""As many steps of a bucket are looked at: the others would not change a picture of it."""

WINDOW = 12
"""Each point is a mean over such a part of the run, since many methods tell what each step drew."""

LARGEST = 1 << 16
"""Numbers of a mixture; more is damage."""

_LAYOUT = re.compile(r"\('([^']*)', (\d{1,6})\)")


def probabilities(run: Path, manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """``{"steps", "choices": [{"name", "options", "values"}]}`` of a run; None where no step told of a mixture."""
    return _courses.ask(run / "events.jsonl", lambda course: course.told(_layout(manifest)))


def present(manifest: Mapping[str, Any]) -> bool:
    """Whether the run is a gradient search, by its manifest alone."""
    law = manifest.get("law")
    return isinstance(law, Mapping) and law.get("bilevel") is not None


class Course:
    """The mixture over the steps, in buckets that double in width whenever there are too many of them."""

    def __init__(self) -> None:
        self.choices: list[tuple[str, list[Any]]] = []
        self.damaged = 0
        self.width = 1
        self._buckets: dict[int, tuple[int, int, Array]] = {}  # by step // width: steps, sum of steps, sum of mixtures
        self._turn = self._size = 0

    def see(self, line: bytes) -> None:
        if b'"mixture"' in line:
            self._turn += 1
            if self._turn % max(1, self.width // DENSE):
                return
            event = parse(line) or {}
            step, vector = whole(event.get("step")), event.get("mixture")
            if event.get("event") == "step" and step is not None and isinstance(vector, list):
                self._add(step, vector)
        elif b'"choices"' in line and b'"started"' in line:
            event = parse(line) or {}
            if event.get("event") == "started":
                self.choices = choices(event.get("choices")) or self.choices

    def _add(self, step: int, vector: list[Any]) -> None:
        try:
            found = np.array(vector, dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            return
        if found.ndim != 1 or not 0 < found.size <= LARGEST or not np.isfinite(found).all():
            return
        if found.size != self._size and self._buckets:
            return  # of another mixture than the first: damage
        self._size = found.size
        self._put(self._buckets, step // self.width, (1, step, found))
        while len(self._buckets) > max(10, min(STEPS, NUMBERS // self._size)):
            self.width *= 2
            wider: dict[int, tuple[int, int, Array]] = {}
            for key, bucket in self._buckets.items():
                self._put(wider, key // 2, bucket)
            self._buckets = wider

    @staticmethod
    def _put(buckets: dict[int, tuple[int, int, Array]], key: int, more: tuple[int, int, Array]) -> None:
        there = buckets.get(key)
        buckets[key] = more if there is None else (there[0] + more[0], there[1] + more[1], there[2] + more[2])

    def told(self, layout: Sequence[tuple[str, list[Any]]]) -> dict[str, Any] | None:
        """As the page takes it; ``layout`` is what older runs say of the order of their numbers."""
        known = next((one for one in (self.choices, layout) if sum(len(o) for _, o in one) == self._size), None)
        if not self._buckets or known is None:
            return None
        rows = [self._buckets[key] for key in sorted(self._buckets)]
        reach = len(rows) // (2 * WINDOW)
        means = []
        for at in range(len(rows)):
            near = rows[max(0, at - reach) : at + reach + 1]
            means.append(sum(row[2] for row in near) / sum(row[0] for row in near))
        values, start, told = np.array(means).T.round(4), 0, []
        for name, options in known:
            told.append({"name": name, "options": options, "values": values[start : start + len(options)].tolist()})
            start += len(options)
        return {"steps": [round(row[1] / row[0]) for row in rows], "choices": told}


def choices(told: object) -> list[tuple[str, list[Any]]]:
    """Choices with their options, as a start or a front tells of them; real ones, which have no options, left out."""
    rows = [one for one in told if isinstance(one, Mapping)] if isinstance(told, list) else []
    pairs = [(row.get("name"), row.get("options")) for row in rows]
    return [(name, options) for name, options in pairs if isinstance(name, str) and isinstance(options, list)]


def _layout(manifest: Mapping[str, Any]) -> list[tuple[str, list[Any]]]:
    """What an older run's loss says of its choices: their names and how many options each has."""
    law = manifest.get("law")
    loss = law.get("loss") if isinstance(law, Mapping) else None
    _, found, layout = str(loss).partition("layout=(")
    pairs = _LAYOUT.findall(layout.partition("targets=")[0]) if found else []
    if sum(int(count) for _, count in pairs) > LARGEST:
        return []
    return [(name, [f"option {at}" for at in range(int(count))]) for name, count in pairs]


_courses = Fold(Course)
