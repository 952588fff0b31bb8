"""The subnets that searches scored, and the mixture of a gradient search over the steps, in bounded memory."""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.runs.events import parse
from weft.serve.downsample import VectorCurve
from weft.serve.event_log import LineSummary, SummaryCache
from weft.serve.fields import as_list, mapping, number, rounded, whole_number

if TYPE_CHECKING:
    from weft.search.objectives import Constraint, Objective

SCORED = 2000
"""The most subnets of one context that are kept and shown."""

CONTEXTS = 4
"""The most contexts that are kept. Scores under other weights, data or batches are of another context."""

BEST = 0.1
"""The share of the subnets that counts as best."""

OPTIONS = 3000
"""The most options of all choices that are shown."""

Choices = Sequence[tuple[str, Sequence[Any]]]


@dataclass(frozen=True, slots=True)
class Point:
    """A subnet as it was scored."""

    id: str
    scores: Mapping[str, float]
    values: Mapping[str, Any] = field(default_factory=dict)
    row: Mapping[str, Any] = field(default_factory=dict)
    """Of a member of a front, all that its file has of it."""


class Sample:
    """At most ``cap`` subnets out of many, each as likely as any other, whatever their order.

    Those with the smallest hashes of their ids are kept. A subnet that comes again counts once, with its newest scores.
    """

    def __init__(self, cap: int = SCORED) -> None:
        self.count = 0
        """How many came; one that was left out and comes again counts twice."""
        self._cap = cap
        self._points: dict[str, Point] = {}
        self._heap: list[tuple[int, str]] = []

    def add(self, point: Point) -> None:
        if point.id in self._points:
            self._points[point.id] = point
            return
        self.count += 1
        place = -int.from_bytes(hashlib.blake2b(point.id.encode(errors="replace"), digest_size=8).digest())
        if len(self._heap) < self._cap:
            heapq.heappush(self._heap, (place, point.id))
        elif place > self._heap[0][0]:
            del self._points[heapq.heapreplace(self._heap, (place, point.id))[1]]
        else:
            return
        self._points[point.id] = point

    def points(self) -> list[Point]:
        return list(self._points.values())


