"""Ways to settle on a subnet once a mixture has been learned, for the comparison of `methods.py`.

`likeliest` looks at the probabilities alone. The others look at validation data too, with the weights as they are:
`settled` makes one choice after another certain, each time of the option that leaves the mixture with the least loss;
`removed` takes an option away instead, and keeps the one that is missed most (Wang et al., 2021); `rescored` scores
the likeliest subnet, some that are drawn from the mixture, and neighbours of the best, as subnets by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.data import Batch, Data, Loader
from weft.keys import generator
from weft.pipeline.evaluate import Calibration, Scores, evaluate, recalibrated
from weft.pipeline.law import Loss
from weft.search.pick import likeliest
from weft.space import Subnet
from weft.supernet import Chain
from weft.supernet.elastic import Mixture
from weft.supernet.elastic.mixture import choice_options

Rows = dict[str, Tensor]


def batches_of(data: Data, seed: int, device: torch.device, images: int = 2048, size: int = 512) -> list[Batch]:
    """Validation images, the same for all ways."""
    assert data.validation is not None
    size = min(size, len(data.validation))
    loader = Loader(data.validation, size, seed, device=device)
    return [loader.batch(k) for k in range(max(1, min(images, len(data.validation)) // size))]


def mixture_loss(chain: Chain, mixture: Mixture, batches: Sequence[Batch], loss: Loss) -> float:
    """What the mixture loses, every batch norm with the statistics of the batch."""
    scores = Scores(loss, None)
    with Calibration([chain]), torch.no_grad():
        for batch in batches:
            scores.add(chain(batch, mixture), batch)
    return scores.means()["loss"]


def settled(
    chain: Chain,
    mixture: Mixture,
    batches: Sequence[Batch],
    loss: Loss,
    order: str = "sure",
    remove: bool = False,
) -> Subnet:
    space = mixture.space
    rows: Rows = {name: mixture[name].detach() for name in space.choices}
    names = list(rows)
    if order != "fixed":
        entropy = {n: float(bits) for n, bits in mixture.entropies().items()}
        names.sort(key=lambda name: entropy[name] if order == "sure" else -entropy[name])
    for name in names:
        found = []
        for option in range(len(choice_options(space, name))):
            row = rows[name].clone() if remove else torch.zeros_like(rows[name])
            row[option] = 0.0 if remove else 1.0
            row = row / row.sum().clamp_min(1e-12)
            found.append(mixture_loss(chain, Mixture.unchecked(space, {**rows, name: row}), batches, loss))
        best = found.index(max(found) if remove else min(found))
        rows[name] = torch.zeros_like(rows[name])
        rows[name][best] = 1.0
    return likeliest(Mixture.unchecked(space, rows))


def rescored(
    chain: Chain, mixture: Mixture, data: Data, batches: Sequence[Batch], loss: Loss, seed: int, draws: int = 32
) -> Subnet:
    train = Loader(data.train, min(256, len(data.train)), seed, device=next(iter(batches[0].values())).device)
    calibration = [train.batch(0)]
    known: dict[Subnet, float] = {}

    def score(subnet: Subnet) -> float:
        if subnet not in known:
            with recalibrated(chain, subnet, calibration):
                known[subnet] = evaluate(chain, subnet, batches, loss)["loss"]
        return known[subnet]

    space, rng = mixture.space, generator(seed, "rescored")
    rows = {name: mixture[name].detach().double().cpu().numpy() for name in space.choices}
    score(likeliest(mixture))
    for _ in range(draws):
        drawn = {n: int(rng.choice(len(row), p=row / row.sum())) for n, row in rows.items()}
        score(space.subnet(space.rules.settle(lambda n, _: choice_options(space, n)[drawn[n]])))  # noqa: B023
    best = min(known, key=score)
    for _ in range(2):
        for neighbour in space.neighbours(best):
            score(neighbour)
        best = min(known, key=score)
    return best


def ways(
    chain: Chain, mixture: Mixture, data: Data, loss: Loss, seed: int, device: torch.device
) -> dict[str, Callable[[], Subnet]]:
    """Every way by name; the chain is the plain one, in evaluation mode."""
    mixture = Mixture.unchecked(chain.space, {n: mixture[n].detach().to(device) for n in chain.space.choices})
    batches = batches_of(data, seed, device)
    return {
        "likeliest": lambda: likeliest(mixture),
        "removed": lambda: settled(chain, mixture, batches, loss, remove=True),
        "rescored": lambda: rescored(chain, mixture, data, batches, loss, seed),
    }
