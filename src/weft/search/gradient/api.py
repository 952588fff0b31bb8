"""Gradient search: a supernet and its data in; a run with its weights, its mixture and the subnet that it settles on
out."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from weft.data import Data, Loader, as_data
from weft.distributed.env import read_env
from weft.elastic import Mixture, Switch
from weft.elastic.mixture import choice_options
from weft.engine.bilevel import Bilevel
from weft.engine.losses import cross_entropy
from weft.engine.optimizer import Optimizer
from weft.engine.train_step import Loss
from weft.errors import SearchError, nearest
from weft.search.api import check_name, search, told_choices
from weft.search.cost_model import build_cost_model
from weft.search.discretize import by_perturbation, candidates, most_probable_subnet
from weft.search.front import Front, Scored
from weft.search.gradient.loss import Layout, MixedLoss, MixedMetric, Probabilities
from weft.search.gradient.methods import (
    PICKS,
    GradientMethod,
    SampledMethod,
    default_optimizer,
    default_pick,
    default_warmup,
    make_gradient_method,
)
from weft.search.objectives import parse_objectives
from weft.search.scorer import Scorer
from weft.search.targets import Penalty, Target, parse_targets
from weft.space import Subnet
from weft.supernet import Chain, Factory, initialise
from weft.supernet.mixed_chain import (
    PROGRESS,
    MixedChain,
    find_mixture_mismatch,
    make_mixed_chain,
    mixed_factory,
    parts,
)
from weft.trainer.api import TrainedRun, train
from weft.trainer.checkpointing import load_initial
from weft.trainer.config import consistencies
from weft.utils.files import write_json

log = logging.getLogger("weft.search")
LARGE = 200_000_000
"""Parameters of a supernet that is not tried out before it trains."""


@dataclass(frozen=True)
class GradientSearchResult:
    """What a gradient search settled on: the subnet, its scores on validation data, and the mixture behind it."""

    trained: TrainedRun
    """The run, with the plain supernet that has its weights: what ``weft.search`` and ``weft.retrain`` start from."""
    subnet: Subnet
    scores: dict[str, float]
    mixture: Mixture | None
    """None for methods that train by samples."""
    front: Front
    pick: str | None = None
    """How the subnet was settled on: ``likeliest`` or ``missed``; None for methods that train by samples."""

    def extract(self) -> nn.Module:
        """The subnet as a plain module with the supernet's weights."""
        module: nn.Module = self.front.best().extract()
        return module


