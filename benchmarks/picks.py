"""Ways to choose a subnet once a mixture is learned, for the comparison of `methods.py`.

`likeliest` looks at the probabilities alone. The others look at validation data too, with the weights as they are:
`perturbation` keeps of every choice the option whose removal raises the loss most (weft.search.discretize); `rescored`
scores the likeliest subnet, some that are drawn from the mixture, and neighbours of the best, as subnets by themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import weft
from weft.data import Loader
from weft.elastic import Mixture
from weft.elastic.mixture import choice_options
from weft.search.discretize import by_perturbation, most_probable_subnet
from weft.space import Subnet
from weft.trainer.evaluate import evaluate, recalibrated
from weft.utils.rng import generator

DRAWS = 32
IMAGES = 2048


def rescored(trained: weft.TrainedRun, mixture: Mixture) -> Subnet:
    chain, step, space = trained.chain, trained.step, mixture.space
    assert trained.data.validation is not None
    train, held = (
        Loader(part, min(256, len(part)), step.seed, device=trained.device)
        for part in (trained.data.train, trained.data.validation)
    )
    calibration, batches = [train.batch(0)], [held.batch(k) for k in range(IMAGES // 256)]
    known: dict[Subnet, float] = {}

    def score(subnet: Subnet) -> float:
        if subnet not in known:
            with recalibrated(chain, subnet, calibration):
                known[subnet] = evaluate(chain, subnet, batches, step.loss)["loss"]
        return known[subnet]

    rng = generator(step.seed, "rescored")
    rows = {name: mixture[name].detach().double().cpu().numpy() for name in space.choices}
    score(most_probable_subnet(mixture))
    for _ in range(DRAWS):
        drawn = {n: int(rng.choice(len(row), p=row / row.sum())) for n, row in rows.items()}
        score(space.subnet({name: choice_options(space, name)[at] for name, at in drawn.items()}))
    best = min(known, key=score)
    for _ in range(2):
        for neighbour in space.neighbours(best):
            score(neighbour)
        best = min(known, key=score)
    return best


def ways(trained: weft.TrainedRun, mixture: Mixture) -> dict[str, Callable[[], Subnet]]:
    """Every way by name; the chain is the plain one, in evaluation mode."""
    chain = trained.chain
    mixture = Mixture.unchecked(chain.space, {n: mixture[n].detach().to(trained.device) for n in chain.space.choices})
    return {
        "likeliest": lambda: most_probable_subnet(mixture),
        "perturbation": lambda: by_perturbation(trained, mixture),
        "rescored": lambda: rescored(trained, mixture),
    }
