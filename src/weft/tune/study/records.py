"""Rows: a record as Optuna's storage keeps it, there and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from weft.errors import TuneError
from weft.space import Space, Value
from weft.tune.study.distributions import distributions
from weft.tune.study.optuna import optuna_module

REPORT, RUNGS, UNSTORED = "weft:report:", "weft:rungs", "weft:unstored"
STATES: dict[str, State] = {
    "WAITING": "waiting",
    "RUNNING": "running",
    "COMPLETE": "complete",
    "PRUNED": "pruned",
    "FAIL": "failed",
}


def new_row(space: Space, record: TrialRecord) -> Any:
    """A trial of Optuna for one that is proposed or enqueued."""
    trial = optuna_module().trial
    return trial.create_trial(
        state=trial.TrialState[{"waiting": "WAITING", "running": "RUNNING"}[record.state]],
        params=dict(record.params),
        distributions=distributions(space, record.params),
        system_attrs=stored(record.attrs),
    )


def record_of(space: Space, row: Any, objectives: int) -> TrialRecord:
    """The record that a trial of Optuna stands for, with the space's own values."""
    system = dict(row.system_attrs)
    params = {name: space.choices[name].canonical(row.params[name]) for name in space.choices if name in row.params}
    if objectives == 1:
        reports: dict[int, tuple[float, ...]] = {s: (float(v),) for s, v in row.intermediate_values.items()}
    else:
        told = {name: value for name, value in system.items() if name.startswith(REPORT)}
        reports = {int(name.removeprefix(REPORT)): read_report(value) for name, value in told.items()}
    return TrialRecord(
        number=row.number,
        params=params,
        state=STATES[row.state.name],
        values=None if row.values is None else tuple(row.values),
        reports=dict(sorted(reports.items())),
        notes=dict(row.user_attrs),
        attrs={name: value for name, value in system.items() if not name.startswith((REPORT, RUNGS))},
        rungs=tuple(system.get(RUNGS, ())),
    )


def written_report(values: Sequence[float]) -> list[str]:
    """As strings, since JSON has neither NaN nor infinity.

    >>> read_report(written_report((0.1, float("inf"))))
    (0.1, inf)
    """
    return [repr(float(value)) for value in values]


def read_report(written: Sequence[str]) -> tuple[float, ...]:
    return tuple(float(value) for value in written)


def stored(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """What is written of a sampler's attributes: all but the pickles of CMA-ES, of which it writes the names alone.

    A pickle from a database that others can write to is theirs to run here; a sampler's state can be had again by
    proposing the trial again.
    """
    pickles = sorted(name for name in attrs if ":optimizer:" in name)
    kept = {name: value for name, value in attrs.items() if name not in pickles}
    return {**kept, UNSTORED: pickles} if pickles else kept


def incomplete(record: TrialRecord) -> bool:
    """Whether the record was read back without what its sampler kept in memory alone."""
    return any(name not in record.attrs for name in record.attrs.get(UNSTORED, ()))


def restored_from(records: Sequence[TrialRecord]) -> Iterator[TrialRecord]:
    """Of the records that a proposal sees, those from which CMA-ES might go on: back to the last complete one."""
    for record in reversed(records):
        if record.attrs.get(UNSTORED) or any(":optimizer:" in name for name in record.attrs):
            if record.state in ("complete", "pruned"):
                yield record
            if record.state == "complete":
                return


# A record: one trial of a study as it stands, and what a later trial may see of it.

State = Literal["waiting", "running", "complete", "pruned", "failed"]
Direction = Literal["minimize", "maximize"]

_NONE: Mapping[Any, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TrialRecord:
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


def visible(records: Sequence[TrialRecord], number: int, window: int) -> list[TrialRecord]:
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
