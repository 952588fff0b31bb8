"""The runs under a root, one line each: read from the manifest and both ends of the events, so a list is quick."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import RunError
from weft.runs import events
from weft.runs.run import PARTS, read_manifest, state_of


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One line about a run. `state` is that of `Run.state`, or "damaged" with the `problem`."""

    name: str
    state: str
    done: int
    total: int | None
    loss: float | None
    created: str | None
    path: Path
    problem: str | None = None


def list_runs(root: Path | str) -> list[RunSummary]:
    """A summary of each run in `root`, oldest first; a malformed one is listed as damaged and stops nothing.

    Steps done and loss come from events named `step` (`step` counted from 0, `loss`), the total from the newest event
    with `steps` or from the manifest's `steps` or `config.steps`.
    """
    root = Path(root)
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    summaries = [summary for path in folders if (summary := summarize(path)) is not None]
    return sorted(summaries, key=lambda summary: (summary.created or "", summary.name))


def summarize(path: Path) -> RunSummary | None:
    """The summary of one directory, or None if nothing in it belongs to a run."""
    try:
        if not any((path / part).exists() for part in PARTS):
            return None
        manifest = read_manifest(path)
        last = events.tail(path / "events.jsonl")
        ends = events.head(path / "events.jsonl") + last
        state: str = state_of(path, events.last_end(last))
    except (RunError, OSError) as error:
        return RunSummary(path.name, "damaged", 0, None, None, None, path, str(error))
    config = manifest.get("config")
    totals = [event.get("steps") for event in reversed(ends)]
    totals += [manifest.get("steps"), config.get("steps") if isinstance(config, Mapping) else None]
    created = manifest.get("created")
    steps = [event for event in ends if event.get("event") == "step" and _is_count(event.get("step"))]
    return RunSummary(
        name=str(manifest.get("name", path.name)),
        state=state,
        done=max((event["step"] + 1 for event in steps), default=0),
        total=next((total for total in totals if _is_count(total)), None),
        loss=_loss(steps),
        created=created if isinstance(created, str) else None,
        path=path,
    )


def _loss(steps: Iterable[dict[str, Any]]) -> float | None:
    """The loss of the highest step: a pipeline may finish steps in another order."""
    with_loss = [event for event in steps if "loss" in event]
    try:
        return float(max(with_loss, key=lambda event: event["step"])["loss"]) if with_loss else None
    except (TypeError, ValueError, OverflowError):
        return None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
