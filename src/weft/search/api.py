"""weft.search: the best subnets of a trained run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from weft.errors import SearchError, nearest
from weft.search.front import Front, Scored
from weft.search.loop import Cache, run_search
from weft.search.objectives import Constraint, parse_constraints, parse_objectives
from weft.search.scorer import CHEAP, MEASURED, Scorer, context, cost_lookup
from weft.space import Space, Subnet
from weft.trainer.api import TrainedRun


def search(
    run: TrainedRun,
    *,
    maximize: str | Sequence[str] = (),
    minimize: str | Sequence[str] = (),
    constraints: str | Constraint | Iterable[str | Constraint] = (),
    budget: int = 200,
    method: str | None = None,
    seed: int = 0,
    bn_batches: int = 2,
    batch_size: int = 256,
    name: str = "search",
    on_score: Callable[[Scored, bool], None] | None = None,
    **options: Any,
) -> Front:
    """Scores up to ``budget`` subnets with inherited weights on the validation data and returns their front.

    Objectives and constraints (``"flops<=5e7"``) name ``loss``, a metric of the run, ``parameters``, ``flops``,
    ``latency`` or ``memory``. ``method`` is ``random``, ``evolution`` or ``nsga2`` (by default evolution for one
    objective, else NSGA-II). Batch norms see ``bn_batches`` batches of the training data before a subnet is scored.
    The search is a function of its seed. The run keeps the scores of each subnet, so a search that was stopped
    continues where it was. The front is saved under ``results/<name>``.
    """
    from weft.search.gradient import GRADIENT_METHODS

    refuse_options(options, inspect.signature(search).parameters)
    if not isinstance(run, TrainedRun):
        raise SearchError(
            f"weft.search takes a run that weft.train made, not {type(run).__name__}; weights and architecture are "
            "trained together by weft.search_gradient(build, data, steps=...)"
        )
    if method in GRADIENT_METHODS or not isinstance(method, str | None):
        word = getattr(method, "name", method)
        raise SearchError(
            f"'{word}' trains weights and architecture together: "
            f'call weft.search_gradient(build, data, method="{word}", steps=...)'
        )
    check_name(name)
    if not maximize and not minimize:
        first = next(iter(run.step.metrics), None)
        maximize, minimize = (first, "flops") if first else ((), ("loss", "flops"))
    objectives = parse_objectives(maximize, minimize)
    rules = parse_constraints(constraints)
    known = ("loss", *run.step.metrics, *CHEAP, *MEASURED)
    names = dict.fromkeys((*(o.name for o in objectives), *(rule.name for rule in rules)))
    for metric in names:
        if metric not in known:
            raise SearchError(f"no metric '{metric}'{nearest(metric, known)}")
    scorer = Scorer(run, bn_batches, batch_size)
    measured = tuple(metric for metric in MEASURED if metric in names)

    def score(subnet: Subnet) -> dict[str, float]:
        return {**scorer.quality(subnet), **scorer.measured(subnet, measured)}

    results = run.run.path / "results"
    cache = Cache(
        results / "scores.jsonl",
        context(run, recalibrate=bn_batches, batch=batch_size),
    )
    result = run_search(
        run.chain.space,
        score,
        method or ("evolution" if len(objectives) == 1 else "nsga2"),
        objectives,
        rules,
        budget=budget,
        seed=seed,
        cache=cache,
        cheap=cost_lookup(scorer, budget) if names.keys() & set(CHEAP) else None,
        on_score=on_score,
    )
    # To count costs takes as long as to score: where the search did not need them, only the front gets them.
    members = [Scored(one.subnet, {**one.scores, **scorer.cheap(one.subnet)}) for one in result.front]
    front = Front(members, objectives, rules, scorer.extract, origin=run)
    front.save(results / name, scorer.layers, choices=choices_to_json(run.chain.space), context=cache.context)
    return front


def choices_to_json(space: Space) -> list[dict[str, Any]]:
    """Every choice of a space with its options, for the pages that show a search; a real one has none."""
    return [{"name": name, "options": choice.options} for name, choice in space.choices.items()]


OLD_OPTIONS = {
    "recalibrate": "bn_batches",
    "keep": "constraints",
    "warmup_weights": "weight_warmup_steps",
}
"""What options were called before, and are called now."""


def refuse_options(options: Iterable[str], known: Collection[str]) -> None:
    """Raises SearchError for an option that does not exist, with its new name or the nearest one."""
    for name in options:
        if OLD_OPTIONS.get(name) in known:
            raise SearchError(f"the option '{name}' is called '{OLD_OPTIONS[name]}' now")
        raise SearchError(f"unknown option '{name}'{nearest(name, [one for one in known if one != 'options'])}")


def check_name(name: str) -> None:
    """Raises SearchError for a name that cannot be that of a folder of results."""
    if not re.fullmatch(r"\w[\w-]*", name):
        raise SearchError(f"a search cannot be called '{name}'; use letters, digits, '-' and '_'")
