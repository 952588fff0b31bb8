"""Rows: a record as Optuna's storage keeps it, there and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.space import Space
from weft.tune.distributions import distributions
from weft.tune.method import optuna_module
from weft.tune.record import Record, State

REPORT, RUNGS, UNSTORED = "weft:report:", "weft:rungs", "weft:unstored"
STATES: dict[str, State] = {
    "WAITING": "waiting",
    "RUNNING": "running",
    "COMPLETE": "complete",
    "PRUNED": "pruned",
    "FAIL": "failed",
}


def new_row(space: Space, record: Record) -> Any:
    """A trial of Optuna for one that is proposed or enqueued."""
    trial = optuna_module().trial
    return trial.create_trial(
        state=trial.TrialState[{"waiting": "WAITING", "running": "RUNNING"}[record.state]],
        params=dict(record.params),
        distributions=distributions(space, record.params),
        system_attrs=stored(record.attrs),
    )


def record_of(space: Space, row: Any, objectives: int) -> Record:
    """The record that a trial of Optuna stands for, with the space's own values."""
    system = dict(row.system_attrs)
    params = {name: space.choices[name].canonical(row.params[name]) for name in space.choices if name in row.params}
    if objectives == 1:
        reports: dict[int, tuple[float, ...]] = {s: (float(v),) for s, v in row.intermediate_values.items()}
    else:
        told = {name: value for name, value in system.items() if name.startswith(REPORT)}
        reports = {int(name.removeprefix(REPORT)): read_report(value) for name, value in told.items()}
    return Record(
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


def incomplete(record: Record) -> bool:
    """Whether the record was read back without what its sampler kept in memory alone."""
    return any(name not in record.attrs for name in record.attrs.get(UNSTORED, ()))


def restored_from(records: Sequence[Record]) -> Iterator[Record]:
    """Of the records that a proposal sees, those from which CMA-ES might go on: back to the last complete one."""
    for record in reversed(records):
        if record.attrs.get(UNSTORED) or any(":optimizer:" in name for name in record.attrs):
            if record.state in ("complete", "pruned"):
                yield record
            if record.state == "complete":
                return
