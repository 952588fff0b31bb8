"""weft.search: a trained run in, a front of its best subnets out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from weft.errors import SearchError, nearest
from weft.pipeline import Trained
from weft.search.cache import Cache
from weft.search.front import Front
from weft.search.loop import run_search
from weft.search.objective import Constraint, parse_constraints, parse_objectives
from weft.search.score import MEASURED, Scorer, context, known_metrics
from weft.search.scored import Scored
from weft.space import Subnet


def search(
    trained: Trained,
    *,
    maximize: str | Sequence[str] = (),
    minimize: str | Sequence[str] = (),
    constraints: str | Constraint | Iterable[str | Constraint] = (),
    budget: int = 200,
    method: str | None = None,
    seed: int = 0,
    recalibrate: int = 2,
    batch_size: int = 256,
    name: str = "search",
    on_score: Callable[[Scored, bool], None] | None = None,
) -> Front:
    """Scores up to ``budget`` subnets with inherited weights on the validation data and returns their front.

    Objectives and constraints (``"flops<=5e7"``) name ``loss``, a metric of the run, ``parameters``, ``flops``,
    ``latency`` or ``memory``. ``method`` is ``random``, ``evolution`` or ``nsga2`` (by default evolution for one
    objective, else NSGA-II). The search is a function of its seed; scores are kept in the run by subnet, so a search
    that was stopped goes on where it was. The front is saved under ``results/<name>``.
    """
    if not re.fullmatch(r"\w[\w-]*", name):
        raise SearchError(f"a search cannot be called '{name}'; use letters, digits, '-' and '_'")
    if not maximize and not minimize:
        first = next(iter(trained.settings.metrics), None)
        maximize, minimize = (first, "flops") if first else ((), ("loss", "flops"))
    objectives = parse_objectives(maximize, minimize)
    rules = parse_constraints(constraints)
    known = known_metrics(trained.settings)
    for wanted in (*(o.name for o in objectives), *(rule.name for rule in rules)):
        if wanted not in known:
            raise SearchError(f"no metric '{wanted}'{nearest(wanted, known)}")
    scorer = Scorer(trained.chain, trained.data, trained.settings, recalibrate, batch_size)
    names = {o.name for o in objectives} | {rule.name for rule in rules}
    measured = tuple(metric for metric in MEASURED if metric in names)

    def score(subnet: Subnet) -> dict[str, float]:
        return {**scorer.quality(subnet), **scorer.measured(subnet, measured)}

    results = trained.run.path / "results"
    cache = Cache(
        results / "scores.jsonl",
        context(trained.chain, trained.data, trained.settings, recalibrate=recalibrate, batch=batch_size),
    )
    result = run_search(
        trained.chain.space,
        score,
        method or ("evolution" if len(objectives) == 1 else "nsga2"),
        objectives,
        rules,
        budget=budget,
        seed=seed,
        cache=cache,
        cheap=scorer.cheap,
        on_score=on_score,
    )
    front = Front(result.scored, objectives, rules, scorer.extract, origin=trained)
    front.save(results / name)
    return front
