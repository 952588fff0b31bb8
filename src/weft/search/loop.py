"""The search loop: ask a method, score what is new, tell the method, until the budget or the space is spent."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import SearchError
from weft.search.front import Front, Scored
from weft.search.methods import Method, count, make_method
from weft.search.objectives import Constraint, Objective, metrics, parse_constraints, require
from weft.space import Space, Subnet
from weft.utils.files import AppendFile, to_json

log = logging.getLogger("weft.search")
Score = Callable[[Subnet], Mapping[str, float]]
OnScore = Callable[[Scored, bool], None]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search saw (`scored`, in order) and found (`front`).

    `evaluations` counts calls of the score function and `cache_hits` scores read instead; together they are
    `len(scored)`. `skipped` counts subnets that broke a constraint on a cheap metric and cost no budget.
    """

    scored: tuple[Scored, ...]
    front: Front
    evaluations: int
    cache_hits: int
    skipped: int = 0


def run_search(
    space: Space,
    score: Score,
    method: str | Method,
    objectives: Sequence[Objective],
    constraints: str | Constraint | Iterable[str | Constraint] = (),
    *,
    budget: int,
    seed: int = 0,
    cache: Cache | None = None,
    cheap: Score | None = None,
    on_score: OnScore | None = None,
    draws: int = 5000,
) -> SearchResult:
    """Scores up to `budget` distinct subnets and returns them with their front.

    The same seed asks the same subnets, so a search that stopped is resumed by running it again over its cache: known
    scores are read, and it continues as if never stopped; a larger budget extends a smaller one. A method that is
    passed as an object must be a fresh one, and its own seed counts.

    `cheap` gives metrics that cost little (parameters, flops). They are added to the scores, and a subnet that breaks a
    constraint on them goes to the method without being scored. The search ends early after `draws` subnets in a row
    with nothing to score; where none at all could be scored, SearchError gives the range seen.

    `on_score(scored, cached)` is called after each subnet that counts.
    """
    if budget < 1:
        raise SearchError(f"a search needs a budget of at least 1 subnet, not {budget}")
    rules = parse_constraints(constraints)
    searcher = make_method(method, space, objectives, rules, seed) if isinstance(method, str) else method
    scorer = _CachedScorer(score, cheap, cache, tuple(objectives), rules)
    known: dict[Subnet, Scored] = {}
    scored: list[Scored] = []
    without_score, size = 0, count(space)
    while len(scored) < budget and len(known) < size and without_score < draws:
        batch = searcher.ask()
        if not batch:
            break
        answers = []
        for subnet in batch:
            without_score += 1
            if subnet not in known:
                if len(scored) == budget:
                    break
                found, counts, cached = scorer(subnet)
                known[subnet] = found
                if counts:
                    without_score = 0
                    scored.append(found)
                    if on_score:
                        on_score(found, cached)
            answers.append(known[subnet])
        searcher.tell(answers)
    if not scored:
        raise SearchError(scorer.nothing_found())
    if len(scored) < budget:
        log.info("the search ended after %d of %d subnets: it found no further one to score", len(scored), budget)
    front = Front(scored, objectives, rules)
    return SearchResult(tuple(scored), front, scorer.evaluations, scorer.cache_hits, scorer.skipped)


