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
from weft.search.targets import TOLERANCE, Penalty, Target
from weft.space import Space, Subnet, Value
from weft.supernet import Chain
from weft.trainer.api import TrainedRun
from weft.trainer.evaluate import Calibration, Scores

EXACT = 1 << 18  # up to so many combinations of all options every one is looked at
WIDTH = 1 << 13  # partial subnets that are followed in larger spaces
ENDS = 256  # of which so many are looked at in the end,
STARTS = 4  # and so many are improved
PAIRS = 4096  # by changes of two choices, of which so many are looked at in a step
FLOOR = 1e-30  # the probability of an option that has none, since a target may need it
Ints = npt.NDArray[np.int64]
Points = dict[str, Ints]  # for every choice of the space one index of an option a point


def most_probable_subnet(mixture: Mixture, targets: Sequence[Target] = (), tolerance: float = TOLERANCE) -> Subnet:
    """The valid subnet of the highest probability that costs what every target says, within the tolerance.

    A subnet is as likely as its options are beside the likeliest ones, all choices taken together; a choice that is
    switched off counts as one at its likeliest. The answer is exact where all options have at most 262,144
    combinations and, without targets, unless very many choices are tied together; otherwise it is the best of a search
    that follows thousands of partial subnets, spread over their costs, and improves the best by one and two changes.
    The same mixture always gives the same subnet. Raises SearchError where no subnet is found.
    """
    scorer = _SubnetScorer(mixture, targets, tolerance)
    point = scorer.best_of_all() if scorer.size <= EXACT else scorer.search()
    if point is None or scorer.misses(scorer.alone(point))[0] > 0:
        raise SearchError(scorer.why_none(point))
    return scorer.subnet(point)


