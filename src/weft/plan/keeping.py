"""What a user says of some modules: which of their dimensions may be split."""

from __future__ import annotations

from fnmatch import fnmatchcase

from weft.errors import PlanError, nearest
from weft.plan.graph import Graph
from weft.plan.layout import REPLICATED, Split
from weft.plan.tables import Allowed


def keeping(graph: Graph, keep: tuple[tuple[str, str], ...]) -> Allowed | None:
    """The rule that what the user said of some modules or parameters is kept; PlanError where a pattern names none."""
    if not keep:
        return None
    rules: dict[int, set[int]] = {}
    for pattern, words in keep:
        places = [p for p, o in enumerate(graph.operators) if _named(pattern, o.module) or _named(pattern, o.name)]
        if not places:
            names = sorted({o.module for o in graph.operators if o.module})
            raise PlanError(f"no module or operator is called '{pattern}'{nearest(pattern, names)}")
        wanted = [] if words == "replicated" else [word.strip() for word in words.split(",")]
        dims = sorted({dim.name for place in places for dim in graph.operators[place].dims})
        if wrong := [word for word in wanted if word not in dims]:
            raise PlanError(f"'{pattern}' has no dimension '{wrong[0]}': it has {', '.join(dims) or 'none'}")
        for place in places:
            names = [dim.name for dim in graph.operators[place].dims]
            rules[place] = {names.index(word) for word in wanted if word in names}

    def allowed(place: int, split: Split) -> bool:
        return place not in rules or all(dim == REPLICATED or dim in rules[place] for dim in split)

    return allowed


def _named(pattern: str, name: str) -> bool:
    return bool(name) and (fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*"))