class _CachedScorer:
    """Turns a subnet into scores: cheap metrics first, then the cache, then the score function."""

    def __init__(
        self,
        score: Score,
        cheap: Score | None,
        cache: Cache | None,
        objectives: tuple[Objective, ...],
        constraints: tuple[Constraint, ...],
    ) -> None:
        self.score, self.cheap, self.cache, self.constraints = score, cheap, cache, constraints
        self.names = metrics(objectives, constraints)
        self.evaluations = self.cache_hits = self.skipped = 0
        self.low: dict[str, float] = {}
        self.high: dict[str, float] = {}

    def __call__(self, subnet: Subnet) -> tuple[Scored, bool, bool]:
        """The scores, whether they count against the budget, and whether they were read from the cache."""
        costs = dict(self.cheap(subnet)) if self.cheap else {}
        for name, value in costs.items():
            self.low[name] = min(value, self.low.get(name, math.inf))
            self.high[name] = max(value, self.high.get(name, -math.inf))
        if any(rule.violation(costs) > 0 for rule in self.constraints):
            self.skipped += 1
            return Scored(subnet, costs), False, False
        wanted = [name for name in self.names if name not in costs]
        found = self.cache.get(subnet) if self.cache is not None else None
        cached = found is not None and all(name in found for name in wanted)
        if found is None or not cached:
            found = dict(self.score(subnet))
            require({**costs, **found}, wanted)
            self.evaluations += 1
            if self.cache is not None:
                self.cache.put(subnet, found, costs)
        else:
            self.cache_hits += 1
            if self.cache is not None:
                self.cache.add_costs(subnet, costs)
        return Scored(subnet, {**found, **costs}), True, cached

    def nothing_found(self) -> str:
        if not self.skipped:
            return "the search method asked for no subnet at all: the space is empty or the method is used up"
        bound = [rule for rule in self.constraints if rule.name in self.low]
        seen = "; ".join(f"{rule.name} was {self.low[rule.name]:g} to {self.high[rule.name]:g}" for rule in bound)
        wanted = " and ".join(f"{rule.name} {rule.op} {rule.bound:g}" for rule in bound)
        return f"none of {self.skipped} subnets drawn has {wanted}; {seen}: move a bound into that range"


# Scores that outlive the process: one JSON line each, keyed by the subnet and by what it was scored with.


class Cache:
    """An append-only file of scores; each is on disk before `put` returns.

    `context` identifies all that scores depend on besides the subnet: weights, data, batch count. Scores of other
    contexts may lie in the same file and are not seen. A last line that a crash cut short is dropped; damage
    anywhere else raises SearchError. One process writes at a time.
    """

    def __init__(self, path: Path | str, context: str | Mapping[str, Any] = "") -> None:
        self.path = Path(path)
        text = context if isinstance(context, str) else json.dumps(context, sort_keys=True)
        self.context = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self._scores: dict[str, dict[str, float]] = {}
        self._costs_written: dict[str, frozenset[str]] = {}
        self._file = AppendFile(self.path)
        self._load()

    def __len__(self) -> int:
        return len(self._scores)

    def get(self, subnet: Subnet) -> dict[str, float] | None:
        """The scores of this subnet in this context, the newest ones."""
        found = self._scores.get(subnet.id)
        return None if found is None else dict(found)

    def put(self, subnet: Subnet, scores: Mapping[str, float], costs: Mapping[str, float] | None = None) -> None:
        """Keeps the scores, in memory and on disk; the file has the subnet's values and costs too, for pages."""
        kept = {name: float(value) for name, value in scores.items()}
        found = {"subnet": subnet.id, "context": self.context, "scores": kept, "values": dict(subnet.values)}
        line = json.dumps(to_json({**found, "costs": dict(costs)} if costs else found), allow_nan=False)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file.add(line.encode() + b"\n")
        self._file.close()  # on disk, and no handle left open between two scores
        self._scores[subnet.id] = kept
        self._costs_written[subnet.id] = frozenset(costs or ())

    def add_costs(self, subnet: Subnet, costs: Mapping[str, float]) -> None:
        """Writes known scores once more where the file lacks the subnet's values or some of these costs."""
        written = self._costs_written.get(subnet.id)
        if subnet.id in self._scores and (written is None or not written.issuperset(costs)):
            self.put(subnet, self._scores[subnet.id], costs)

    def _load(self) -> None:
        if not self.path.exists():
            return
        whole, good = self.path.read_bytes(), 0
        lines = whole.splitlines(keepends=True)
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                scores = {str(name): float(value) for name, value in record["scores"].items()}
                subnet, context = record["subnet"], record["context"]
                if not line.endswith(b"\n"):
                    raise ValueError("cut short")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                if number < len(lines):
                    raise SearchError(f"{self.path}, line {number}: no scores ({error}); delete it") from error
                break
            good += len(line)
            if context == self.context:
                self._scores[subnet] = scores
                if "values" in record:
                    self._costs_written[subnet] = frozenset(record.get("costs") or ())
        if good < len(whole):
            # Else the next line would continue the half one.
            os.truncate(self.path, good)
