"""Importances of a study's parameters, worked out anew only when enough of its trials have ended."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weft.serve.events.thin import rounded
from weft.serve.study.trials import Trial

if TYPE_CHECKING:
    from weft.space import Space

ALWAYS = 1000
"""Up to so many trials every one that ends counts at once; of more, each tenth part."""

KEPT = 16

Shares = dict[str, list[list[Any]]]

_kept: OrderedDict[str, tuple[int, Shares]] = OrderedDict()
_guard = threading.Lock()


def importances(
    space: Space | None, trials: Sequence[Trial], objectives: Sequence[tuple[str, bool]], key: str
) -> Shares:
    """For each objective the parameters with their shares, largest first; without those that cannot be told.

    ``key`` names the study. Needs Optuna; without it, or without a space, there are none.
    """
    usable = [] if space is None else [trial for trial in trials if _fits(trial, space, len(objectives))]
    with _guard:
        count, found = _kept.get(key, (-1, {}))
        if space is None or not usable:
            return {}
        if count == len(usable) or (len(usable) > ALWAYS and count <= len(usable) < 1.1 * count):
            return found
        made = _made(space, usable, objectives)
        _kept[key] = (len(usable), made)
        while len(_kept) > KEPT:
            _kept.popitem(last=False)
        return made


def _made(space: Space, trials: Sequence[Trial], objectives: Sequence[tuple[str, bool]]) -> Shares:
    from weft.tune.importance import importances as worked_out
    from weft.tune.record import Direction, Record

    directions: list[Direction] = ["maximize" if maximize else "minimize" for _, maximize in objectives]
    records = []
    for trial in trials:
        params = {name: space.choices[name].canonical(value) for name, value in trial.params.items()}
        values = tuple(value for value in trial.values or () if value is not None)
        records.append(Record(trial.number, params, "complete", values))
    found: Shares = {}
    for at, (name, _) in enumerate(objectives):
        try:
            shares = worked_out(space, records, directions, at)
        except Exception:  # Optuna is not there, or refuses what was read from a file
            continue
        if shares:
            found[name] = [[one, rounded(share)] for one, share in shares.items()]
    return found


def _fits(trial: Trial, space: Space, objectives: int) -> bool:
    """Whether a trial is complete and was drawn from the space, as a file may not tell."""
    values = trial.values or []
    known = all(name in space.choices and space.choices[name].contains(value) for name, value in trial.params.items())
    return trial.state == "complete" and len(values) == objectives and None not in values and known
