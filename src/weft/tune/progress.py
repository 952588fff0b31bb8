"""The result of a study as values, its summary, and a live table of its progress on a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich import live
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weft.errors import TuneError
from weft.tune.jobs import OPEN, StudyProgress, TrialProgress
from weft.tune.study.storage import TrialRecord
from weft.utils.units import format_bytes

ROWS = 16
_STYLES = {"running": "cyan", "starting": "cyan", "complete": "green", "pruned": "yellow", "failed": "red"}


@dataclass(frozen=True, slots=True)
class StudyResult:
    """A study that has ended, as values; its storage, which optuna-dashboard opens, holds the same."""

    name: str
    path: Path
    storage: str
    """Without a password."""
    objectives: tuple[str, ...]
    directions: tuple[str, ...]
    trials: Sequence[TrialRecord]
    """By number."""
    best_trials: Sequence[TrialRecord]
    """The best trial, or with several objectives all that no other beats; none where no trial is complete."""
    importances: Mapping[str, float]
    """Of the first objective."""
    time_breakdown: Mapping[str, float]
    """Seconds of this run of the study, added up over trials: running, waiting, starting."""
    seconds: float
    """That this run of the study took."""

    @property
    def best(self) -> TrialRecord:
        """The complete trial that is best by the first objective; TuneError where there is none."""
        if not self.best_trials:
            failed = sum(record.state == "failed" for record in self.trials)
            raise TuneError(
                f"no trial of '{self.name}' is complete ({failed} of {len(self.trials)} failed): the info of a trial "
                "says why"
            )
        return min(self.best_trials, key=self.order)

    def order(self, record: TrialRecord) -> tuple[float, int]:
        """Sorts complete trials by the first objective, the best first."""
        first = (record.values or (0.0,))[0]
        return -first if self.directions[0] == "maximize" else first, record.number

    def to_json(self) -> dict[str, Any]:
        """Plain values, as ``weft tune --json`` prints them."""
        return {
            "study": self.name,
            "path": str(self.path),
            "storage": self.storage,
            "objectives": dict(zip(self.objectives, self.directions, strict=True)),
            "best": [self._to_json(record) for record in self.best_trials],
            "trials": [self._to_json(record) for record in self.trials],
            "importances": dict(self.importances),
            "time": dict(self.time_breakdown),
            "seconds": self.seconds,
        }

    def _to_json(self, record: TrialRecord) -> dict[str, Any]:
        values = None if record.values is None else dict(zip(self.objectives, record.values, strict=False))
        return {
            "number": record.number,
            "state": record.state,
            "params": dict(record.params),
            "values": values,
            "notes": dict(record.info),
        }


class LiveTable:
    """Shows the progress that ``update`` was last given, where the console is a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._progress: StudyProgress | None = None
        self._live = live.Live(get_renderable=self._shown, console=self._console, refresh_per_second=4, transient=True)

    def update(self, progress: StudyProgress) -> None:
        self._progress = progress

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def _shown(self) -> RenderableType:
        return Text("") if self._progress is None else render(self._progress)


def render(progress: StudyProgress) -> RenderableType:
    """A headline, the devices, and those of the trials that are open or ended last."""
    return Group(Text(headline(progress), style="bold"), devices(progress), trials(progress))


def headline(progress: StudyProgress) -> str:
    ended = progress.count("complete", "pruned", "failed")
    parts = [f"study {progress.name}: {ended} of {progress.total} trials ended"]
    parts += [
        f"{count} {state}" for state in ("running", "starting", "pruned", "failed") if (count := progress.count(state))
    ]
    best = progress.best()
    if best is not None and best.values:
        parts.append(f"best {progress.objectives[0]} {best.values[0]:.6g} (trial {best.number})")
    return " | ".join([*parts, f"{time.monotonic() - progress.began:.0f} s"])


def devices(progress: StudyProgress) -> Table:
    """A bar for each device: how much of it is in use."""
    table = Table.grid(padding=(0, 1))
    for index, device in enumerate(progress.devices):
        count, used = progress.used(index)
        full = device.memory or max(count, 1)
        taken = used if device.memory else count
        words = f"{count} {'trial' if count == 1 else 'trials'}"
        if device.memory:
            words += f", {format_bytes(used) if used else '0 B'} of {format_bytes(device.memory)}"
        name = device.name if device.node == "local" else f"{device.node[:8]}/{device.name}"
        table.add_row(
            name, ProgressBar(total=full, completed=min(taken, full), width=30), "away" if device.gone else words
        )
    return table


def trials(progress: StudyProgress) -> Table:
    """Those that are open, then those that ended last."""
    table = Table("trial", "state", "device", "memory", "real", "step", *progress.objectives, "")
    for column in table.columns[3 : 6 + len(progress.objectives)]:
        column.justify = "right"
    rows = progress.trials.values()
    open = sorted((row for row in rows if row.state in OPEN), key=lambda row: (row.state == "waiting", row.number))
    ended = sorted((row for row in rows if row.state not in OPEN), key=lambda row: -row.number)
    for row in (open + ended)[:ROWS]:
        table.add_row(*_cells(row, len(progress.objectives)), style=_STYLES.get(row.state, ""))
    return table


def _cells(row: TrialProgress, objectives: int) -> list[str]:
    values = [f"{value:.5g}" for value in row.values] if row.values else [""] * objectives
    memory = ["" if amount is None else format_bytes(amount) for amount in (row.memory, row.peak)]
    again = f"attempt {row.attempts}" if row.attempts > 1 else ""
    return [str(row.number), row.state, row.device, *memory, str(row.step or ""), *values, row.reason[:60] or again]


def summary(console: Console, found: StudyResult, most: int = 5) -> None:
    """The best trials, the importance of each choice, and where the time went."""
    table = Table("trial", *found.objectives, "values", title=f"study {found.name}", title_justify="left")
    several = len(found.objectives) > 1
    shown = found.best_trials if several else [one for one in found.trials if one.state == "complete"]
    for record in sorted(shown, key=found.order)[:most]:
        table.add_row(str(record.number), *(f"{value:.6g}" for value in record.values or ()), _params(record.params))
    console.print(table)
    counts = {state: sum(one.state == state for one in found.trials) for state in ("complete", "pruned", "failed")}
    console.print(", ".join(f"{count} {state}" for state, count in counts.items() if count) or "no trials")
    if found.importances:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in found.importances.items())
        console.print(f"what mattered for {found.objectives[0]}: {shares}", soft_wrap=True)
    total = sum(found.time_breakdown.values())
    if total > 0:
        times = found.time_breakdown.items()
        shares = ", ".join(f"{name} {spent:.1f} s ({spent / total:.0%})" for name, spent in times)
        console.print(f"where the time of the trials went: {shares}; {found.seconds:.1f} s in all", soft_wrap=True)
    console.print(f"kept in {found.path}; optuna-dashboard {found.storage}", soft_wrap=True)


def _params(params: Mapping[str, Any]) -> str:
    return " ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in params.items()
    )
