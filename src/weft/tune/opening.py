"""The opening of a study: created anew, or found to be the one that is to go on."""

from __future__ import annotations

from collections.abc import Sequence

from weft.errors import TuneError
from weft.runs.files import plain
from weft.tune.definition import Definition, difference
from weft.tune.storage import Storage

DEFINITION = "weft:definition"
"""The attribute of a study in which it keeps its definition."""


def prepare(rows: Storage, name: str, definition: Definition, objectives: Sequence[str], resume: bool) -> None:
    """Create the study, or see to it that the one that exists may be gone on with."""
    known = rows.attrs().get(DEFINITION) if rows.exists else None
    if known is None:
        if not rows.exists:
            if resume:
                raise TuneError(f"{rows.shown} has no study '{name}' to resume; start it without --resume")
            rows.create(definition.directions, objectives)
        elif rows.trials() or rows.directions() != definition.directions:  # else its maker was killed in between
            raise TuneError(f"{rows.shown} has a study '{name}' that weft did not make; use another name")
        rows.set_attr(DEFINITION, definition.to_json())
        return
    if not resume:
        states = [row.state.name for row in rows.trials()]
        ended = sum(state in ("COMPLETE", "PRUNED", "FAIL") for state in states)
        raise TuneError(
            f"a study '{name}' exists in {rows.shown}, with {ended} of {len(states)} trials ended; "
            "go on with it by --resume (resume=True), or use another name"
        )
    if (found := difference(known, plain(definition.to_json()))) is not None:
        raise TuneError(f"the study '{name}' cannot be resumed: {found}; give it back its definition, or another name")
