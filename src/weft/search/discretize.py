"""From a mixture to one subnet: the most probable one that meets cost targets, or the one that perturbation keeps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.data import Batch, IterableLoader, Loader
from weft.elastic import Mixture
from weft.elastic.mixture import choice_options
from weft.engine.rng import deterministic
from weft.engine.train_step import TrainStep
from weft.errors import SearchError, SpaceError
from weft.search.cost_table import Array, Table, constraint_tables, elimination_order, make_table
from weft.search.targets import TOLERANCE, Target
from weft.space import Space, Subnet, Value
from weft.supernet import Chain
from weft.trainer.api import TrainedRun
from weft.trainer.evaluate import Calibration, Scores

EXACT = 1 << 18  # up to so many combinations of all options every one is looked at
WIDTH = 1 << 13  # partial subnets that are kept for a larger space
LAST = 256  # subnets of which the first valid one is taken
FLOOR = 1e-30  # the probability of an option that has none, since a target may need it
Ints = npt.NDArray[np.int64]
Points = dict[str, Ints]  # for every choice of the space one index of an option a point


def most_probable_subnet(mixture: Mixture, targets: Sequence[Target] = (), tolerance: float = TOLERANCE) -> Subnet:
    """The valid subnet of the highest probability that costs what every target says, within the tolerance.

    The probability of each option is taken relative to the most probable one of its choice; a choice that is inactive
    counts 1. The answer is exact where all options have at most 262,144 combinations and, without targets, unless
    constraints connect very many choices; otherwise it is the best of some thousand partial subnets that are extended
    choice by choice. The same mixture always gives the same subnet. Raises SearchError where no subnet is found.
    """
    scorer = _SubnetScorer(mixture, targets, tolerance)
    point = scorer.best_of_all() if scorer.size <= EXACT else scorer.extend_choice_by_choice()
    if point is None or scorer.misses(scorer.costs_of(point))[0] > 0:
        raise SearchError(scorer.why_none(point))
    return scorer.subnet(point)


class _SubnetScorer:
    """Scores points of a space under a mixture: how improbable they are, what they cost, and whether they are valid."""

    def __init__(self, mixture: Mixture, targets: Sequence[Target], tolerance: float) -> None:
        self.space, self.targets, self.tolerance = mixture.space, tuple(targets), tolerance
        self.rules = self.space.rules
        if not self.rules.choices:
            raise SearchError("the space has no choices: there is nothing to pick")
        self.options = {name: choice_options(self.space, name) for name in self.rules.choices}
        self.names = list(self.options)
        self.size = math.prod(len(options) for options in self.options.values())
        self.losses = [self._loss(name, mixture[name].detach().double().cpu().numpy()) for name in self.names]
        self.losses += constraint_tables(self.rules)
        for target in self.targets:
            if target.expected.space_id != self.space.id:
                raise SearchError(f"the target for {target.expected.metric} was measured on another space")

    def _loss(self, name: str, probabilities: Array) -> Table:
        # Relative to the most probable option, and 0 for an inactive choice. Otherwise a subnet with fewer active
        # choices would be more probable, and shallow subnets would win.
        log = np.log(np.maximum(probabilities, FLOOR))
        at = {option: float(log.max() - one) for option, one in zip(self.options[name], log, strict=True)}
        return make_table(self.rules, [name], lambda values: at[values[name]] if name in values else 0.0)

    def subnet(self, point: Mapping[str, int]) -> Subnet:
        return self.space.subnet(self._values(point))

    def _values(self, point: Mapping[str, int]) -> dict[str, Value]:
        return self.rules.settle(lambda name, _: self.options[name][point[name]])

    def costs_of(self, point: Mapping[str, int]) -> list[Array]:
        return self._costs({name: np.array([point[name]]) for name in self.names})

    def _costs(self, points: Points) -> list[Array]:
        return [target.expected.constant + _sum(target.expected.tables, points) for target in self.targets]

    def misses(self, costs: Sequence[Array]) -> Array:
        """How far costs are beyond the tolerance of the targets."""
        total = np.zeros(len(costs[0]) if costs else 1)
        for target, cost in zip(self.targets, costs, strict=True):
            total = total + target.misses(cost, self.tolerance)
        return total

    def why_none(self, point: Mapping[str, int] | None) -> str:
        if point is None:
            return str(self.rules.empty())
        costs = zip(self.targets, self.costs_of(point), strict=True)
        near = ", ".join(f"{target.expected.metric}={cost[0]:g}" for target, cost in costs)
        asked = ", ".join(f"{target.expected.metric}={target.value:g}" for target in self.targets)
        return f"no subnet was found within {self.tolerance:.0%} of {asked}; the nearest has {near}: ask for that"

    def _first_valid(self, points: Iterable[dict[str, int]]) -> dict[str, int] | None:
        return next((point for point in points if self.rules.broken(self._values(point)) is None), None)

    def best_of_all(self) -> dict[str, int] | None:
        """The most probable valid point of all that miss the targets least."""
        places = np.unravel_index(np.arange(self.size), [len(options) for options in self.options.values()])
        points = dict(zip(self.names, places, strict=True))
        loss, off = _sum(self.losses, points), self.misses(self._costs(points))
        order = np.lexsort((loss, np.broadcast_to(off, loss.shape)))
        return self._first_valid(
            {name: int(points[name][at]) for name in self.names} for at in order[np.isfinite(loss[order])]
        )

    # For large spaces: partial points, extended by one choice after the other.
    #
    # Of the choices that have an option, only those matter that share a table with one that has none yet. For each
    # combination of these, and each of many intervals of the costs, the most probable partial point is kept. Without
    # targets that is exact.

    def extend_choice_by_choice(self) -> dict[str, int] | None:
        left: list[tuple[Table, int | None]] = [(table, None) for table in self.losses]
        left += [(table, at) for at, target in enumerate(self.targets) for table in target.expected.tables]
        plan = elimination_order([table for table, _ in left], self.names)
        # A choice that shares tables with many others is eliminated late: it comes first, and few combinations stay.
        order = self.names if plan is None else [name for name, _ in reversed(plan)]
        rows, loss = Points(), np.zeros(1)
        cost = np.array([target.expected.constant for target in self.targets]).reshape(-1, 1)
        steps: list[tuple[str, Ints, Ints]] = []
        for at, name in enumerate(order):
            before, option = np.divmod(np.arange(len(loss) * len(self.options[name])), len(self.options[name]))
            rows = {**{other: place[before] for other, place in rows.items()}, name: option}
            loss, cost = loss[before], cost[:, before]
            known = set(order[: at + 1])
            for table, kind in (one for one in left if known.issuperset(one[0].names)):
                values = table.values[tuple(rows[other] for other in table.names)]
                if kind is None:
                    loss = loss + values
                else:
                    cost[kind] += values
            left = [one for one in left if not known.issuperset(one[0].names)]
            needed = {other for table, _ in left for other in table.names}
            rows = {other: place for other, place in rows.items() if other in needed}
            kept = self._best_partial(list(rows.values()), loss, cost, left)
            rows, loss, cost = {other: place[kept] for other, place in rows.items()}, loss[kept], cost[:, kept]
            steps.append((name, before[kept], option[kept]))
        ends = np.lexsort((loss, np.broadcast_to(self.misses(list(cost)), loss.shape)))
        return self._first_valid(_point(steps, end) for end in ends[:LAST]) or self._near_a_valid_one()

    def _best_partial(
        self, rows: Sequence[Ints], loss: Array, cost: Array, left: Sequence[tuple[Table, int | None]]
    ) -> Ints:
        """The indices of the partial points to extend."""
        far = np.zeros(len(loss))  # how far they miss the targets in the end, at least
        for at, target in enumerate(self.targets):
            rest = [table.values for table, kind in left if kind == at]
            low = cost[at] + sum(float(values.min()) for values in rest) - target.value
            high = cost[at] + sum(float(values.max()) for values in rest) - target.value
            far += np.maximum(np.maximum(low, -high) / target.value - self.tolerance, 0.0)
        alive = np.flatnonzero(np.isfinite(loss))
        alive = alive[far[alive] <= far[alive].min(initial=math.inf)]
        group = np.zeros(len(alive), dtype=np.int64)
        for row in rows:
            group = np.unique(group * (int(row.max(initial=0)) + 1) + row[alive], return_inverse=True)[1]
        parts = int((WIDTH / (group.max(initial=0) + 1)) ** (1 / max(len(self.targets), 1)))
        bucket = np.zeros(len(alive), dtype=np.int64)
        for one in cost[:, alive]:
            share = (one - one.min(initial=math.inf)) / max(float(np.ptp(one)) if len(one) else 0.0, 1e-30)
            bucket = bucket * (parts + 4) + np.minimum(share * (parts + 4), parts + 3).astype(np.int64)
        buckets = np.unique(bucket, return_inverse=True)[1]
        kept = _lowest_of_each(group * (buckets.max(initial=0) + 1) + buckets, loss[alive], 1)
        if len(kept) > 2 * WIDTH:  # more combinations than are kept
            kept = kept[_lowest_of_each(buckets[kept], loss[alive][kept], max(WIDTH // (int(buckets.max()) + 1), 1))]
        found: Ints = alive[kept]
        return found

    def _near_a_valid_one(self) -> dict[str, int] | None:
        """Starts from the first subnet of the space and changes one choice at a time, as long as that is better: for
        constraints over too many choices for a table."""
        try:
            first = self.space.first()
        except SpaceError as problem:
            raise SearchError(str(problem)) from None
        point = {name: self.options[name].index(first.values.get(name, self.options[name][0])) for name in self.names}
        while True:
            changed = [(name, option) for name in self.names for option in range(len(self.options[name]))]
            points = {name: np.array([at if other == name else point[name] for other, at in changed]) for name in point}
            loss, off = _sum(self.losses, points), self.misses(self._costs(points))
            off = np.broadcast_to(off, loss.shape)
            now = changed.index((self.names[0], point[self.names[0]]))  # the change that is none
            better = (off < off[now]) | ((off == off[now]) & (loss < loss[now]))
            order = np.lexsort((loss, off))
            best = self._first_valid({name: int(points[name][at]) for name in point} for at in order[better[order]])
            if best is None:
                return point
            point = best


def _lowest_of_each(group: Ints, loss: Array, count: int) -> Ints:
    """The indices of so many of the least loss in each group."""
    order = np.lexsort((loss, group))
    places = np.arange(len(order))
    starts = np.r_[True, group[order][1:] != group[order][:-1]][: len(order)]
    rank = places - np.maximum.accumulate(np.where(starts, places, 0))
    return order[rank < count]


def _point(steps: Sequence[tuple[str, Ints, Ints]], end: int) -> dict[str, int]:
    """The options of the choices that end in this partial point."""
    point = {}
    for name, before, option in reversed(steps):
        point[name], end = int(option[end]), int(before[end])
    return point


def _sum(tables: Sequence[Table], points: Points) -> Array:
    """The sum of the tables at each point."""
    total = np.zeros(len(next(iter(points.values()))))
    for table in tables:
        total += table.values[tuple(points[name] for name in table.names)]
    return total


# Perturbation (Wang et al., 2021): the method keeps, in each choice, the option whose removal raises the loss most.
#
# The probabilities of a mixture say little about how good its options are: the most probable subnet of DARTS may even
# have no path from input to output. So each option is judged without the others, and the others without it.

SAMPLES = 2048
"""The most samples of the validation data that each option is judged by."""
SIZE = 256
"""Samples of a batch, unless those of the run are larger."""
BROKEN = 0.5
"""An option breaks the network if its loss without the others exceeds the least such loss by more than this share."""
SHARE = 4
"""All options together are judged by at most one over this of the samples of the training."""


def by_perturbation(trained: TrainedRun, mixture: Mixture) -> Subnet:
    """Decides one choice after another, the one of the least entropy first. Each option is removed in turn, and the
    others share its probability. The option whose removal costs most is kept, unless it breaks the network without the
    others.

    Choices of sizes, whose options are numbers, get their likeliest option: sizes are slices of one weight, so to
    remove one changes the scale of all others, which says nothing. The run's chain, in evaluation mode, has the weights
    that were learned with the mixture; its batch norms see each batch by itself. Cost targets are not considered.
    """
    chain, config, device = trained.chain, trained.step, trained.device
    space = chain.space
    rows = {name: mixture[name].detach().to(device) for name in space.choices}
    counts = {name: len(choice_options(space, name)) for name in rows}
    bits = {name: float(entropy) for name, entropy in mixture.entropies().items()}
    names = candidates(space)
    batches = _batches(trained, max(1, sum(counts[name] for name in names)))

    def cost(name: str, row: Tensor, seen: Sequence[Batch]) -> float:
        found = _loss(chain, Mixture.unchecked(space, {**rows, name: row}), seen, config, device)
        return math.inf if math.isnan(found) else found

    with deterministic(device):
        for name in sorted(names, key=bits.__getitem__):
            every = range(counts[name])
            alone = [cost(name, _certain(rows[name], option), batches[:1]) for option in every]
            working = [option for option in every if alone[option] <= min(alone) + BROKEN * abs(min(alone))]
            without = {option: cost(name, _without(rows[name], option), batches) for option in working or every}
            rows[name] = _certain(rows[name], max(without, key=without.__getitem__))
    return most_probable_subnet(Mixture.unchecked(space, rows))


def candidates(space: Space) -> list[str]:
    """The choices between different things, and not sizes of one."""
    options = {name: choice_options(space, name) for name in space.choices}
    return [n for n, own in options.items() if len(own) > 1 and not all(isinstance(one, int | float) for one in own)]


def _without(row: Tensor, option: int) -> Tensor:
    """The other options in their proportions, or with equal probabilities if this one had all of it."""
    others = 1.0 - _certain(row, option)
    left = row * others
    total = left.sum()
    return torch.where(total > 1e-6, left / total.clamp_min(1e-6), others / others.sum())


def _certain(row: Tensor, option: int) -> Tensor:
    return (torch.arange(len(row), device=row.device) == option).to(row.dtype)


@torch.no_grad()
def _loss(chain: Chain, mixture: Mixture, batches: Sequence[Batch], config: TrainStep, device: torch.device) -> float:
    """The loss under a mixture."""
    scores = Scores(config.loss, None)
    with Calibration([chain]):
        for batch in batches:
            with config.autocast(device):
                scores.add(chain(batch, mixture), batch)
    return scores.means()["loss"]


def _batches(run: TrainedRun, options: int) -> list[Batch]:
    """Validation batches; all options together take at most a share of the training time, with a forward as a third of
    a step."""
    config = run.step
    size = max(config.batch_size, SIZE)
    trained = config.steps * config.batch_size
    count = max(min(SAMPLES, trained // (SHARE * options)) // size, 1)
    source = run.data.validation
    assert source is not None
    if isinstance(source, IterableLoader):
        return list(islice(source.all(), count))
    size = min(size, len(source))
    loader = Loader(source, size, config.seed, device=run.device)
    return [loader.batch(k) for k in range(min(count, -(-len(source) // size)))]