def search_gradient(
    net: Chain | Factory,
    data: Any,
    *,
    method: str | GradientMethod | SampledMethod = "drnas",
    steps: int,
    loss: Loss = cross_entropy,
    metrics: dict[str, Any] | None = None,
    targets: str | Iterable[str] = (),
    penalties: Sequence[Penalty] = (),
    architecture: Optimizer | None = None,
    warmup_weights: int | None = None,
    pick: str | None = None,
    seed: int = 0,
    budget: int = 200,
    recalibrate: int = 2,
    name: str = "search",
    on_score: Callable[[Scored, bool], None] | None = None,
    **options: Any,
) -> GradientSearchResult:
    """Learns weights and architecture together, and returns the subnet that it settles on.

    ``steps`` counts steps of both kinds: after ``warmup_weights`` steps for the weights alone (as many as suit the
    method, if not given), every second one trains the architecture on validation data. ``targets`` such as
    ``"parameters=5e6"`` or ``"flops=1e9"`` pull the expected cost of the mixture there, and the subnet meets them
    within 2 %. ``architecture`` is the optimizer of the architecture parameters. ``pick`` says how the subnet is
    settled on in the end: the ``likeliest`` of the mixture, or of each choice of candidates the one that is ``missed``
    most; if not given, as suits the method, and under targets the likeliest that meets them. Methods that train by
    samples (``spos``, ``fairnas``, ``sandwich``) train their stream and then search ``budget`` subnets by evolution for
    the least loss, of which ``on_score`` is told. Other options are those of ``weft.train``; the run resumes, runs on
    several stages and repeats to the bit as any other.
    """
    chosen = make_gradient_method(method) if isinstance(method, str) else method
    check_arguments(chosen, steps, metrics, targets, penalties, architecture, warmup_weights, pick, options)
    given = {"steps": steps, "loss": loss, "metrics": dict(metrics or {}), "seed": seed, **options}
    check_name(name)
    started = read_env()
    if started is not None and started.world > 1:  # only the first of them would have the weights in the end
        raise SearchError("gradient search starts the processes of its stages itself: use stages=N and not torchrun")
    loaded = as_data(data, seed)
    if loaded.validation is None:
        raise SearchError(
            f"'{chosen.name}' finds the architecture on validation data, and this data set has none: "
            "split some off with weft.data.split"
        )
    if not initialise(net, seed, only=()).space.choices:
        raise SearchError(f"'{chosen.name}' has nothing to search: the supernet has no choices")
    wanted = _targets(net, loaded, targets, seed, str(options.get("device", "cpu")))
    if isinstance(chosen, SampledMethod):
        return _by_samples(net, data, chosen, given, wanted, budget, recalibrate, name, on_score)
    way = pick or default_pick(chosen)
    if wanted or not candidates(initialise(net, seed, only=()).space):
        way = "likeliest"
    warm = default_warmup(chosen, steps) if warmup_weights is None else warmup_weights
    bilevel = Bilevel(architecture or default_optimizer(chosen, steps), warm, order=chosen.order)
    if not any(bilevel.architecture(step) for step in range(warm, steps)):
        raise SearchError(
            f"of {steps} steps, {warm} of which train the weights alone, none trains the architecture: give more steps"
        )
    side = (PROGRESS,) if chosen.anneals else ()
    mixed = make_mixed_chain(net, chosen, side)
    if chosen.name == "pc-darts" and not _is_partial(mixed.plain):
        raise SearchError(
            "'pc-darts' mixes a part of the channels, which the supernet has to be built for: give its switches "
            "partial=4, as weft.zoo.cells(partial=4) does, or use 'darts'"
        )
    _tell_unfaithful(net, loaded, seed)
    layout: Layout = tuple((n, len(choice_options(mixed.space, n))) for n in mixed.order)
    total = sum(count for _, count in layout)
    given |= {
        "loss": MixedLoss(loss, layout, (*wanted, *penalties), repr(chosen)),
        "metrics": {**{n: MixedMetric(m) for n, m in (metrics or {}).items()}, "mixture": Probabilities(total)},
        "stream": mixed.space.first(),
        "bilevel": bilevel,
    }
    trained = train(mixed_factory(net, chosen, side), data, **given)
    assert isinstance(trained.chain, MixedChain)
    mixture = trained.chain.mixture()
    plain = replace(
        trained,
        chain=_inherited(net, trained, seed),
        net=net,
        settings=replace(
            trained.settings,
            loss=loss,
            metrics=dict(metrics or {}),
            bilevel=None,
            consistency=consistencies(initialise(net, seed, only=()), options.get("consistency")),
        ),
    )
    if way == "missed":
        subnet = by_perturbation(plain.chain, mixture, plain.data, plain.settings, penalties)
    else:
        subnet = most_probable_subnet(mixture, wanted)
    return replace(_found(plain, subnet, mixture, recalibrate, name, chosen.name, layout), pick=way)


def _tell_unfaithful(net: Chain | Factory, data: Data, seed: int) -> None:
    """Warns where a mixture that is certain is not its subnet: the search would learn from another network."""
    chain = initialise(net, seed, only=())
    held = (p.numel() for block in chain.blocks for part in parts(block, chain) for p in part.parameters(recurse=False))
    if sum(held) > LARGE:
        return
    try:
        found = find_mixture_mismatch(initialise(net, seed), Loader(data.train, 2, 0, shuffle=False).batch(0))
    except Exception as problem:  # which training would meet too, and tell with the layer's name
        log.debug("mixtures were not tried out: %s", problem)
        return
    if found is not None:
        block, subnet, off = found
        log.warning(
            "block '%s' under a mixture that is certain of '%s' is %.0f %% off what the subnet computes, so the search "
            "learns from another network than it picks: its forward joins, cuts or sums features whose number varies; "
            "use an elastic layer for each part instead",
            block, subnet, 100 * off,
        )  # fmt: skip


def _is_partial(chain: Chain) -> bool:
    found = (part for block in chain.blocks for part in parts(block, chain))
    return any(isinstance(part, Switch) and part.partial is not None for part in found)


def _by_samples(
    net: Chain | Factory,
    data: Any,
    method: SampledMethod,
    given: dict[str, Any],
    wanted: Sequence[Target],
    budget: int,
    recalibrate: int,
    name: str,
    on_score: Callable[[Scored, bool], None] | None,
) -> GradientSearchResult:
    given = {"stream": method.stream, **given}
    if method.microbatches is not None:
        if given.get("microbatches", 1) not in (1, method.microbatches):
            raise SearchError(
                f"a step of '{method.name}' is {method.microbatches} micro-batches, one for each of its subnets: "
                "leave microbatches out"
            )
        given["microbatches"] = method.microbatches
    if method.distils:
        given.setdefault("distil", True)
    trained = train(net, data, **given)
    bounds = [f"{t.expected.metric}{op}{t.value * (1 + s)}" for t in wanted for op, s in ((">=", -0.02), ("<=", 0.02))]
    front = search(
        trained,
        minimize="loss",  # ranks subnets with inherited weights better than accuracy does, which is the same for many
        constraints=bounds,
        budget=budget,
        method="evolution",
        seed=int(given["seed"]),
        recalibrate=recalibrate,
        name=name,
        on_score=on_score,
        expected=[target.expected for target in wanted],
    )
    best = front.best()
    return GradientSearchResult(trained, best.subnet, dict(best.scores), None, front)


