"""The progress of a study as values, as a live table on a terminal, and a summary at its end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from rich import live
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weft.tune.jobs import Device
from weft.tune.result import StudyResult
from weft.utils.units import format_bytes

ROWS = 16
_STYLES = {"running": "cyan", "starting": "cyan", "complete": "green", "pruned": "yellow", "failed": "red"}


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
    for record in sorted(found.best_trials, key=lambda one: _order(found, one.values))[:most] or ():
        table.add_row(str(record.number), *(f"{value:.6g}" for value in record.values or ()), _params(record.params))
    others = [one for one in found.trials if one.state == "complete" and one not in found.best_trials]
    if len(found.objectives) == 1:
        for record in sorted(others, key=lambda one: _order(found, one.values))[: most - 1]:
            table.add_row(
                str(record.number), *(f"{value:.6g}" for value in record.values or ()), _params(record.params)
            )
    console.print(table)
    counts = {state: sum(one.state == state for one in found.trials) for state in ("complete", "pruned", "failed")}
    console.print(", ".join(f"{count} {state}" for state, count in counts.items() if count) or "no trials")
    if found.importances:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in found.importances.items())
        console.print(f"what mattered for {found.objectives[0]}: {shares}", soft_wrap=True)
    total = sum(found.time_breakdown.values())
    if total > 0:
        shares = ", ".join(
            f"{name} {spent:.1f} s ({spent / total:.0%})" for name, spent in found.time_breakdown.items()
        )
        console.print(f"where the time of the trials went: {shares}; {found.seconds:.1f} s in all", soft_wrap=True)
    console.print(f"kept in {found.path}; optuna-dashboard {found.storage}", soft_wrap=True)


def _order(found: StudyResult, values: tuple[float, ...] | None) -> float:
    first = (values or (0.0,))[0]
    return -first if found.directions[0] == "maximize" else first


def _params(params: Mapping[str, Any]) -> str:
    return " ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in params.items()
    )


# The progress itself, trial by trial and device by device.

OPEN = ("waiting", "starting", "running")


@dataclass(slots=True)
class TrialProgress:
    """One trial. Times are in seconds of this run of the study."""

    number: int
    params: Mapping[str, Any]
    state: str = "waiting"
    device: str = ""
    places: tuple[int, ...] = ()
    """Indices of its devices."""
    memory: int | None = None
    """Bytes that were estimated, and reserved for it."""
    peak: int | None = None
    """Bytes that it took at its peak."""
    step: int | None = None
    values: tuple[float, ...] | None = None
    attempts: int = 0
    reason: str = ""
    """The last line of its error."""
    proposed: float = field(default_factory=time.monotonic)
    started: float = 0.0
    waited: float = 0.0
    starting: float = 0.0
    ran: float = 0.0

    def add_time(self, seconds: float | None) -> None:
        """Add the time of an attempt that is over; None: how long it ran is not known."""
        taken = time.monotonic() - self.started
        self.ran += taken if seconds is None else min(seconds, taken)
        self.starting += 0.0 if seconds is None else max(0.0, taken - seconds)


@dataclass(slots=True)
class StudyProgress:
    """Written by the runner alone."""

    name: str
    total: int
    """Number of trials."""
    objectives: tuple[str, ...]
    directions: tuple[str, ...]
    devices: Sequence[Device] = ()
    trials: dict[int, TrialProgress] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def count(self, *states: str) -> int:
        return sum(row.state in states for row in self.trials.values())

    def best(self) -> TrialProgress | None:
        """The complete trial with the best value of the first objective."""
        done = [row for row in self.trials.values() if row.state == "complete" and row.values]
        sign = -1.0 if self.directions[0] == "maximize" else 1.0
        return min(done, key=lambda row: (sign * (row.values or (0.0,))[0], row.number), default=None)

    def used(self, index: int) -> tuple[int, int]:
        """The trials on a device, and the bytes that are reserved for them."""
        here = [row for row in self.trials.values() if row.state in OPEN[1:] and index in row.places]
        return len(here), sum(row.memory or 0 for row in here)

    def time_breakdown(self) -> dict[str, float]:
        """Where the time of all trials went, in seconds."""
        rows = self.trials.values()
        return {
            "running": sum(row.ran for row in rows),
            "waiting": sum(row.waited for row in rows),
            "starting": sum(row.starting for row in rows),
        }
