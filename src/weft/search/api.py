"""weft.search: the best subnets of a trained run; or, of a supernet and its data, weights and subnet at once."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

from torch import nn

from weft.errors import SearchError, nearest
from weft.pipeline import Optimizer, Trained
from weft.search.cache import Cache
from weft.search.cheap import CheapCosts
from weft.search.expected import Expected
from weft.search.front import Front
from weft.search.loop import run_search
from weft.search.method import METHODS
from weft.search.objective import Constraint, parse_constraints, parse_objectives
from weft.search.score import CHEAP, MEASURED, Scorer, context, known_metrics
from weft.search.scored import Scored
from weft.space import Space, Subnet
from weft.supernet import Chain, Factory

if TYPE_CHECKING:
    from weft.search.gradient import Found, GradientMethod, SampledMethod


@overload
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
) -> Front: ...


@overload
def search(
    trained: Chain | Factory,
    data: Any,
    *,
    method: str | GradientMethod | SampledMethod = "drnas",
    steps: int,
    targets: str | Iterable[str] = (),
    architecture: Optimizer | None = None,
    warmup_weights: int | None = None,
    pick: str | None = None,
    seed: int = 0,
    budget: int = 200,
    recalibrate: int = 2,
    name: str = "search",
    **options: Any,
) -> Found: ...


def search(trained: Trained | Chain | Factory, data: Any = None, **options: Any) -> Front | Found:
    """Searches a trained run, or trains a supernet and its architecture together.

    ``search(run, maximize="accuracy", minimize="flops", budget=200)`` scores up to ``budget`` subnets with inherited
    weights and returns their front; see ``search_trained``. ``search(build, data, method="drnas", steps=2000)`` is
    gradient search, from a Chain or a function that makes one, and returns what it found; see ``gradient_search``.
    """
    from weft.search.gradient import GRADIENT_METHODS, gradient_search

    method = options.get("method")
    if isinstance(trained, Trained):
        if method in GRADIENT_METHODS or not isinstance(method, str | None):
            called = getattr(method, "name", method)
            raise SearchError(
                f"'{called}' trains weights and architecture together, and this run is trained already: "
                f'call weft.search(build, data, method="{called}", steps=...) with what makes the supernet'
            )
        if data is not None:
            raise SearchError("a trained run has its own data: call weft.search(run, ...) without any")
        known = [name for name in inspect.signature(search_trained).parameters if name != "trained"]
        for name in options:
            if name not in known:
                raise SearchError(f"the search of a trained run has no option '{name}'{nearest(name, known)}")
        return search_trained(trained, **options)
    if not isinstance(trained, Chain) and (not callable(trained) or isinstance(trained, nn.Module)):
        raise SearchError(
            f"weft.search takes a run that weft.train made, or a supernet and its data, not {type(trained).__name__}"
        )
    if method in METHODS:
        raise SearchError(
            f"'{method}' searches a trained run: call weft.search(weft.train(build, data, ...), method=\"{method}\")"
        )
    if data is None or "steps" not in options:
        raise SearchError(
            f"a supernet is trained and searched at once, so {'data' if data is None else 'steps'} must be given: "
            'weft.search(build, data, method="drnas", steps=2000)'
        )
    return gradient_search(trained, data, **options)


def search_trained(
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
    expected: Iterable[Expected] = (),
) -> Front:
    """Scores up to ``budget`` subnets with inherited weights on the validation data and returns their front.

    Objectives and constraints (``"flops<=5e7"``) name ``loss``, a metric of the run, ``parameters``, ``flops``,
    ``latency`` or ``memory``. ``method`` is ``random``, ``evolution`` or ``nsga2`` (by default evolution for one
    objective, else NSGA-II). The search is a function of its seed; scores are kept in the run by subnet, so a search
    that was stopped goes on where it was. The front is saved under ``results/<name>``. Tables of costs that are
    ``expected`` already are not measured again.
    """
    check_name(name)
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
        cheap=CheapCosts(scorer, budget, expected) if names & set(CHEAP) else None,
        on_score=on_score,
    )
    # Costs that nobody asked for take as long as scores: the members of the front alone get them.
    members = [Scored(one.subnet, {**one.scores, **scorer.cheap(one.subnet)}) for one in result.front]
    front = Front(members, objectives, rules, scorer.extract, origin=trained)
    front.save(results / name, scorer.layers, choices=told_choices(trained.chain.space), context=cache.context)
    return front


def told_choices(space: Space) -> list[dict[str, Any]]:
    """Every choice of a space with its options, for whoever shows a search; a real one has none."""
    return [{"name": name, "options": choice.options} for name, choice in space.choices.items()]


def check_name(name: str) -> None:
    """Raises SearchError for a name that cannot be that of a folder of results."""
    if not re.fullmatch(r"\w[\w-]*", name):
        raise SearchError(f"a search cannot be called '{name}'; use letters, digits, '-' and '_'")
