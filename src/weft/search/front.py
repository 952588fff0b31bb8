"""The front of a search: the feasible subnets that no other subnet dominates."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.errors import SearchError, WeftError, nearest
from weft.search.objectives import (
    Constraint,
    Objective,
    Scores,
    losses,
    metrics,
    parse_constraints,
    require,
    violations,
)
from weft.space import Space, Subnet
from weft.utils.files import to_json, write_atomic, write_json
from weft.utils.pareto import non_dominated

if TYPE_CHECKING:
    from rich.table import Table

FORMAT = 1


class Front:
    """The non-dominated feasible subnets, best first by the first objective, then by the next ones, then by id.

    The order does not depend on that of `scored`. Equal scores stay side by side; of a subnet that comes several times
    the first counts; a NaN objective or a broken constraint keeps a subnet off.
    """

    def __init__(
        self,
        scored: Iterable[Scored],
        objectives: Sequence[Objective],
        constraints: Iterable[str | Constraint] = (),
        extract: Extract | None = None,
        origin: Any = None,
    ) -> None:
        self.objectives = tuple(objectives)
        self.constraints = parse_constraints(constraints)
        if not self.objectives:
            raise SearchError("a front needs an objective: name a metric to maximize or to minimize")
        first: dict[Subnet, Scored] = {}
        for one in scored:
            require(one.scores, metrics(self.objectives, self.constraints))
            first.setdefault(one.subnet, one)
        scores = [one.scores for one in first.values()]
        feasible = violations(scores, self.objectives, self.constraints) == 0
        candidates = [one for one, ok in zip(first.values(), feasible, strict=True) if ok]
        points = losses([one.scores for one in candidates], self.objectives)
        members = [
            (tuple(point), one) for point, one, on in zip(points, candidates, non_dominated(points), strict=True) if on
        ]
        members.sort(key=lambda member: (member[0], member[1].subnet.id))
        self._members = tuple(FrontMember(one.subnet, one.scores, extract, origin) for _, one in members)

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[FrontMember]:
        return iter(self._members)

    def __getitem__(self, index: int) -> FrontMember:
        return self._members[index]

    def __repr__(self) -> str:
        wanted = ", ".join(f"{'max' if o.maximize else 'min'} {o.name}" for o in self.objectives)
        return f"Front({len(self)} subnets; {wanted})"

    def __rich__(self) -> Table:
        return self.table()

    @property
    def metrics(self) -> tuple[str, ...]:
        """The objectives in their order, then every other metric that a member has, by name."""
        own = [objective.name for objective in self.objectives]
        return tuple(own + sorted({name for member in self for name in member.scores} - set(own)))

    def best(self, maximize: str | None = None, **limits: float) -> FrontMember:
        """The member that is best by the first objective, or has most of the metric `maximize`, within the limits.

        A limit is a lower bound for a metric that is maximized or constrained from below, else an upper bound:
        `front.best(flops=5e7)`. Raises SearchError with the reachable range when no member meets them.
        """
        if not self._members:
            raise SearchError(
                "the front is empty: no scored subnet is feasible and finite; relax a constraint or search longer"
            )
        for name in (*limits, *([maximize] if maximize else [])):
            if name not in self.metrics:
                raise SearchError(f"no metric '{name}' on the front{nearest(name, self.metrics)}")
        rules = [Constraint(name, ">=" if self._lower(name) else "<=", bound) for name, bound in limits.items()]
        known = [member for member in self if limits.keys() <= member.scores.keys()]
        within = [member for member in known if not any(rule.violation(member.scores) for rule in rules)]
        if not within:
            ranges = "; ".join(f"{rule.name} from {self._range(rule.name)}" for rule in rules)
            wanted = " and ".join(f"{rule.name} {rule.op} {rule.bound:g}" for rule in rules)
            raise SearchError(f"no subnet on the front has {wanted}; the front reaches {ranges}: move a limit into it")
        goal = Objective(maximize, True) if maximize else self.objectives[0]
        return min(within, key=lambda member: (math.isnan(loss := goal.loss(member.scores)), loss))

    def table(self) -> Table:
        """The front as a Rich table; prints nothing."""
        from rich.table import Table

        goals = {objective.name: "max" if objective.maximize else "min" for objective in self.objectives}
        table = Table()
        table.add_column("subnet", no_wrap=True)
        for name in self.metrics:
            table.add_column(f"{name} ({goals[name]})" if name in goals else name, justify="right")
        for member in self:
            cells = (f"{member.scores[n]:.6g}" if n in member.scores else "" for n in self.metrics)
            table.add_row(member.subnet.id, *cells)
        return table

    def to_json(self) -> dict[str, Any]:
        """Plain values; numbers that JSON lacks (nan, inf) become text."""
        return {
            "format": FORMAT,
            "objectives": [{"name": o.name, "maximize": o.maximize} for o in self.objectives],
            "constraints": [str(rule) for rule in self.constraints],
            "members": [
                {"id": member.subnet.id, "subnet": member.subnet.to_json(), "scores": to_json(member.scores)}
                for member in self
            ],
        }

    @classmethod
    def from_json(cls, space: Space, obj: Mapping[str, Any], extract: Extract | None = None) -> Front:
        """The front that `to_json` wrote, with its subnets read and checked against the space."""
        try:
            if obj["format"] != FORMAT:
                raise SearchError(
                    f"this front has format {obj['format']!r}, and format {FORMAT} is read here: search again"
                )
            objectives = [Objective(str(o["name"]), bool(o["maximize"])) for o in obj["objectives"]]
            scored = [Scored(space.load_subnet(m["subnet"]), m["scores"]) for m in obj["members"]]
            for one, member in zip(scored, obj["members"], strict=True):
                if one.subnet.id != member["id"]:
                    raise SearchError(
                        f"subnet {member['id']} is {one.subnet.id} in this space: the front is of another space"
                    )
            return cls(scored, objectives, obj["constraints"], extract)
        except WeftError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SearchError(
                f"this is no front: {type(error).__name__} {error}; search again to write a new one"
            ) from error

    def save(
        self,
        folder: Path | str,
        layers: Callable[[Subnet], Sequence[Mapping[str, Any]]] | None = None,
        **more: Any,
    ) -> None:
        """Writes front.json, and front.csv with one column a metric and one a choice (empty where inactive).

        For pages that show the front, front.json holds what `layers` returns for each member, and the fields of `more`.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        record = {**more, **self.to_json()}
        if layers is not None:
            record["members"] = [
                {**member, "layers": list(layers(one.subnet))}
                for member, one in zip(record["members"], self, strict=True)
            ]
        write_json(folder / "front.json", record)
        choices = list(dict.fromkeys(name for member in self for name in member.subnet.values))
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(["subnet", *self.metrics, *choices])
        for member in self:
            metrics = (repr(member.scores[n]) if n in member.scores else "" for n in self.metrics)
            rows.writerow([member.subnet.id, *metrics, *(member.subnet.values.get(name, "") for name in choices)])
        write_atomic(folder / "front.csv", text.getvalue().encode())

    def _lower(self, name: str) -> bool:
        for objective in self.objectives:
            if objective.name == name:
                return objective.maximize
        return any(rule.name == name and not rule.upper for rule in self.constraints)

    def _range(self, name: str) -> str:
        values = np.array([member.scores.get(name, math.nan) for member in self])
        values = values[~np.isnan(values)]
        return f"{values.min():g} to {values.max():g}" if values.size else "nothing to nothing"


# A subnet with its scores, before and after it was picked from a front.

Extract = Callable[[Subnet], Any]


@dataclass(frozen=True, slots=True)
class Scored:
    """A subnet with its measured scores."""

    subnet: Subnet
    scores: Scores = field(hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scores", {name: float(value) for name, value in self.scores.items()})


@dataclass(frozen=True, slots=True)
class FrontMember(Scored):
    """A subnet of a front; `extract` makes it a plain module where the front is bound to a supernet."""

    extractor: Extract | None = field(default=None, repr=False, compare=False)
    origin: Any = field(default=None, repr=False, compare=False)
    """The trained run that it was found in, for `weft.retrain(pick)`; None for a front read from a file."""

    def extract(self) -> Any:
        """The subnet as a plain `nn.Module` with the supernet's weights; SearchError where no supernet is bound."""
        if self.extractor is None:
            raise SearchError(
                f"subnet {self.subnet.id} has no supernet to be extracted from: use Front(..., extract=...)"
            )
        return self.extractor(self.subnet)
