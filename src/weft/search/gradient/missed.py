"""The pick by what is missed (Wang et al., 2021): of each choice the option without which the mixture does worst.

A mixture of much can do well with probabilities that say little of its options by themselves: the likeliest subnet of
DARTS may even cut its output off from the input. What an option is worth shows when it is taken away; whether it can do
without the others, when it is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import islice

import torch
from torch import Tensor

from weft.data import Batch, Data, IterableLoader, Loader
from weft.pipeline.determinism import deterministic
from weft.pipeline.evaluate import Calibration, Scores
from weft.pipeline.settings import Settings
from weft.search.pick import likeliest
from weft.search.target import Penalty
from weft.space import Space, Subnet
from weft.supernet import Chain
from weft.supernet.elastic import Mixture
from weft.supernet.elastic.mixture import choice_options

SAMPLES = 2048
"""Of the validation data, at most, that each option is judged by."""
SIZE = 256
"""Of a batch, or as large as those of the run: few launches, and no more than subnets are scored with."""
BROKEN = 0.5
"""An option whose loss alone is that much above another's, as a share of that one, breaks the network."""
SHARE = 4
"""Samples that are looked at in all, for all options, are at most those that were trained with over this."""


def most_missed(
    chain: Chain, mixture: Mixture, data: Data, settings: Settings, penalties: Sequence[Penalty] = ()
) -> Subnet:
    """Settles one choice after another, the surest first: each option is taken away in turn, the others share its
    probability, and the one whose absence costs most is kept for good, unless it breaks the network when it is alone.

    Sizes, whose options are numbers, are slices of one weight: to take one away changes the scale of all others, which
    says nothing, so the likeliest are taken. The chain, in evaluation mode, has the weights that were learned with the
    mixture; its batch norms see each batch by itself. What a subnet shall cost is not looked at.
    """
    space, device = chain.space, settings.device
    rows = {name: mixture[name].detach().to(device) for name in space.choices}
    counts = {name: len(choice_options(space, name)) for name in rows}
    bits = {name: float(entropy) for name, entropy in mixture.entropies().items()}
    names = candidates(space)
    batches = _batches(data, settings, max(1, sum(counts[name] for name in names)))

    def cost(name: str, row: Tensor, seen: Sequence[Batch]) -> float:
        found = _cost(chain, Mixture.unchecked(space, {**rows, name: row}), seen, settings, penalties)
        return math.inf if math.isnan(found) else found

    with deterministic(device):
        for name in sorted(names, key=bits.__getitem__):
            every = range(counts[name])
            alone = [cost(name, _certain(rows[name], option), batches[:1]) for option in every]
            whole = [option for option in every if alone[option] <= min(alone) + BROKEN * abs(min(alone))]
            lost = {option: cost(name, _without(rows[name], option), batches) for option in whole or every}
            rows[name] = _certain(rows[name], max(lost, key=lost.__getitem__))
    return likeliest(Mixture.unchecked(space, rows))


def candidates(space: Space) -> list[str]:
    """The choices between different things, and not sizes of one."""
    options = {name: choice_options(space, name) for name in space.choices}
    return [n for n, own in options.items() if len(own) > 1 and not all(isinstance(one, int | float) for one in own)]


def _without(row: Tensor, option: int) -> Tensor:
    """The other options in their proportions; alike, where all of the probability was on this one."""
    others = 1.0 - _certain(row, option)
    left = row * others
    total = left.sum()
    return torch.where(total > 1e-6, left / total.clamp_min(1e-6), others / others.sum())


def _certain(row: Tensor, option: int) -> Tensor:
    return (torch.arange(len(row), device=row.device) == option).to(row.dtype)


@torch.no_grad()
def _cost(
    chain: Chain, mixture: Mixture, batches: Sequence[Batch], settings: Settings, penalties: Sequence[Penalty]
) -> float:
    """The loss under a mixture, and what its cost is punished with."""
    scores, low = Scores(settings.loss, None), settings.precision == "bf16"
    with Calibration([chain]):
        for batch in batches:
            with torch.autocast(settings.device.type, torch.bfloat16) if low else nullcontext():
                scores.add(chain(batch, mixture), batch)
    return scores.means()["loss"] + sum(float(one.penalty(mixture)) for one in penalties)


def _batches(data: Data, settings: Settings, options: int) -> list[Batch]:
    """Validation batches, as many as are worth the time: a look takes a third of a step."""
    size = max(settings.batch_size, SIZE)
    trained = settings.steps * settings.batch_size
    count = max(min(SAMPLES, trained // (SHARE * options)) // size, 1)
    source = data.validation
    assert source is not None
    if isinstance(source, IterableLoader):
        return list(islice(source.all(), count))
    size = min(size, len(source))
    loader = Loader(source, size, settings.seed, device=settings.device)
    return [loader.batch(k) for k in range(min(count, -(-len(source) // size)))]
