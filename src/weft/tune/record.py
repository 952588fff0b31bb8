"""A record: one trial of a study as it stands, and what a later trial may see of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from weft.errors import TuneError
from weft.space import Value

State = Literal["waiting", "running", "complete", "pruned", "failed"]
Direction = Literal["minimize", "maximize"]

_NONE: Mapping[Any, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Record:
    """``waiting`` is enqueued by hand, ``running`` is proposed and not ended; the other states are final."""

    number: int
    params: Mapping[str, Value]
    state: State
    values: tuple[float, ...] | None = None
    """One per objective; of a pruned trial those of its last report, where they are numbers."""
    reports: Mapping[int, tuple[float, ...]] = field(default_factory=lambda: _NONE)
    """By step."""
    notes: Mapping[str, Any] = field(default_factory=lambda: _NONE)
    attrs: Mapping[str, Any] = field(default_factory=lambda: _NONE, repr=False, compare=False)
    """What the sampler keeps with the trial, such as its generation."""
    rungs: tuple[Mapping[str, Any], ...] = field(default=(), repr=False, compare=False)
    """What the pruner keeps with it, for each objective."""

    @property
    def ended(self) -> bool:
        return self.state in ("complete", "pruned", "failed")


def visible(records: Sequence[Record], number: int, window: int) -> list[Record]:
    """What trial ``number`` may know: the trials before ``number - window`` as they ended, the others as running.

    Which of the last ``window`` trials have ended by now depends on how fast they ran. Their values are hidden whatever
    their state, so that a proposal depends on the seed and on results alone; their parameters depend on nothing else.
    Of a failed trial only that it failed is seen: how far it came may have been a matter of time.
    """
    final = max(number - window, 0)
    if any(not record.ended for record in records[:final]):
        raise TuneError(f"trial {number} is proposed, and pruned, once every trial before {final} has ended")
    seen = []
    for record in records[:number]:
        if record.number >= final or record.state == "failed":
            state: State = "running" if record.number >= final else "failed"
            record = replace(record, state=state, values=None, reports=_NONE, notes=_NONE, rungs=())
        seen.append(record)
    return seen
