"""The overview of a run: its line in the list of runs, and its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.runs import events as peek
from weft.runs.run import read_manifest, state_of
from weft.serve.event_log import RunProgress, query_run
from weft.serve.fields import mapping, rounded, whole_number

LARGE = 16 << 20
"""Bytes of events; of longer files the list of runs reads both ends alone."""

KEYS = 2000
"""The most keys of a configuration that are shown."""


def summary(run: Path, name: str, views: Sequence[str]) -> dict[str, Any]:
    """The line about a run; `RunError` where its manifest cannot be read."""
    manifest, events = read_manifest(run), run / "events.jsonl"
    study = mapping(manifest.get("study"))
    if events.is_file() and events.stat().st_size > LARGE:
        reduced = RunProgress()
        for event in peek.head(events) + peek.tail(events):
            reduced.add_event(event)
        found = {**_figures(reduced, study), "damaged": None}  # to know it, all of the file has to be read
    else:
        found = query_run(run, lambda reduced: _figures(reduced, study))
    state = state_of(run, found.pop("ended"))
    config = mapping(manifest.get("config"))
    train, execution = mapping(config.get("train")), mapping(config.get("execution"))
    return {
        "name": name,
        "kind": "tune" if manifest.get("kind") == "study" else "gradient" if is_gradient_search(manifest) else "train",
        "state": state,
        "created": manifest.get("created") if isinstance(manifest.get("created"), str) else None,
        "device": manifest.get("device") if isinstance(manifest.get("device"), str) else None,
        **found,
        "seconds_left": found["seconds_left"] if state == "running" else None,
        "steps": found["steps"] if found["steps"] is not None else whole_number(train.get("steps")),
        "stages": found["stages"] or whole_number(execution.get("stages", train.get("stages"))) or 1,
        "same": [],
        "views": [*views, "config"],
    }


def damaged(name: str, problem: str) -> dict[str, Any]:
    """The line about a run that cannot be read."""
    none = dict.fromkeys(("created", "seconds", "steps", "seconds_left", "loss", "fingerprint", "device"))
    plain = {"kind": "train", "state": "damaged", "done": 0, "metrics": {}, "same": [], "stages": 1, "damaged": 0}
    return {"name": name, **plain, **none, "reason": problem, "views": []}


def with_duplicates(summaries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same lines, newest first, each with the names of the others that have its fingerprint."""
    alike: dict[str, list[str]] = {}
    for line in summaries:
        if line["fingerprint"]:
            alike.setdefault(line["fingerprint"], []).append(line["name"])
    newest = sorted(summaries, key=lambda line: (line["created"] or "", line["name"]), reverse=True)
    return [
        {**line, "same": [name for name in alike.get(line["fingerprint"], ()) if name != line["name"]]}
        for line in newest
    ]


def details(run: Path) -> dict[str, Any]:
    """The configuration under flat names, or else the settings of the training; and the rest of the manifest."""
    manifest = read_manifest(run)
    config = mapping(manifest.pop("config", None)) or run_settings(manifest)
    flat = flatten(config)
    return {"config": dict(list(flat.items())[:KEYS]), "manifest": manifest}


def run_settings(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings that decide the bits of a run; manifests of format 1 have them under ``law``."""
    return mapping(manifest.get("train_config", manifest.get("law")))


def is_gradient_search(manifest: Mapping[str, Any]) -> bool:
    """Whether the run trains weights and architecture together, by its manifest alone."""
    known = run_settings(manifest)
    return known.get("architecture_search", known.get("bilevel")) is not None


def flatten(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested tables under dotted names.

    >>> flatten({"train": {"steps": 3, "clip": None}, "data": "digits"})
    {'train.steps': 3, 'train.clip': None, 'data': 'digits'}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        found.update(
            flatten(value, f"{before}{name}.") if isinstance(value, dict) and value else {before + name: value}
        )
    return found


def _figures(reduced: RunProgress, study: Mapping[str, Any]) -> dict[str, Any]:
    metrics = {name: rounded(reduced.smooth(name)) for name in reduced.newest if name not in ("loss", "rate")}
    for place, (name, aim) in enumerate(mapping(study.get("objectives")).items()):
        if place in reduced.values:
            metrics[name] = rounded(reduced.values[place][aim == "maximize"])
    return {
        "seconds": rounded(reduced.seconds),
        "done": reduced.done,
        "steps": reduced.steps,
        "seconds_left": rounded(reduced.seconds_left()),
        "loss": rounded(reduced.smooth("loss")),
        "metrics": metrics,
        "fingerprint": reduced.fingerprint,
        "stages": reduced.stages,
        "damaged": reduced.damaged,
        "reason": reduced.reason,
        "ended": reduced.ended,
    }
