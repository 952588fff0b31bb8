"""The document `tune`: a study by the events of its run, or by the storage that it lies in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import RunError, TuneError
from weft.runs import lock
from weft.runs.files import read_json
from weft.runs.run import read_manifest
from weft.serve.events.fold import Fold
from weft.serve.events.thin import rounded, whole
from weft.serve.study.bars import Bar, packed
from weft.serve.study.importances import importances
from weft.serve.study.ledger import BARS, Ledger
from weft.serve.study.parameters import Parameter, observed, of_config, of_space, read_space
from weft.serve.study.trials import Trial, listed, values_of

if TYPE_CHECKING:
    from weft.space import Space
    from weft.tune.storage import Stored


@dataclass(frozen=True, slots=True)
class Told:
    """A study, wherever it was read."""

    name: str
    objectives: Sequence[tuple[str, bool]]
    """Names, and whether they are maximized."""
    trials: Sequence[Trial]
    bars: Sequence[Bar]
    space: Space | None = None
    parameters: Sequence[Parameter] = ()
    devices: Mapping[str, int | None] | None = None
    began: float | None = None
    count: int | None = None
    importances: Mapping[str, Any] | None = None
    """Where they cannot be worked out, what is known of them."""
    damaged: int = 0

    def document(self, key: str) -> dict[str, Any]:
        """As the page takes it; the key names the study among others."""
        fits = [trial.fit for trial in self.trials if trial.fit is not None]
        parameters = self.parameters or observed(trial.params for trial in self.trials)
        maximize = bool(self.objectives) and self.objectives[0][1]
        return {
            "study": self.name,
            "objectives": [{"name": name, "maximize": up} for name, up in self.objectives],
            "parameters": [parameter.to_json() for parameter in parameters],
            "trials": listed(self.trials, maximize),
            "count": len(self.trials) if self.count is None else self.count,
            "importances": importances(self.space, self.trials, self.objectives, key) or dict(self.importances or {}),
            "devices": packed(self.bars, self.devices or {}, self.began or 0.0),
            "began": self.began,
            "fit": {way: fits.count(way) for way in dict.fromkeys(fits)},
            "damaged": self.damaged,
            "problem": None,
        }


def present(run: Path) -> bool:
    """Whether the run is a study."""
    return (run / "results" / "study.json").is_file() or _read(run, read_manifest).get("kind") == "study"


def document(run: Path) -> dict[str, Any]:
    """The study of a run by its events, and where those are gone by its result; its storage is not asked."""
    running = lock.is_held(run / "lock")
    return _ledgers.ask(run / "events.jsonl", lambda ledger: _of_run(run, ledger, running).document(str(run)))


def from_storage(url: str, name: str | None = None) -> dict[str, Any]:
    """A study in a storage, weft's or any other of Optuna; by default the newest.

    TuneError if the storage does not answer. One that answered before and does not now is shown as it was, with what
    is wrong in ``problem``.
    """
    from weft.tune.storage import read_study

    try:
        found = _of_storage(read_study(url, name)).document(f"{url} {name}")
    except TuneError as error:
        if (url, name) not in _last:
            raise
        return {**_last[url, name], "problem": str(error)}
    _last[url, name] = found
    return found


def _of_run(run: Path, ledger: Ledger, running: bool) -> Told:
    manifest, result = _read(run, read_manifest), _read(run / "results" / "study.json", read_json)
    study, config, space = _mapping(manifest.get("study")), _mapping(manifest.get("config")), read_space(ledger.space)
    ways = {**_mapping(result.get("objectives")), **_mapping(study.get("objectives"))}
    order = study.get("names")
    names = [str(name) for name in (order if isinstance(order, list) else []) if name in ways] or list(ways)
    trials, bars = list(ledger.trials.values()), [*ledger.done, *ledger.running.values()]
    if not trials:
        rows = result.get("trials")
        trials = [_resulted(row, names) for row in (rows if isinstance(rows, list) else []) if isinstance(row, Mapping)]
    if not running:  # a driver that was killed said nothing of what it left
        bars = [bar if bar.end is not None else replace(bar, end=ledger.now, state="interrupted") for bar in bars]
        trials = [trial if trial.state != "running" else replace(trial, state="waiting") for trial in trials]
    shares = [
        [name, rounded(one)] for name, one in _mapping(result.get("importances")).items() if isinstance(one, float)
    ]
    return Told(
        name=str(manifest.get("name") or run.name),
        objectives=[(name, ways[name] == "maximize") for name in names],
        trials=trials,
        bars=bars,
        space=space,
        parameters=of_config(config.get("space")) if space is None else of_space(space),
        devices=ledger.devices,
        began=ledger.began,
        count=max(ledger.count, len(trials)),
        importances={names[0]: sorted(shares, key=lambda pair: -(pair[1] or 0.0))} if names and shares else {},
        damaged=ledger.damaged,
    )


def _resulted(row: Mapping[str, Any], names: Sequence[str]) -> Trial:
    """A trial of results/study.json."""
    trial = Trial(whole(row.get("number")) or 0, _mapping(row.get("params")), str(row.get("state")))
    values = row.get("values")
    trial.values = values_of([values.get(name) for name in names]) if isinstance(values, Mapping) else None
    trial.note(_mapping(row.get("notes")))
    return trial


def _of_storage(stored: Stored) -> Told:
    from weft.tune.opening import DEFINITION
    from weft.tune.rows import STATES

    names = stored.attrs.get("study:metric_names")
    named = [str(name) for name in names] if isinstance(names, list) else []
    if len(named) != len(stored.directions):
        named = ["value"] if len(stored.directions) == 1 else [f"value {at}" for at, _ in enumerate(stored.directions)]
    space = read_space(_mapping(stored.attrs.get(DEFINITION)).get("space")) or _drawn_from(stored.trials)
    trials, bars = [], []
    for row in stored.trials:
        trial = Trial(row.number, dict(row.params), STATES.get(row.state.name, "failed"))
        trial.values = values_of(list(row.values or ()))
        trial.note(row.user_attrs)
        for step, value in sorted(row.intermediate_values.items()):
            trial.report(step, [value])
        trials.append(trial)
        bars += _bars(row, trial)
    began = min((bar.start for bar in bars), default=None)
    return Told(
        name=stored.name,
        objectives=[(name, way == "maximize") for name, way in zip(named, stored.directions, strict=True)],
        trials=trials,
        bars=bars[-BARS:],
        space=space,
        parameters=of_space(space) if space is not None else (),
        began=began,
    )


def _bars(row: Any, trial: Trial) -> list[Bar]:
    """When a trial ran: a storage knows when it was proposed and when it ended, and perhaps how long it took."""
    if row.datetime_start is None or trial.state == "waiting":
        return []
    start, end = row.datetime_start.timestamp(), row.datetime_complete.timestamp() if row.datetime_complete else None
    if end is not None and trial.seconds is not None:
        start = max(start, end - trial.seconds)
    devices = trial.devices or ["unknown"]
    state = trial.state
    return [Bar(str(trial.number), [trial.number], devices, start, end, trial.estimated, trial.measured, state)]


def _drawn_from(rows: Sequence[Any]) -> Space | None:
    """A space with what the trials of a study that is not weft's were drawn from; None where that is no space."""
    from weft.errors import SpaceError
    from weft.space import Space

    space = Space()
    try:
        for name, kind in {name: kind for row in rows for name, kind in row.distributions.items()}.items():
            if hasattr(kind, "choices"):
                space.categorical(name, kind.choices)
            elif isinstance(kind.low, int):
                space.integer(name, kind.low, kind.high, kind.step)
            else:
                space.real(name, kind.low, kind.high, kind.log)
    except SpaceError:
        return None
    return space if space.choices else None


def _read(path: Path, reader: Any) -> Mapping[str, Any]:
    try:
        return _mapping(reader(path)) if path.exists() else {}
    except RunError:
        return {}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


_ledgers = Fold(Ledger)
_last: dict[tuple[str, str | None], dict[str, Any]] = {}
