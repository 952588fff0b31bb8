"""A study on a terminal: a live table of its trials with its devices as bars, and at the end what came of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich import live
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weft.tune.board import OPEN, Board, Row
from weft.tune.tuned import Tuned
from weft.units import size

ROWS = 16
_STYLES = {"running": "cyan", "starting": "cyan", "complete": "green", "pruned": "yellow", "failed": "red"}


class Live:
    """Shows the board that ``see`` was last given; nothing at all where nobody looks."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._board: Board | None = None
        self._live = live.Live(get_renderable=self._shown, console=self._console, refresh_per_second=4, transient=True)

    def see(self, board: Board) -> None:
        self._board = board

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def _shown(self) -> RenderableType:
        return Text("") if self._board is None else shown(self._board)


def shown(board: Board) -> RenderableType:
    """How a study stands: a headline, its devices, and those of its trials that move or ended last."""
    return Group(Text(headline(board), style="bold"), devices(board), trials(board))


def headline(board: Board) -> str:
    ended = board.count("complete", "pruned", "failed")
    parts = [f"study {board.name}: {ended} of {board.trials} trials ended"]
    parts += [
        f"{count} {state}" for state in ("running", "starting", "pruned", "failed") if (count := board.count(state))
    ]
    best = board.best()
    if best is not None and best.values:
        parts.append(f"best {board.objectives[0]} {best.values[0]:.6g} (trial {best.number})")
    return " | ".join([*parts, f"{time.monotonic() - board.began:.0f} s"])


def devices(board: Board) -> Table:
    """A bar for each device: how much of it is taken."""
    table = Table.grid(padding=(0, 1))
    for place, device in enumerate(board.devices):
        count, used = board.used(place)
        full = device.memory or max(count, 1)
        taken = used if device.memory else count
        words = f"{count} {'trial' if count == 1 else 'trials'}"
        if device.memory:
            words += f", {size(used) if used else '0 B'} of {size(device.memory)}"
        name = device.name if device.node == "local" else f"{device.node[:8]}/{device.name}"
        table.add_row(
            name, ProgressBar(total=full, completed=min(taken, full), width=30), "away" if device.gone else words
        )
    return table


def trials(board: Board) -> Table:
    """What moves, then what ended last."""
    table = Table("trial", "state", "device", "memory", "real", "step", *board.objectives, "")
    for column in table.columns[3 : 6 + len(board.objectives)]:
        column.justify = "right"
    moving = [row for row in board.rows.values() if row.state in OPEN]
    moving.sort(key=lambda row: (OPEN.index(row.state) == 0, row.number))
    over = sorted((row for row in board.rows.values() if row.state not in OPEN), key=lambda row: -row.number)
    for row in (moving + over)[:ROWS]:
        table.add_row(*_cells(row, len(board.objectives)), style=_STYLES.get(row.state, ""))
    return table


def _cells(row: Row, objectives: int) -> list[str]:
    values = [f"{value:.5g}" for value in row.values] if row.values else [""] * objectives
    memory = ["" if amount is None else size(amount) for amount in (row.memory, row.peak)]
    again = f"attempt {row.attempts}" if row.attempts > 1 else ""
    return [str(row.number), row.state, row.device, *memory, str(row.step or ""), *values, row.why[:60] or again]


def summary(console: Console, found: Tuned, most: int = 5) -> None:
    """The best trials, what mattered, and where the time went."""
    table = Table("trial", *found.objectives, "values", title=f"study {found.name}", title_justify="left")
    for record in sorted(found.front, key=lambda one: _order(found, one.values))[:most] or ():
        table.add_row(str(record.number), *(f"{value:.6g}" for value in record.values or ()), _params(record.params))
    others = [one for one in found.trials if one.state == "complete" and one not in found.front]
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
    total = sum(found.time.values())
    if total > 0:
        shares = ", ".join(f"{name} {spent:.1f} s ({spent / total:.0%})" for name, spent in found.time.items())
        console.print(f"where the time of the trials went: {shares}; {found.seconds:.1f} s in all", soft_wrap=True)
    console.print(f"kept in {found.path}; optuna-dashboard {found.storage}", soft_wrap=True)


def _order(found: Tuned, values: tuple[float, ...] | None) -> float:
    first = (values or (0.0,))[0]
    return -first if found.directions[0] == "maximize" else first


def _params(params: Mapping[str, Any]) -> str:
    return " ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in params.items()
    )