class _SubnetScorer:
    """Scores the points of a space under a mixture: how likely they are beside the likeliest, what they cost, and
    whether they are valid."""

    def __init__(self, mixture: Mixture, targets: Sequence[Target], tolerance: float) -> None:
        self.space, self.targets, self.tolerance = mixture.space, tuple(targets), tolerance
        self.rules = self.space.rules
        if not self.rules.choices:
            raise SearchError("the space has no choices: there is nothing to pick")
        self.options = {name: choice_options(self.space, name) for name in self.rules.choices}
        self.names = list(self.options)
        self.size = math.prod(len(options) for options in self.options.values())
        logs = {name: np.log(np.maximum(_probabilities(mixture, name), FLOOR)) for name in self.names}
        self.likely = {name: int(log.argmax()) for name, log in logs.items()}
        self.losses = [self._loss(name, log) for name, log in logs.items()]
        self.required, self._sure = constraint_tables(self.rules)
        for target in self.targets:
            if target.expected.space_id != self.space.id:
                raise SearchError(f"the target for {target.expected.metric} was measured on another space")

    def _loss(self, name: str, log: Array) -> Table:
        # Relative to the likeliest option, and 0 for a choice that is switched off. Otherwise a subnet with fewer
        # active choices would be likelier, and shallow subnets would win.
        at = {option: float(log.max() - one) for option, one in zip(self.options[name], log, strict=True)}
        return make_table(self.rules, [name], lambda values: at[values[name]] if name in values else 0.0)

    # -- points

    def alone(self, point: Mapping[str, int]) -> Points:
        return {name: np.array([point[name]]) for name in self.names}

    def values(self, point: Mapping[str, int]) -> dict[str, Value]:
        return self.rules.settle(lambda name, _: self.options[name][point[name]])

    def subnet(self, point: Mapping[str, int]) -> Subnet:
        return self.space.subnet(self.values(point))

    def is_valid(self, point: Mapping[str, int]) -> bool:
        return self._sure or self.rules.broken(self.values(point)) is None

    def loss(self, points: Points) -> Array:
        """Minus the logarithm of how likely a point is beside the likeliest; infinite where a constraint is known to be
        broken."""
        return _sum([*self.losses, *self.required], points)

    def costs(self, points: Points) -> list[Array]:
        return [target.expected.constant + _sum(target.expected.tables, points) for target in self.targets]

    def misses(self, points: Points) -> Array:
        return self._misses(self.costs(points), len(points[self.names[0]]))

    def _misses(self, costs: Sequence[Array], count: int) -> Array:
        total = np.zeros(count)
        for target, cost in zip(self.targets, costs, strict=True):
            total += target.misses(cost, self.tolerance)
        return total

    def why_none(self, point: Mapping[str, int] | None) -> str:
        if point is None:
            return str(self.rules.empty())
        near = ", ".join(
            f"{target.expected.metric}={cost[0]:g}"
            for target, cost in zip(self.targets, self.costs(self.alone(point)), strict=True)
        )
        asked = ", ".join(f"{target.expected.metric}={target.value:g}" for target in self.targets)
        return f"no subnet was found within {self.tolerance:.0%} of {asked}; the nearest has {near}: ask for that"

    def _first(self, points: Points, order: Iterable[int]) -> dict[str, int] | None:
        for at in order:
            point = {name: int(points[name][at]) for name in self.names}
            if self.is_valid(point):
                return point
        return None

    # -- small spaces

    def best_of_all(self) -> dict[str, int] | None:
        """The likeliest valid point of all that miss the targets least."""
        places = np.unravel_index(np.arange(self.size), [len(options) for options in self.options.values()])
        points = dict(zip(self.names, places, strict=True))
        loss, missed = self.loss(points), self.misses(points)
        order = np.lexsort((loss, missed))
        return self._first(points, order[np.isfinite(loss[order])])

    # -- large ones

    def search(self) -> dict[str, int] | None:
        """The best point that is found."""
        climbed = [self._climb(start) for start in self._swept() or [self._somewhere()]]
        found = [point for point in climbed if point is not None]
        ranks = [(self.misses(self.alone(point))[0], self.loss(self.alone(point))[0]) for point in found]
        return found[ranks.index(min(ranks))] if found else None

    def _swept(self) -> list[dict[str, int]]:
        """Good points, by settling choice after choice.

        Of what has been settled only those choices matter that share a table with one yet to come. For each combination
        of these, and each of many intervals of the costs, the likeliest is kept; without targets that is exact.
        """
        left: list[tuple[Table, int | None]] = [(table, None) for table in (*self.losses, *self.required)]
        left += [(table, at) for at, target in enumerate(self.targets) for table in target.expected.tables]
        plan = elimination_order([table for table, _ in left], self.names)
        # What is tied to most is eliminated last: settled first, it stays in few combinations.
        order = self.names if plan is None else [name for name, _ in reversed(plan)]
        rows, loss = Points(), np.zeros(1)
        cost = np.array([[target.expected.constant] for target in self.targets]).reshape(-1, 1)
        steps: list[tuple[str, Ints, Ints]] = []
        for at, name in enumerate(order):
            before, option = np.divmod(np.arange(len(loss) * len(self.options[name])), len(self.options[name]))
            rows = {**{other: place[before] for other, place in rows.items()}, name: option}
            loss, cost = loss[before], cost[:, before]
            settled = set(order[: at + 1])
            for table, kind in (one for one in left if settled.issuperset(one[0].names)):
                values = table.values[tuple(rows[other] for other in table.names)]
                if kind is None:
                    loss = loss + values
                else:
                    cost[kind] += values
            left = [one for one in left if not settled.issuperset(one[0].names)]
            ahead = {other for table, _ in left for other in table.names}
            rows = {other: place for other, place in rows.items() if other in ahead}
            kept = self._kept(list(rows.values()), loss, cost, left)
            rows, loss, cost = {other: place[kept] for other, place in rows.items()}, loss[kept], cost[:, kept]
            steps.append((name, before[kept], option[kept]))
        ends = np.lexsort((loss, self._misses(list(cost), len(loss))))[:ENDS]
        return [point for point in (_traced(steps, end) for end in ends) if self.is_valid(point)][:STARTS]

    def _kept(self, rows: Sequence[Ints], loss: Array, cost: Array, left: Sequence[tuple[Table, int | None]]) -> Ints:
        """Which of the partial points are worth to go on with."""
        far = np.zeros(len(loss))  # how far they will miss the targets at least
        for at, target in enumerate(self.targets):
            ahead = [table.values for table, kind in left if kind == at]
            low = cost[at] + sum(float(values.min()) for values in ahead) - target.value
            high = cost[at] + sum(float(values.max()) for values in ahead) - target.value
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
        kept = _foremost(group * (buckets.max(initial=0) + 1) + buckets, loss[alive], 1)
        if len(kept) > 2 * WIDTH:  # more combinations than can be followed
            kept = kept[_foremost(buckets[kept], loss[alive][kept], max(WIDTH // (int(buckets.max()) + 1), 1))]
        found: Ints = alive[kept]
        return found

    def _somewhere(self) -> dict[str, int]:
        try:
            first = self.space.first()
        except SpaceError as problem:
            raise SearchError(str(problem)) from None
        held = {name: self.options[name].index(value) for name, value in first.values.items()}
        return {**self.likely, **held}

    def _climb(self, start: dict[str, int]) -> dict[str, int] | None:
        """Changes one choice, or two, for as long as that misses the targets by less, or is likelier."""
        point = start if self.is_valid(start) else self._somewhere()
        while True:
            here = self.alone(point)
            known = float(self.misses(here)[0]), float(self.loss(here)[0])
            singles = [(n, v) for n in self.names for v in range(len(self.options[n])) if v != point[n]]
            ones = self._moved(point, [[change] for change in singles])
            better = self._better(ones, known)
            if better is None and singles:
                better = self._better(self._moved(point, self._pairs(singles, ones, here)), known)
            if better is None:
                return point if math.isfinite(known[1]) else None
            point = better

    def _moved(self, point: Mapping[str, int], changes: Sequence[Sequence[tuple[str, int]]]) -> Points:
        points = {name: np.full(len(changes), point[name]) for name in self.names}
        for at, change in enumerate(changes):
            for name, value in change:
                points[name][at] = value
        return points

    def _better(self, points: Points, known: tuple[float, float]) -> dict[str, int] | None:
        loss, missed = self.loss(points), self.misses(points)
        better = np.isfinite(loss) & ((missed < known[0]) | ((missed == known[0]) & (loss < known[1])))
        order = np.lexsort((loss, missed))
        return self._first(points, order[better[order]])

    def _pairs(self, singles: Sequence[tuple[str, int]], ones: Points, here: Points) -> list[list[tuple[str, int]]]:
        """The pairs of changes that promise most, if what each does alone adds up."""
        first, second = np.triu_indices(len(singles), 1)
        owner = np.array([self.names.index(name) for name, _ in singles])
        other = owner[first] != owner[second]
        first, second = first[other], second[other]
        # A change that breaks a constraint by itself may mend it with another: its own likelihood counts.
        loss = _sum(self.losses, ones)
        costs = [
            one[first] + one[second] - base[0] for one, base in zip(self.costs(ones), self.costs(here), strict=True)
        ]
        order = np.lexsort((loss[first] + loss[second], self._misses(costs, len(first))))[:PAIRS]
        return [[singles[first[at]], singles[second[at]]] for at in order]


def _foremost(group: Ints, loss: Array, count: int) -> Ints:
    """The indices of so many of the least loss in each group."""
    order = np.lexsort((loss, group))
    places = np.arange(len(order))
    starts = np.r_[True, group[order][1:] != group[order][:-1]][: len(order)]
    rank = places - np.maximum.accumulate(np.where(starts, places, 0))
    return order[rank < count]


def _traced(steps: Sequence[tuple[str, Ints, Ints]], end: int) -> dict[str, int]:
    """The options that led to an end."""
    point = {}
    for name, before, option in reversed(steps):
        point[name], end = int(option[end]), int(before[end])
    return point


def _probabilities(mixture: Mixture, name: str) -> Array:
    found: Array = mixture[name].detach().double().cpu().numpy()
    return found


def _sum(tables: Sequence[Table], points: Points) -> Array:
    """The sum of the tables at each point."""
    total = np.zeros(len(next(iter(points.values()))))
    for table in tables:
        total += table.values[tuple(points[name] for name in table.names)]
    return total


# Perturbation (Wang et al., 2021): the method keeps, in each choice, the option whose removal raises the loss most.
#
# The probabilities of a mixture say little about the worth of its options: the most probable subnet of DARTS may even
# have no path from input to output. So each option is judged without the others, and the others without it.

SAMPLES = 2048
"""The most samples of the validation data that each option is judged by."""
SIZE = 256
"""Samples of a batch, unless those of the run are larger."""
BROKEN = 0.5
"""An option breaks the network if its loss without the others exceeds the least such loss by more than this share."""
SHARE = 4
"""All options together are judged by at most one over this of the samples of the training."""


def by_perturbation(trained: TrainedRun, mixture: Mixture, penalties: Sequence[Penalty] = ()) -> Subnet:
    """Settles one choice after another, the one of the least entropy first. Each option is removed in turn, and the
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
        found = _cost(chain, Mixture.unchecked(space, {**rows, name: row}), seen, config, device, penalties)
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
def _cost(
    chain: Chain,
    mixture: Mixture,
    batches: Sequence[Batch],
    config: TrainStep,
    device: torch.device,
    penalties: Sequence[Penalty],
) -> float:
    """The loss under a mixture, with its penalties."""
    scores = Scores(config.loss, None)
    with Calibration([chain]):
        for batch in batches:
            with config.autocast(device):
                scores.add(chain(batch, mixture), batch)
    return scores.means()["loss"] + sum(float(one.penalty(mixture)) for one in penalties)


def _batches(run: TrainedRun, options: int) -> list[Batch]:
    """Validation batches, as many as are worth the time: one forward takes a third of a step."""
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
