"""Methods of gradient search: how the parameters of a choice become probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributions import Gamma
from torch.nn import functional as F

from weft.engine.bilevel import Bilevel
from weft.engine.optimizer import Optimizer
from weft.errors import SearchError, nearest
from weft.search.methods import METHODS


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
        """Probabilities that sum to 1, differentiable; without noise unless it trains."""
        ...


def default_warmup(method: GradientMethod, steps: int) -> int:
    """The steps that train the weights alone by default: the method's ``warm`` share of all, if any."""
    return int(steps * getattr(method, "warm", 0.0)) // 2 * 2


def default_optimizer(method: GradientMethod, steps: int) -> Optimizer:
    """The default optimizer of the architecture.

    Adam moves a parameter by about its learning rate a step. With the rate of DARTS, made for runs of many thousand
    steps, probabilities hardly change in a short run: a method that is ``quick`` gets a higher rate there.
    """
    usual = Bilevel().optimizer
    if not getattr(method, "quick", False):
        return usual
    return Optimizer(usual.kind, **{**usual.options, "lr": min(0.03, max(usual.options["lr"], 15 / steps))})


PICKS = ("likeliest", "perturbation")
"""How a subnet is chosen once the mixture is learned: by its probabilities, or by the loss without each option."""


def default_pick(method: GradientMethod) -> str:
    """The default: the method's ``pick``, if it has one."""
    pick = getattr(method, "pick", PICKS[0])
    if pick not in PICKS:
        raise SearchError(f"pick of '{method.name}' is {' or '.join(map(repr, PICKS))}, not {pick!r}")
    return str(pick)


@dataclass(frozen=True, slots=True)
class SampledMethod:
    """A way to train discrete subnets, of which evolution then finds the best."""

    name: str
    stream: str
    microbatches: int | None = None
    """Those of a step, if each is one subnet; else the configuration says how many there are."""
    distils: bool = False
    """Whether the largest subnet of a step teaches the others."""


def make_gradient_method(name: str) -> GradientMethod | SampledMethod:
    """The method of this name with its default settings."""
    if name in METHODS:
        raise SearchError(
            f"'{name}' searches a trained run: call weft.search(weft.train(build, data, ...), method=\"{name}\")"
        )
    if name not in _METHODS:
        raise SearchError(f"unknown gradient method '{name}'{nearest(name, _METHODS)}")
    return _METHODS[name]


# DrNAS (Chen et al., 2021): probabilities are drawn from a Dirichlet distribution whose concentration is learned.


@dataclass(frozen=True, slots=True)
class DrNAS:
    """The concentration is elu(alpha) + 1; gradients pass through the draw. Without training, its mean."""

    name: str = "drnas"
    order: int = 1
    anneals: bool = False
    warm: ClassVar[float] = 0.3
    quick: ClassVar[bool] = True
    pick: ClassVar[str] = "perturbation"

    def __call__(self, alpha: Tensor, training: bool, progress: Tensor | None) -> Tensor:
        concentration = F.elu(alpha) + 1.0
        if not training:
            return concentration / concentration.sum()
        # A normalised draw of gammas is one of the Dirichlet distribution; checks would make a GPU wait.
        gammas = Gamma(concentration.clamp_min(1e-4), torch.ones_like(concentration), validate_args=False)
        drawn = gammas.rsample()
        return drawn / drawn.sum()


# GDAS (Dong and Yang, 2019): one option of each choice is drawn by the Gumbel trick; gradients go straight through.


@dataclass(frozen=True, slots=True)
class GDAS:
    """The temperature falls from ``first`` to ``last`` as the run goes on."""

    first: float = 10.0
    last: float = 0.1
    name: str = "gdas"
    order: int = 1
    anneals: bool = True
    warm: ClassVar[float] = 0.3
    quick: ClassVar[bool] = True

    def __call__(self, alpha: Tensor, training: bool, progress: Tensor | None) -> Tensor:
        if not training:
            return torch.softmax(alpha, 0)
        temperature = self.first + (self.last - self.first) * (0.0 if progress is None else progress)
        noise = -torch.empty_like(alpha).exponential_().clamp_min(1e-20).log()
        soft = torch.softmax((torch.log_softmax(alpha, 0) + noise) / temperature, 0)
        hard = torch.zeros_like(soft).scatter(0, soft.argmax(0, keepdim=True), 1.0)
        return hard - soft.detach() + soft


# DARTS (Liu et al., 2019): a softmax over the options of each choice.


@dataclass(frozen=True, slots=True)
class Darts:
    """First order, or second (``order=2``), where the architecture's gradient looks one step of the weights ahead."""

    order: int = 1
    name: str = "darts"
    anneals: bool = False
    pick: ClassVar[str] = "perturbation"

    def __call__(self, alpha: Tensor, training: bool, progress: Tensor | None) -> Tensor:
        return torch.softmax(alpha, 0)


_METHODS: dict[str, GradientMethod | SampledMethod] = {
    "darts": Darts(),
    "darts2": Darts(order=2),
    "drnas": DrNAS(),
    "gdas": GDAS(),
    "pc-darts": Darts(name="pc-darts"),
    # SPOS (Guo et al., 2020): every step trains one subnet, drawn uniformly.
    "spos": SampledMethod("spos", "iid"),
    # FairNAS-style sampling (Chu et al., 2021): options of a choice are trained equally often, in weft's spaced order.
    "fairnas": SampledMethod("fairnas", "spaced"),
    # The sandwich rule (Yu et al., 2019): every step trains the largest subnet, which teaches, the smallest and two
    # random ones, as its micro-batches.
    "sandwich": SampledMethod("sandwich", "sandwich:2", microbatches=4, distils=True),
}
GRADIENT_METHODS = tuple(_METHODS)