def _targets(
    net: Chain | Factory, data: Data, targets: str | Iterable[str], seed: int, device: str
) -> tuple[Target, ...]:
    """What the texts ask for, with the costs of this supernet measured; raises SearchError for what cannot be met."""
    texts = [targets] if isinstance(targets, str) else list(targets)
    if not texts:
        return ()
    chain = initialise(net, seed).eval()
    batch = {name: tensor[:1] for name, tensor in Loader(data.train, 1, 0, shuffle=False).batch(0).items()}
    wanted = parse_targets(texts, lambda metric: build_cost_model(chain, batch, metric, device=device))
    most_probable_subnet(
        Mixture.uniform(chain.space), wanted
    )  # what no subnet meets is said now, and not after the training
    return wanted


def _inherited(net: Chain | Factory, trained: TrainedRun, seed: int) -> Chain:
    """The plain supernet with the weights of the mixed one."""
    plain = initialise(net, seed, trained.settings.device)
    load_initial(plain, trained.chain.state_dict())
    return plain.eval()


def _found(
    trained: TrainedRun,
    subnet: Subnet,
    mixture: Mixture,
    recalibrate: int,
    name: str,
    method: str,
    layout: Layout,
) -> GradientSearchResult:
    scorer = Scorer(trained.chain, trained.data, trained.settings, recalibrate)
    scores = {**scorer.quality(subnet), **scorer.cheap(subnet)}
    quality = next(iter(trained.settings.metrics), "loss")
    objectives = parse_objectives(*(((), quality) if quality == "loss" else (quality, ())))
    front = Front([Scored(subnet, scores)], objectives, (), scorer.extract, origin=trained)
    folder = trained.run.path / "results" / name
    front.save(folder, scorer.layers, choices=told_choices(trained.chain.space))
    told = {n: [round(p, 6) for p in mixture[n].tolist()] for n, _ in layout}
    write_json(folder / "mixture.json", {"method": method, "subnet": subnet.to_json(), "probabilities": told})
    return GradientSearchResult(trained, subnet, scores, mixture, front)


# What a gradient search was given, checked before anything is built: each mistake has its line.

OWN = ["method", "targets", "penalties", "architecture", "warmup_weights", "pick", "budget", "recalibrate", "name"]


def check_arguments(
    method: object,
    steps: object,
    metrics: object,
    targets: object,
    penalties: object,
    architecture: object,
    warmup_weights: object,
    pick: object,
    options: Mapping[str, Any],
) -> None:
    """Raises SearchError for what is of the wrong kind, and for options that nobody has."""
    if not isinstance(method, (GradientMethod, SampledMethod)):
        raise SearchError(f"method is a name such as 'drnas', or a method itself, not {method!r}")
    _count("steps", steps, 1)
    if warmup_weights is not None:
        _count("warmup_weights", warmup_weights, 0)
    if pick is not None and pick not in PICKS:
        raise SearchError(f"pick is {' or '.join(map(repr, PICKS))}, not {pick!r}")
    if pick is not None and isinstance(method, SampledMethod):
        raise SearchError(f"'{method.name}' learns no mixture to pick from: leave pick out")
    if pick == "missed" and targets:
        raise SearchError("pick 'missed' does not look at what a subnet costs: use 'likeliest' with targets")
    named = metrics if isinstance(metrics, Mapping) else {} if metrics is None else None
    if named is None or not all(isinstance(name, str) and callable(metric) for name, metric in named.items()):
        raise SearchError(f'metrics are functions by name, such as {{"accuracy": weft.accuracy}}, not {metrics!r}')
    texts = [targets] if isinstance(targets, str) else targets
    if not isinstance(texts, Iterable) or not all(isinstance(text, str) for text in texts):
        raise SearchError(f"targets are texts such as 'parameters=5e6', not {targets!r}")
    if not isinstance(penalties, Iterable) or not all(isinstance(one, Penalty) for one in penalties):
        raise SearchError(f"penalties are of weft.search.Penalty, not {penalties!r}")
    if architecture is not None and not isinstance(architecture, Optimizer):
        raise SearchError(f"architecture is an optimizer such as weft.Optimizer('adam', lr=0.01), not {architecture!r}")
    known = set(inspect.signature(train).parameters) - {"net", "data", "bilevel"}
    for name in options:
        if name not in known:
            raise SearchError(f"a search that trains has no option '{name}'{nearest(name, (*OWN, *sorted(known)))}")


def _count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SearchError(f"{name} is a whole number of {least} or more, not {value!r}")
