"""The view `tune` of a run: its study, from the events or, where those are gone, from the result."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import SpaceError
from weft.runs import run as lock
from weft.runs.run import read_manifest
from weft.serve.event_log import Lru, SummaryCache
from weft.serve.fields import as_list, is_number, mapping, read_mapping, rounded, whole_number
from weft.serve.views.study_events import JobBar, StudyEvents, TrialState, device_bars, trial_rows, values_of
from weft.utils.files import read_json

if TYPE_CHECKING:
    from weft.space import Space

OPTIONS = 100
"""The most options of a parameter that are shown."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A range of numbers, or options without an order."""

    name: str
    log: bool = False
    options: tuple[Any, ...] | None = None
    low: float | None = None
    high: float | None = None

    def to_json(self) -> dict[str, Any]:
        options = None if self.options is None else list(self.options[:OPTIONS])
        return {"name": self.name, "log": self.log, "options": options, "low": self.low, "high": self.high}


def read_space(value: object) -> Space | None:
    """The space that a study wrote; None where it wrote none, or a broken one."""
    from weft.space import Space

    try:
        return None if value is None else Space.from_json(value)
    except (SpaceError, KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None


def parameters_of_space(space: Space) -> list[Parameter]:
    """The parameters of a space, in its order; evenly spaced integers are a range."""
    from weft.space import Floats, Integers
    from weft.tune.study.optuna import step_of

    found = []
    for name, choice in space.choices.items():
        if isinstance(choice, Floats):
            found.append(Parameter(name, choice.log, None, choice.low, choice.high))
        elif isinstance(choice, Integers) and len(choice.values) > 2 and step_of(choice) is not None:
            found.append(Parameter(name, False, None, choice.values[0], choice.values[-1]))
        else:
            found.append(Parameter(name, options=tuple(choice.options)))
    return found


def parameters_of_config(value: object) -> list[Parameter]:
    """The parameters of a configuration: lists of options, and tables with low and high."""
    found = []
    for name, given in value.items() if isinstance(value, Mapping) else ():
        if isinstance(given, list):
            found.append(Parameter(str(name), options=tuple(given)))
        elif isinstance(given, Mapping) and all(is_number(given.get(end)) for end in ("low", "high")):
            found.append(Parameter(str(name), bool(given.get("log")), None, given["low"], given["high"]))
    return found


def observed_parameters(params: Iterable[Mapping[str, Any]]) -> list[Parameter]:
    """The parameters of trials, where no space is known.

    >>> [one.name for one in observed_parameters([{"lr": 0.1, "width": 16}, {"lr": 0.2, "kind": "adam"}])]
    ['lr', 'width', 'kind']
    """
    by_name: dict[str, dict[str, Any]] = {}
    for one in params:
        for name, value in one.items():
            by_name.setdefault(str(name), {})[json.dumps(value, sort_keys=True, default=str)] = value
    found = []
    for name, values in by_name.items():
        if all(is_number(value) for value in values.values()):
            found.append(Parameter(name, False, None, min(values.values()), max(values.values())))
        else:
            found.append(Parameter(name, options=tuple(values[key] for key in sorted(values))))
    return found


ALWAYS = 1000
"""With up to so many trials, importances are computed again at each end of a trial; with more, at each tenth more."""

Shares = dict[str, list[list[Any]]]


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


@dataclass(frozen=True, slots=True)
class StudyView:
    """A study as its files have it."""

    name: str
    objectives: Sequence[tuple[str, bool]]
    """Names, and whether they are maximized."""
    trials: Sequence[TrialState]
    bars: Sequence[JobBar]
    space: Space | None = None
    parameters: Sequence[Parameter] = ()
    devices: Mapping[str, int | None] | None = None
    began: float | None = None
    count: int | None = None
    importances: Mapping[str, Any] | None = None
    """Those that the study wrote, for where they cannot be computed."""
    damaged: int = 0

    def document(self, key: str) -> dict[str, Any]:
        """The document of the page; the key names the study."""
        fits = [trial.fit for trial in self.trials if trial.fit is not None]
        parameters = self.parameters or observed_parameters(trial.params for trial in self.trials)
        maximize = bool(self.objectives) and self.objectives[0][1]
        return {
            "study": self.name,
            "objectives": [{"name": name, "maximize": up} for name, up in self.objectives],
            "parameters": [parameter.to_json() for parameter in parameters],
            "trials": trial_rows(self.trials, maximize),
            "count": len(self.trials) if self.count is None else self.count,
            "importances": importances(self.space, self.trials, self.objectives, key) or dict(self.importances or {}),
            "devices": device_bars(self.bars, self.devices or {}, self.began or 0.0),
            "began": self.began,
            "fit": {strategy: fits.count(strategy) for strategy in dict.fromkeys(fits)},
            "damaged": self.damaged,
        }


def present(run: Path) -> bool:
    """Whether the run is a study."""
    return (run / "results" / "study.json").is_file() or read_mapping(run, read_manifest).get("kind") == "study"


def document(run: Path) -> dict[str, Any]:
    """The study of a run, from its events or its result; its storage is not read."""
    running = lock.is_held(run / "lock")
    return _events.query(run / "events.jsonl", lambda events: _of_run(run, events, running).document(str(run)))


def _of_run(run: Path, events: StudyEvents, running: bool) -> StudyView:
    manifest, result = read_mapping(run, read_manifest), read_mapping(run / "results" / "study.json", read_json)
    study, config, space = mapping(manifest.get("study")), mapping(manifest.get("config")), read_space(events.space)
    directions = {**mapping(result.get("objectives")), **mapping(study.get("objectives"))}
    names = [str(name) for name in as_list(study.get("names")) if name in directions] or list(directions)
    trials, bars = list(events.trials.values()), [*events.done, *events.running.values()]
    if not trials:
        rows = as_list(result.get("trials"))
        trials = [_trial_of_result(row, names) for row in rows if isinstance(row, Mapping)]
    if not running:  # a driver that was killed wrote nothing about its jobs
        bars = [bar if bar.end is not None else replace(bar, end=events.now, state="interrupted") for bar in bars]
        trials = [trial if trial.state != "running" else replace(trial, state="waiting") for trial in trials]
    shares = [
        [name, rounded(one)] for name, one in mapping(result.get("importances")).items() if isinstance(one, float)
    ]
    return StudyView(
        name=str(manifest.get("name") or run.name),
        objectives=[(name, directions[name] == "maximize") for name in names],
        trials=trials,
        bars=bars,
        space=space,
        parameters=parameters_of_config(config.get("space")) if space is None else parameters_of_space(space),
        devices=events.devices,
        began=events.began,
        count=max(events.count, len(trials)),
        importances={names[0]: sorted(shares, key=lambda pair: -(pair[1] or 0.0))} if names and shares else {},
        damaged=events.damaged,
    )


def _trial_of_result(row: Mapping[str, Any], names: Sequence[str]) -> TrialState:
    """A trial of results/study.json."""
    trial = TrialState(whole_number(row.get("number")) or 0, mapping(row.get("params")), str(row.get("state")))
    values = row.get("values")
    trial.values = values_of([values.get(name) for name in names]) if isinstance(values, Mapping) else None
    trial.add_notes(mapping(row.get("notes")))
    return trial


_events = SummaryCache(StudyEvents)
_computed: Lru[Shares] = Lru(16)
