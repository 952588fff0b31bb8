"""Methods of gradient search: ask for the mixture, tell the gradient.

A method says how the parameters of a choice become probabilities. What they are learned from, weights and data, is the
same for all: ``Learner`` is the plain loop's way to use one, ``weft.search`` the pipeline's.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from weft.errors import SearchError, nearest
from weft.keys import torch_seeded
from weft.pipeline import Optimizer
from weft.pipeline.bilevel import Bilevel
from weft.pipeline.optimizer import Updater
from weft.space import Space
from weft.supernet.elastic import Mixture
from weft.supernet.elastic.mixture import choice_options


@runtime_checkable
class GradientMethod(Protocol):
    """How the architecture parameters of one choice become its probabilities. A value: frozen, and picklable."""

    @property
    def name(self) -> str: ...

    @property
    def order(self) -> int:
        """2: the gradient looks one step of the weights ahead."""
        ...

    @property
    def anneals(self) -> bool:
        """Whether it asks for the progress of the run."""
        ...

    def __call__(self, alpha: Tensor, training: bool, progress: Tensor | None) -> Tensor:
        """Probabilities that come to 1, differentiable; without noise unless it trains."""
        ...


def usual_warmup(method: GradientMethod, steps: int) -> int:
    """The steps that train the weights alone, where a user does not say: the method's ``warm`` share of all, if any."""
    return int(steps * getattr(method, "warm", 0.0)) // 2 * 2


def usual_optimizer(method: GradientMethod, steps: int) -> Optimizer:
    """The architecture's, where a user does not say.

    Adam moves a parameter by about its rate a step. With that of DARTS, made for runs of many thousand steps, nothing
    is decided in a short one: a method that is ``quick`` gets a rate that lets parameters go as far in any run.
    """
    usual = Bilevel().optimizer
    if not getattr(method, "quick", False):
        return usual
    return Optimizer(usual.kind, **{**usual.options, "lr": min(0.03, max(usual.options["lr"], 15 / steps))})


PICKS = ("likeliest", "missed")
"""How a subnet is settled on once the mixture is learned: by its probabilities, or by what is missed without it."""


def usual_pick(method: GradientMethod) -> str:
    """Where a user does not say: the method's ``pick``, if it has one."""
    said = getattr(method, "pick", PICKS[0])
    if said not in PICKS:
        raise SearchError(f"pick of '{method.name}' is {' or '.join(map(repr, PICKS))}, not {said!r}")
    return str(said)


@runtime_checkable
class SampledMethod(Protocol):
    """A way to train discrete subnets, of which evolution then finds the best."""

    @property
    def name(self) -> str: ...

    @property
    def stream(self) -> str: ...

    @property
    def microbatches(self) -> int | None: ...

    @property
    def distils(self) -> bool:
        """Whether the largest subnet of a step teaches the others."""
        ...


class Learner:
    """A method with its parameters, for a training loop of one's own.

    >>> from weft.search.gradient.darts import Darts
    >>> space = Space()
    >>> width = space.integer("width", [1, 2])
    >>> learner = Learner(space, Darts(), Optimizer("sgd", lr=1.0))
    >>> mixture = learner.ask()
    >>> (mixture["width"] * torch.tensor([0.0, 1.0])).sum().backward()  # the second option costs more
    >>> learner.tell()
    >>> [round(p, 3) for p in learner.ask()["width"].tolist()]
    [0.622, 0.378]
    """

    def __init__(
        self,
        space: Space,
        method: GradientMethod,
        optimizer: Optimizer | None = None,
        *,
        seed: int = 0,
        steps: int = 1000,
        device: torch.device | str = "cpu",
    ) -> None:
        self.space, self.method, self.seed, self.steps = space, method, seed, steps
        self.step = 0
        self.alphas = {
            name: torch.nn.Parameter(torch.zeros(len(choice_options(space, name)), device=device))
            for name in space.choices
        }
        self._updater = Updater(optimizer or Bilevel().optimizer, self.alphas)

    def ask(self, training: bool = True) -> Mixture:
        """The mixture of this step; its noise depends on the seed and the step alone."""
        device = next(iter(self.alphas.values())).device
        progress = torch.full((), min(self.step / self.steps, 1.0), device=device) if self.method.anneals else None
        with torch_seeded(self.seed, "ask", self.step):
            found = {name: self.method(alpha, training, progress) for name, alpha in self.alphas.items()}
        return Mixture.unchecked(self.space, found)

    def tell(self) -> None:
        """After a backward through the mixture: its gradient moves the parameters, and the next step begins."""
        used = [alpha for alpha in self.alphas.values() if alpha.grad is not None]
        if not used:
            raise SearchError("tell() comes after a backward through the mixture that ask() gave")
        gradients = [alpha.grad.clone() for alpha in used if alpha.grad is not None]
        self._updater.apply(used, gradients, 1.0)
        self.step += 1


def make_gradient_method(name: str) -> GradientMethod | SampledMethod:
    """The method of this name with its default settings."""
    from weft.search.gradient.darts import Darts
    from weft.search.gradient.drnas import DrNAS
    from weft.search.gradient.fairnas import FairNAS
    from weft.search.gradient.gdas import GDAS
    from weft.search.gradient.sandwich import Sandwich
    from weft.search.gradient.spos import SPOS

    made: dict[str, GradientMethod | SampledMethod] = {
        "darts": Darts(),
        "darts2": Darts(order=2),
        "drnas": DrNAS(),
        "gdas": GDAS(),
        "pc-darts": Darts(name="pc-darts"),
        "spos": SPOS(),
        "fairnas": FairNAS(),
        "sandwich": Sandwich(),
    }
    if name not in made:
        raise SearchError(f"unknown gradient method '{name}'{nearest(name, made)}")
    return made[name]


GRADIENT_METHODS = ("darts", "darts2", "drnas", "gdas", "pc-darts", "spos", "fairnas", "sandwich")