class ScoredSubnets(LineSummary):
    """The subnets in a file of scores: a sample of each of the newest contexts."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: OrderedDict[str, Sample] = OrderedDict()
        """By context; the one with the newest line is the last."""

    def add_event(self, event: Mapping[str, Any]) -> None:
        subnet, context, scores, values = (event.get(name) for name in ("subnet", "context", "scores", "values"))
        if not (isinstance(subnet, str) and isinstance(context, str)):
            self.damaged += 1
            return
        if not (isinstance(scores, Mapping) and isinstance(values, Mapping)):
            self.damaged += 1
            return
        result = {**numbers(scores), **numbers(event.get("costs"))}
        sample = self.samples.pop(context, None) or Sample()
        self.samples[context] = sample
        if len(self.samples) > CONTEXTS:
            self.samples.popitem(last=False)
        sample.add(Point(subnet[:64], result, values))

    def of(self, context: object) -> Sample:
        """The subnets of a context; where it is not known, of the newest."""
        newest = next(reversed(self.samples.values()), Sample())
        return self.samples.get(context, newest) if isinstance(context, str) else newest


def numbers(values: object) -> dict[str, float]:
    """The numbers of a table by name."""
    return {str(name): read for name, value in mapping(values).items() if (read := number(value)) is not None}


def best_first_order(
    points: Sequence[Point], objectives: Sequence[Objective], constraints: Sequence[Constraint] = ()
) -> list[Point]:
    """Best first: by the rank of their front, then by the first objective; subnets that break a constraint are last."""
    from weft.search.objectives import losses, violations
    from weft.utils.pareto import ranks

    scores = [point.scores for point in points]
    known = [one for one in objectives if any(one.name in point for point in scores)]
    rules = [rule for rule in constraints if any(rule.name in point for point in scores)]
    if not known:
        return list(points)
    loss, broken = losses(scores, known), violations(scores, known, rules)
    rank = ranks(loss, broken) if len(known) > 1 else np.zeros(len(points))
    order = np.lexsort((loss[:, 0], rank, np.nan_to_num(broken, posinf=np.finfo(float).max)))
    return [points[at] for at in order]


def option_frequencies(best_first: Sequence[Point], choices: Choices = ()) -> list[dict[str, Any]]:
    """The share of the best tenth of the subnets, and of all, that have each option.

    A choice that is switched off in a subnet counts for none of its options. Without ``choices``, the options that
    occur are listed.

    >>> option_frequencies([Point("a", {}, {"op": "conv"}), Point("b", {}, {"op": "skip"})])
    [{'name': 'op', 'options': ['conv', 'skip'], 'best': [1.0, 0.0], 'all': [0.5, 0.5]}]
    """
    known = [point.values for point in best_first]
    best = known[: math.ceil(BEST * len(known))]
    result, left = [], OPTIONS
    for name, options in choices or _observed_options(known):
        left -= len(options)
        if left < 0 or not known:
            break
        row: dict[str, Any] = {"name": name, "options": list(options)}
        for part, subnets in (("best", best), ("all", known)):
            counts = Counter(_key(values[name]) for values in subnets if name in values)
            row[part] = [rounded(counts[_key(option)] / len(subnets)) for option in options]
        result.append(row)
    return result


def _observed_options(known: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    found: dict[str, dict[tuple[str, Any], Any]] = {}
    for values in known:
        for name, value in values.items():
            found.setdefault(name, {}).setdefault(_key(value), value)
    return [(name, [options[key] for key in sorted(options)]) for name, options in found.items()]


def _key(value: object) -> tuple[str, Any]:
    """A key that keeps options apart, also 1, 1.0 and True, which are equal to Python."""
    plain = isinstance(value, (str, int, float))
    return (type(value).__name__, value) if plain else ("", json.dumps(value, sort_keys=True))


STEPS = 500
NUMBERS = 30_000
"""The most numbers, over all options: a mixture of thousands of options is shown at fewer steps."""

DENSE = 16
"""The most steps of a bucket that are read; more would not change the picture."""

WINDOW = 12
"""Each point is a mean over one such part of the run, since many methods write what each step drew."""

LARGEST = 1 << 16
"""The most numbers of one mixture; more is damage."""


def probabilities(run: Path) -> dict[str, Any] | None:
    """``{"steps", "choices": [{"name", "options", "values"}]}`` of a run; None where no step wrote a mixture."""
    return _histories.query(run / "events.jsonl", MixtureHistory.to_json)


class MixtureHistory(LineSummary):
    """The mixture over the steps, in bounded memory."""

    def __init__(self) -> None:
        super().__init__()
        self.choices: list[tuple[str, list[Any]]] = []
        self._mixtures: VectorCurve | None = None
        self._lines = self._size = 0

    def add_line(self, line: bytes) -> None:
        if b'"mixture"' in line:
            self._lines += 1
            if self._mixtures is not None and self._lines % max(1, self._mixtures.width // DENSE):
                return
            event = parse(line) or {}
            step, vector = whole_number(event.get("step")), event.get("mixture")
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
        if self._mixtures is None:
            self._size = found.size
            self._mixtures = VectorCurve(max(10, min(STEPS, NUMBERS // self._size)))
        if found.size == self._size:  # another size than that of the first mixture is damage
            self._mixtures.put(step, (1, step, found))

    def to_json(self) -> dict[str, Any] | None:
        """The document of the page."""
        if self._mixtures is None or sum(len(options) for _, options in self.choices) != self._size:
            return None
        rows = self._mixtures.rows()
        reach = len(rows) // (2 * WINDOW)
        means = []
        for at in range(len(rows)):
            near = rows[max(0, at - reach) : at + reach + 1]
            means.append(sum(row[2] for row in near) / sum(row[0] for row in near))
        values, start, result = np.array(means).T.round(4), 0, []
        for name, options in self.choices:
            result.append({"name": name, "options": options, "values": values[start : start + len(options)].tolist()})
            start += len(options)
        return {"steps": [round(row[1] / row[0]) for row in rows], "choices": result}


def choices(rows: object) -> list[tuple[str, list[Any]]]:
    """Choices with their options, from an event or a front; choices of real numbers, which have none, are left out."""
    known = [row for row in as_list(rows) if isinstance(row, Mapping)]
    pairs = [(row.get("name"), row.get("options")) for row in known]
    return [(name, options) for name, options in pairs if isinstance(name, str) and isinstance(options, list)]


_histories = SummaryCache(MixtureHistory)
