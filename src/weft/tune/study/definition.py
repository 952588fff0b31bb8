"""The definition of a study: what its proposals and prunings follow from, and must be equal when it is resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import TuneError
from weft.space import Space
from weft.tune.study.optuna import Given, OptunaSpec, parse_spec
from weft.tune.study.storage import Direction, Storage
from weft.utils import rng
from weft.utils.files import to_json


@dataclass(frozen=True, slots=True)
class Definition:
    space: Space
    directions: tuple[Direction, ...]
    seed: int
    max_concurrent: int
    sampler: OptunaSpec
    pruner: OptunaSpec

    def to_json(self) -> dict[str, Any]:
        return {
            "format": 2,
            "space": self.space.to_json(),
            "directions": list(self.directions),
            "seed": self.seed,
            "max_concurrent": self.max_concurrent,
            "sampler": self.sampler.to_json(),
            "pruner": self.pruner.to_json(),
        }


def check_space(space: Space) -> None:
    """Raises TuneError for a space in which nothing varies, SpaceError for one whose constraints cannot be met."""
    if not space.choices:
        raise TuneError("the space has no choices, so there is nothing to tune; add one, as space.real('lr', 1e-4, 1)")
    space.sample(rng.generator("check the space"))


def define(
    space: Space, directions: Sequence[Direction], seed: int, max_concurrent: int, sampler: Given, pruner: Given
) -> Definition:
    """A definition whose every part is checked."""
    check_space(space)
    chosen = parse_spec("sampler", sampler)
    if chosen.name == "cmaes" and len(directions) > 1:
        raise TuneError(f"the sampler 'cmaes' takes one objective, not {len(directions)}; use nsga2, tpe or gp")
    return Definition(space, tuple(directions), seed, max_concurrent, chosen, parse_spec("pruner", pruner))


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """The first thing that differs between two definitions, in words; None if nothing does."""
    if "window" in old:  # of format 1
        old = {**old, "max_concurrent": old["window"] + 1}
    for name in ("seed", "max_concurrent", "directions", "sampler", "pruner"):
        if old.get(name) != new[name]:
            return f"its {name} changed from {_shown(old.get(name))} to {_shown(new[name])}"
    before, after = ({entry["name"]: entry for entry in one["space"]["names"]} for one in (old, new))
    for name in (*before, *after):
        if name not in after or name not in before:
            return f"its space {'had' if name in before else 'did not have'} '{name}'"
        if before[name] != after[name]:
            return f"'{name}' of its space changed from {_shown(before[name])} to {_shown(after[name])}"
    if list(before) != list(after):
        return f"the order of its space changed from {', '.join(before)} to {', '.join(after)}"
    if old["space"]["require"] != new["space"]["require"]:
        return "the constraints of its space changed"
    return None


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        name = value.get("kind", value.get("name", ""))
        rest = {key: item for key, item in value.items() if key not in ("kind", "name") and item is not None}
        return " ".join([str(name), *(f"{key}={item}" for key, item in rest.items())])
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


DEFINITION = "weft:definition"
"""The attribute of a study in which it keeps its definition."""


def prepare(rows: Storage, name: str, definition: Definition, objectives: Sequence[str], resume: bool) -> None:
    """Create the study, or check that the one that exists may be resumed."""
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
            "continue it with --resume (resume=True), or use another name"
        )
    if (found := difference(known, to_json(definition.to_json()))) is not None:
        raise TuneError(f"the study '{name}' cannot be resumed: {found}; restore its definition, or use another name")
