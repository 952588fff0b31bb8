"""The definition of a study: what its proposals and prunings follow from, so that a resumed one goes on alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import TuneError
from weft.space import Space
from weft.tune.distributions import check_space
from weft.tune.method import Given, Method, method
from weft.tune.record import Direction


@dataclass(frozen=True, slots=True)
class Definition:
    space: Space
    directions: tuple[Direction, ...]
    seed: int
    window: int
    sampler: Method
    pruner: Method

    def to_json(self) -> dict[str, Any]:
        return {
            "format": 1,
            "space": self.space.to_json(),
            "directions": list(self.directions),
            "seed": self.seed,
            "window": self.window,
            "sampler": self.sampler.to_json(),
            "pruner": self.pruner.to_json(),
        }


def define(
    space: Space, directions: Sequence[Direction], seed: int, window: int, sampler: Given, pruner: Given
) -> Definition:
    """A definition whose every part is checked."""
    check_space(space)
    if isinstance(directions, str) or not directions or any(one not in ("minimize", "maximize") for one in directions):
        raise TuneError(f"an objective is to 'minimize' or to 'maximize', one word for each; got {directions!r}")
    whole("seed", seed)
    whole("window", window, at_least=0)
    chosen = method("sampler", sampler)
    if chosen.name == "cmaes" and len(directions) > 1:
        raise TuneError(f"the sampler 'cmaes' takes one objective, not {len(directions)}; use nsga2, tpe or gp")
    return Definition(space, tuple(directions), seed, window, chosen, method("pruner", pruner))


def whole(name: str, value: object, at_least: int | None = None) -> None:
    """Raises TuneError for what is no integer, or too small a one."""
    if isinstance(value, bool) or not isinstance(value, int) or (at_least is not None and value < at_least):
        limit = "" if at_least is None else f" of at least {at_least}"
        raise TuneError(f"{name} is an integer{limit}, not {value!r}")


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """The first thing that differs between two definitions, in words; None if nothing does."""
    for name in ("seed", "window", "directions", "sampler", "pruner"):
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
