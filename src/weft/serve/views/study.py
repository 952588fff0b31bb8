"""The view `tune` of a run: its study, from the events; its storage is not read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import SpaceError
from weft.runs import run as lock
from weft.runs.run import read_manifest
from weft.serve.event_log import Lru, SummaryCache
from weft.serve.fields import as_list, mapping, read_mapping, rounded
from weft.serve.views.study_events import StudyEvents, TrialState, device_bars, trial_rows
from weft.utils.files import read_json

if TYPE_CHECKING:
    from weft.space import Space

OPTIONS = 100
"""The most options of a parameter that are shown."""

ALWAYS = 1000
"""With up to so many trials, importances are computed again at each end of a trial; with more, at each tenth more."""

Shares = dict[str, list[list[Any]]]


def present(run: Path) -> bool:
    """Whether the run is a study."""
    return (run / "results" / "study.json").is_file() or read_mapping(run, read_manifest).get("kind") == "study"


def document(run: Path) -> dict[str, Any]:
    """The study of a run; importances are those that it wrote where they cannot be computed."""
    running = lock.is_held(run / "lock")
    return _events.query(run / "events.jsonl", lambda events: _document(run, events, running))


def _document(run: Path, events: StudyEvents, running: bool) -> dict[str, Any]:
    manifest, result = read_mapping(run, read_manifest), read_mapping(run / "results" / "study.json", read_json)
    study, space = mapping(manifest.get("study")), read_space(events.space)
    directions = mapping(study.get("objectives"))
    names = [str(name) for name in as_list(study.get("names")) if name in directions] or list(directions)
    objectives = [(name, directions[name] == "maximize") for name in names]
    trials, bars = list(events.trials.values()), [*events.done, *events.running.values()]
    if not running:  # a driver that was killed wrote nothing about its jobs
        bars = [bar if bar.end is not None else replace(bar, end=events.now, state="interrupted") for bar in bars]
        trials = [trial if trial.state != "running" else replace(trial, state="waiting") for trial in trials]
    fits = [trial.fit for trial in trials if trial.fit is not None]
    return {
        "study": str(manifest.get("name") or run.name),
        "objectives": [{"name": name, "maximize": up} for name, up in objectives],
        "parameters": [] if space is None else parameters(space),
        "trials": trial_rows(trials, bool(objectives) and objectives[0][1]),
        "count": events.count,
        "importances": importances(space, trials, objectives, str(run)) or _written(result, names),
        "devices": device_bars(bars, events.devices, events.began or 0.0),
        "fit": {strategy: fits.count(strategy) for strategy in dict.fromkeys(fits)},
        "damaged": events.damaged,
    }


def read_space(value: object) -> Space | None:
    """The space that a study wrote; None where it wrote none, or a broken one."""
    from weft.space import Space

    try:
        return None if value is None else Space.from_json(value)
    except (SpaceError, KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None


def parameters(space: Space) -> list[dict[str, Any]]:
    """The parameters of a space, in its order: ranges of numbers, as evenly spaced integers are, or options."""
    from weft.space import Floats, Integers
    from weft.tune.study.optuna import step_of

    found = []
    for name, choice in space.choices.items():
        row: dict[str, Any] = {"name": name, "log": False, "options": None, "low": None, "high": None}
        if isinstance(choice, Floats):
            row |= {"log": choice.log, "low": choice.low, "high": choice.high}
        elif isinstance(choice, Integers) and len(choice.values) > 2 and step_of(choice) is not None:
            row |= {"low": choice.values[0], "high": choice.values[-1]}
        else:
            row["options"] = list(choice.options[:OPTIONS])
        found.append(row)
    return found


def _written(result: Mapping[str, Any], names: Sequence[str]) -> Shares:
    """The importances in results/study.json, which are those of the first objective."""
    shares = [(name, one) for name, one in mapping(result.get("importances")).items() if isinstance(one, float)]
    rows = [[name, rounded(one)] for name, one in sorted(shares, key=lambda pair: -pair[1])]
    return {names[0]: rows} if names and rows else {}


def importances(
    space: Space | None, trials: Sequence[TrialState], objectives: Sequence[tuple[str, bool]], key: str
) -> Shares:
    """The share of each parameter in each objective, largest first; objectives that Optuna refuses are left out.

    ``key`` names the study. There are none without Optuna or without a space.
    """
    usable = [] if space is None else [trial for trial in trials if _fits(trial, space, len(objectives))]
    if space is None or not usable:
        return {}
    count = len(usable)
    tenths = int(math.log(count / ALWAYS, 1.1)) if count > ALWAYS else 0
    return _computed.get(key, f"{min(count, ALWAYS)} {tenths}", lambda: _shares(space, usable, objectives))


def _shares(space: Space, trials: Sequence[TrialState], objectives: Sequence[tuple[str, bool]]) -> Shares:
    from weft.tune.study.storage import Direction, TrialRecord
    from weft.tune.study.study import importances as optuna_importances

    directions: list[Direction] = ["maximize" if maximize else "minimize" for _, maximize in objectives]
    records = []
    for trial in trials:
        params = {name: space.choices[name].canonical(value) for name, value in trial.params.items()}
        values = tuple(value for value in trial.values or () if value is not None)
        records.append(TrialRecord(trial.number, params, "complete", values))
    found: Shares = {}
    for at, (name, _) in enumerate(objectives):
        try:
            shares = optuna_importances(space, records, directions, at)
        except Exception:  # Optuna is not installed, or refuses what the file holds
            continue
        if shares:
            found[name] = [[one, rounded(share)] for one, share in shares.items()]
    return found


def _fits(trial: TrialState, space: Space, objectives: int) -> bool:
    """Whether a trial is complete and its parameters lie in the space."""
    values = trial.values or []
    known = all(name in space.choices and space.choices[name].contains(value) for name, value in trial.params.items())
    return trial.state == "complete" and len(values) == objectives and None not in values and known


_events = SummaryCache(StudyEvents)
_computed: Lru[Shares] = Lru(16)
