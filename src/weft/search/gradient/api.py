"""Gradient search: a supernet and its data in; a run with its weights, its mixture and the subnet that it settles on
out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from weft.data import Data, Loader, as_data
from weft.errors import SearchError
from weft.pipeline import Optimizer, Trained, cross_entropy, train
from weft.pipeline.bilevel import Bilevel
from weft.pipeline.initial import load_initial
from weft.pipeline.law import Loss
from weft.pipeline.ranks import ranks
from weft.pipeline.settings import consistencies
from weft.runs.files import write_json
from weft.search.entry import check_name, search_trained, told_choices
from weft.search.expected import measure_expected
from weft.search.front import Front
from weft.search.gradient.arguments import check_arguments
from weft.search.gradient.method import (
    GradientMethod,
    SampledMethod,
    make_gradient_method,
    usual_optimizer,
    usual_pick,
    usual_warmup,
)
from weft.search.gradient.missed import candidates, most_missed
from weft.search.gradient.objective import Layout, MixedLoss, MixedMetric, Probabilities
from weft.search.gradient.picture import write_picture
from weft.search.objective import parse_objectives
from weft.search.pick import likeliest
from weft.search.score import Scorer
from weft.search.scored import Scored
from weft.search.target import Penalty, Target, parse_targets
from weft.space import Subnet
from weft.supernet import Chain, Factory, initialise
from weft.supernet.elastic import Mixture, Switch
from weft.supernet.elastic.mixture import choice_options
from weft.supernet.faithful import unfaithful
from weft.supernet.mixed import PROGRESS, MixedChain, mix, mixed_factory, parts

log = logging.getLogger("weft.search")
LARGE = 200_000_000
"""Parameters of a supernet that is not tried out before it trains."""


@dataclass(frozen=True)
class Found:
    """What a gradient search settled on: the subnet, its scores on validation data, and the mixture behind it."""

    trained: Trained
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


def gradient_search(
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
) -> Found:
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
    started = ranks()
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
    way = pick or usual_pick(chosen)
    if wanted or not candidates(initialise(net, seed, only=()).space):
        way = "likeliest"
    warm = usual_warmup(chosen, steps) if warmup_weights is None else warmup_weights
    bilevel = Bilevel(architecture or usual_optimizer(chosen, steps), warm, order=chosen.order)
    if not any(bilevel.architecture(step) for step in range(warm, steps)):
        raise SearchError(
            f"of {steps} steps, {warm} of which train the weights alone, none trains the architecture: give more steps"
        )
    side = (PROGRESS,) if chosen.anneals else ()
    mixed = mix(net, chosen, side)
    if chosen.name == "pc-darts" and not _is_partial(mixed.plain):
        raise SearchError(
            "'pc-darts' mixes a part of the channels, which the supernet has to be built for: give its switches "
            "partial=4, as weft.zoo.darts(partial=4) does, or use 'darts'"
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
        subnet = most_missed(plain.chain, mixture, plain.data, plain.settings, penalties)
    else:
        subnet = likeliest(mixture, wanted)
    return replace(_found(plain, subnet, mixture, recalibrate, name, chosen.name, layout), pick=way)


def _tell_unfaithful(net: Chain | Factory, data: Data, seed: int) -> None:
    """Warns where a mixture that is certain is not its subnet: the search would learn from another network."""
    chain = initialise(net, seed, only=())
    held = (p.numel() for block in chain.blocks for part in parts(block, chain) for p in part.parameters(recurse=False))
    if sum(held) > LARGE:
        return
    try:
        found = unfaithful(initialise(net, seed), Loader(data.train, 2, 0, shuffle=False).batch(0))
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
) -> Found:
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
    front = search_trained(
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
    return Found(trained, best.subnet, dict(best.scores), None, front)


def _targets(
    net: Chain | Factory, data: Data, targets: str | Iterable[str], seed: int, device: str
) -> tuple[Target, ...]:
    """What the texts ask for, with the costs of this supernet measured; raises SearchError for what cannot be met."""
    texts = [targets] if isinstance(targets, str) else list(targets)
    if not texts:
        return ()
    chain = initialise(net, seed).eval()
    batch = {name: tensor[:1] for name, tensor in Loader(data.train, 1, 0, shuffle=False).batch(0).items()}
    wanted = parse_targets(texts, lambda metric: measure_expected(chain, batch, metric, device=device))
    likeliest(Mixture.uniform(chain.space), wanted)  # what no subnet meets is said now, and not after the training
    return wanted


def _inherited(net: Chain | Factory, trained: Trained, seed: int) -> Chain:
    """The plain supernet with the weights of the mixed one."""
    plain = initialise(net, seed, trained.settings.device)
    load_initial(plain, trained.chain.state_dict())
    return plain.eval()


def _found(
    trained: Trained, subnet: Subnet, mixture: Mixture, recalibrate: int, name: str, method: str, layout: Layout
) -> Found:
    scorer = Scorer(trained.chain, trained.data, trained.settings, recalibrate)
    scores = {**scorer.quality(subnet), **scorer.cheap(subnet)}
    quality = next(iter(trained.settings.metrics), "loss")
    objectives = parse_objectives(*(((), quality) if quality == "loss" else (quality, ())))
    front = Front([Scored(subnet, scores)], objectives, (), scorer.extract, origin=trained)
    folder = trained.run.path / "results" / name
    front.save(folder, scorer.layers, choices=told_choices(trained.chain.space))
    told = {n: [round(p, 6) for p in mixture[n].tolist()] for n, _ in layout}
    write_json(folder / "mixture.json", {"method": method, "subnet": subnet.to_json(), "probabilities": told})
    options = {n: choice_options(trained.chain.space, n) for n, _ in layout}
    write_picture(folder / "probabilities.svg", trained.run.events.read(), trained.settings.steps, options, told)
    return Found(trained, subnet, scores, mixture, front)
