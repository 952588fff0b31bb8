"""Progress on a terminal: a bar with the loss, the rate and the time left; nothing at all elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from weft.search.front import Scored
from weft.utils.units import format_bytes


class Bar:
    """A bar for one piece of work; ``train`` and ``search`` are its callbacks."""

    def __init__(self, console: Console, title: str, total: int, unit: str | None = None) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            Rate(unit or ("steps" if title == "train" else "subnets")),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task(title, total=total, note="")
        self._loss: float | None = None
        self._searches = False
        self._stages = self._bits = self._memory = ""
        self._mixture: npt.NDArray[np.float64] | None = None
        self._moved: tuple[int | None, int] = (None, 0)

    def train(self, event: Any) -> None:
        """Sees the events of a run."""
        if event["event"] == "started":
            self._progress.update(self._task, completed=event["at"])
        elif event["event"] == "step":
            loss = event["loss"]
            self._loss = loss if self._loss is None else 0.95 * self._loss + 0.05 * loss
            if "mixture" in event:
                self._bits = f" | {self._entropy(event['mixture']):.2f} bits"
            note = f"loss {self._loss:.3f}{self._bits}{self._stages}{self._memory}"
            self._progress.update(self._task, completed=event["step"] + 1, note=note)
        elif event["event"] == "pipeline":
            busy = " ".join("-" if share is None else f"{100 * share:.0f}" for share in event["busy"])
            self._stages = f" | busy % {busy} | in flight {' '.join(map(str, event['in_flight']))}"
        elif event["event"] == "offload":
            self._memory = _memory(event["stages"], self._moved, event.get("step"))
            moved = sum(own["loaded_bytes"] + own["evicted_bytes"] for own in event["stages"])
            self._moved = event.get("step"), moved

    def _entropy(self, probabilities: Sequence[float]) -> float:
        """The mean entropy of the choices, averaged over the last steps, since some methods give draws."""
        now = np.array(probabilities)
        self._mixture = now if self._mixture is None else 0.95 * self._mixture + 0.05 * now
        mean = self._mixture
        # The probabilities of a choice come to 1, so that all of them come to the number of choices.
        return float(-(mean * np.log2(np.maximum(mean, 1e-12))).sum() / mean.sum())

    def search(self, scored: Scored, cached: bool, budget: int | None = None) -> None:
        """Sees every score of a search; with a budget, of one that follows a training."""
        if budget is not None and not self._searches:
            self._progress.reset(self._task, description="search", total=budget, note="")
        self._searches = True
        name, value = next(iter(scored.scores.items()))
        self._progress.update(self._task, advance=1, note=f"last {name} {value:.4g}")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()


class Rate(ProgressColumn):
    """Units a second, computed when the bar is drawn and not at every step."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.3g} {self._unit}/s" if task.speed else "")


def _memory(stages: list[dict[str, Any]], before: tuple[int | None, int], step: int | None) -> str:
    """How much of the devices layers take, how often they were there in time, and what moves in a step."""
    taken, budget = (sum(own[key] for own in stages) for key in ("resident", "budget"))
    uses, misses, moved = (sum(own[key] for own in stages) for key in ("uses", "misses", "loaded_bytes"))
    moved += sum(own["evicted_bytes"] for own in stages)
    text = (
        f" | layers {format_bytes(taken)} of {format_bytes(budget)}, hits "
        f"{100 * (1 - misses / uses) if uses else 100:.1f} %"
    )
    if step is None or before[0] is None or step <= before[0]:
        return text
    return f"{text}, {format_bytes((moved - before[1]) / (step - before[0]))} a step"
