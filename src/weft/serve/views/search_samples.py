"""The subnets that searches scored: a fair sample of them in bounded memory, and which options are in the best ones."""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.runs.events import parse
from weft.serve.events.thin import number, rounded

if TYPE_CHECKING:
    from weft.search.objective import Constraint, Objective

SCORED = 2000
"""The most subnets that are kept of one context, and shown."""

CONTEXTS = 4
"""The most contexts that are kept: scores of one run with other weights, data or batches cannot be compared."""

LONGEST = 1 << 15
"""Bytes of a line of scores; a longer one is damage."""

BEST = 0.1
OPTIONS = 3000
"""The most options of all choices that are shown."""

Choices = Sequence[tuple[str, Sequence[Any]]]


@dataclass(frozen=True, slots=True)
class Point:
    """A subnet as it was scored; without values where the file is of an older weft."""

    id: str
    scores: Mapping[str, float]
    values: Mapping[str, Any] | None = None


class Sample:
    """At most ``cap`` of the subnets that it is given, each as likely to be kept as any other, whatever their order.

    Kept are those whose ids have the smallest hashes; a subnet that comes again counts once, with its newest scores.
    """

    def __init__(self, cap: int = SCORED) -> None:
        self.count = 0
        """How many came, those twice that came again after they had been left out."""
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


class Scores:
    """What the lines of a file of scores come to: a sample of each of the newest contexts."""

    def __init__(self) -> None:
        self.samples: OrderedDict[str, Sample] = OrderedDict()
        """By context, the one that was written to last at the end."""
        self.damaged = 0

    def see(self, line: bytes) -> None:
        record = parse(line) or {} if len(line) <= LONGEST else {}
        subnet, context, scores = record.get("subnet"), record.get("context"), record.get("scores")
        if not isinstance(subnet, str) or not isinstance(context, str) or not isinstance(scores, Mapping):
            self.damaged += bool(line.strip())
            return
        costs, values = record.get("costs"), record.get("values")
        told = {**numbers(scores), **numbers(costs)}
        sample = self.samples.pop(context, None) or Sample()
        self.samples[context] = sample
        if len(self.samples) > CONTEXTS:
            self.samples.popitem(last=False)
        sample.add(Point(subnet[:64], told, values if isinstance(values, Mapping) else None))

    def of(self, context: str | None, members: Iterable[Point] = ()) -> tuple[list[Point], int]:
        """The subnets of a context, and how many there were; by default of that in which most members were scored."""
        if context not in self.samples:
            known = {member.id: member.scores for member in members}

            def agreeing(one: str) -> int:
                points = (point for point in self.samples[one].points() if point.id in known)
                return sum(all(known[p.id].get(name) == value for name, value in p.scores.items()) for p in points)

            # Of equals the newest: the last of those that were written to.
            context = max(reversed(self.samples), key=agreeing, default=None)
        sample = self.samples.get(context) if context is not None else None
        return (sample.points(), sample.count) if sample is not None else ([], 0)


def numbers(told: object) -> dict[str, float]:
    """The numbers of a mapping by name; those that JSON lacks are written as words."""
    found = told.items() if isinstance(told, Mapping) else ()
    return {str(name): value for name, given in found if (value := number(given)) is not None}


def ordered(
    points: Sequence[Point], objectives: Sequence[Objective], constraints: Sequence[Constraint] = ()
) -> list[Point]:
    """Best first: by how many fronts lie before them, then by the first objective; what breaks a constraint, last."""
    import numpy as np

    from weft.search.objective import losses, violations
    from weft.search.pareto import ranks

    scores = [point.scores for point in points]
    told = [one for one in objectives if any(one.name in point for point in scores)]
    rules = [rule for rule in constraints if any(rule.name in point for point in scores)]
    if not told:
        return list(points)
    loss, broken = losses(scores, told), violations(scores, told, rules)
    rank = ranks(loss, broken) if len(told) > 1 else np.zeros(len(points))
    order = np.lexsort((loss[:, 0], rank, np.nan_to_num(broken, posinf=np.finfo(float).max)))
    return [points[at] for at in order]


def shares(best_first: Sequence[Point], choices: Choices = ()) -> list[dict[str, Any]]:
    """How often each option is in the best tenth, and in all; of the subnets whose values are known.

    A choice that is switched off in a subnet counts for none of its options. Without ``choices``, those are told that
    occur.

    >>> shares([Point("a", {}, {"op": "conv"}), Point("b", {}, {"op": "skip"})])
    [{'name': 'op', 'options': ['conv', 'skip'], 'best': [1.0, 0.0], 'all': [0.5, 0.5]}]
    """
    known = [point.values for point in best_first if point.values is not None]
    best = known[: math.ceil(BEST * len(known))]
    told, left = [], OPTIONS
    for name, options in choices or _seen(known):
        left -= len(options)
        if left < 0 or not known:
            break
        keys = [_key(option) for option in options]
        row: dict[str, Any] = {"name": name, "options": list(options)}
        for part, subnets in (("best", best), ("all", known)):
            counts = dict.fromkeys(keys, 0)
            for values in subnets:
                key = _key(values[name]) if name in values else None
                if key is not None and key in counts:
                    counts[key] += 1
            row[part] = [rounded(counts[key] / len(subnets)) for key in keys]
        told.append(row)
    return told


def _seen(known: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    found: dict[str, dict[tuple[str, Any], Any]] = {}
    for values in known:
        for name, value in values.items():
            found.setdefault(name, {}).setdefault(_key(value), value)
    return [(name, [options[key] for key in sorted(options)]) for name, options in found.items()]


def _key(value: object) -> tuple[str, Any]:
    """What tells options apart: 1, 1.0 and True are one to Python."""
    plain = isinstance(value, (str, int, float))
    return (type(value).__name__, value) if plain else ("", json.dumps(value, sort_keys=True))
