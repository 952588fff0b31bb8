"""Gradient search: takes a supernet and its data, and returns a run with its weights, its mixture and one subnet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.data import Batch, Data, Loader, as_data
from weft.distributed.env import read_env
from weft.elastic import Mixture, Switch
from weft.elastic.mixture import choice_options
from weft.engine.bilevel import Bilevel
from weft.engine.optimizer import Optimizer
from weft.engine.train_step import Loss, Metric
from weft.errors import SearchError
from weft.runs.events import Callback
from weft.search.api import OLD_OPTIONS, check_name, choices_to_json, refuse_options
from weft.search.api import search as search_run
from weft.search.cost_model import build_cost_model
from weft.search.discretize import by_perturbation, candidates, most_probable_subnet
from weft.search.front import Front, Scored
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
from weft.search.targets import Target, parse_targets
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
from weft.trainer.config import Execution, RunConfig, TrainConfig, consistencies, merge_fields, refuse_unknown
from weft.utils.files import write_json

log = logging.getLogger("weft.search")
Layout = tuple[tuple[str, int], ...]
"""Choices in the order of the vector of probabilities, with the number of their options."""
LARGE = 200_000_000
"""Parameters of a supernet that is not tried out before it trains."""


@dataclass(frozen=True)
class GradientSearchResult:
    """The subnet that a gradient search chose, its scores on validation data, and the mixture behind it."""

    trained: TrainedRun
    """The run, with the plain supernet that has its weights: what ``weft.search`` and ``weft.retrain`` start from."""
    subnet: Subnet
    scores: dict[str, float]
    mixture: Mixture | None
    """None for methods that train by samples."""
    front: Front
    pick: str | None = None
    """How the subnet was chosen: ``likeliest`` or ``perturbation``; None for methods that train by samples."""

    def extract(self) -> nn.Module:
        """The subnet as a plain module with the supernet's weights."""
        module: nn.Module = self.front.best().extract()
        return module


@dataclass(frozen=True, kw_only=True)
class GradientSearchConfig:
    """How weights and architecture are learned together; TrainConfig has the rest."""

    method: str | GradientMethod | SampledMethod = "drnas"
    """its name, or the method itself"""
    targets: str | Iterable[str] = ()
    """what the subnet must cost, within 2 %: `"parameters=5e6"`, `"flops=1e9"`"""
    architecture: Optimizer | None = None
    """the optimizer of the architecture parameters; as suits the method and the steps if not given"""
    weight_warmup_steps: int | None = None
    """steps that train the weights alone, before the architecture learns too; as suits the method if not given"""
    pick: str | None = None
    """how the subnet is chosen: the `likeliest` of the mixture, or by `perturbation`: of each choice of candidates the
    one whose removal raises the loss most; as suits the method if not given, and under targets the likeliest that
    meets them"""
    budget: int = 200
    """subnets that are scored, by methods that train by samples"""
    bn_batches: int = 2
    """batches that batch norms see again before a subnet is scored"""
    search_name: str = "search"
    """of the folder under `results`"""


def search_gradient(
    net: Chain | Factory,
    data: Any,
    config: TrainConfig | None = None,
    *,
    search: GradientSearchConfig | None = None,
    execution: Execution | None = None,
    run: RunConfig | str | None = None,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    on_score: Callable[[Scored, bool], None] | None = None,
    **options: Any,
) -> GradientSearchResult:
    """Learns weights and architecture together, and returns the subnet that it chooses.

    ``config.steps`` counts steps of both kinds: after those for the weights alone every second one trains the
    architecture on validation data. Methods that train by samples (``spos``, ``fairnas``, ``sandwich``) train their
    stream and then search ``budget`` subnets by evolution for the least loss; ``on_score`` is called with each.
    ``options`` are fields of GradientSearchConfig, TrainConfig, Execution and RunConfig by name. The run resumes, runs
    on several stages and repeats to the bit as any other.
    """
    own = {entry.name for entry in fields(GradientSearchConfig)}
    settings = replace(search or GradientSearchConfig(), **{name: options.pop(name) for name in own & {*options}})
    run_config = RunConfig(name=run) if isinstance(run, str) else run or RunConfig()
    known = own.union(entry.name for part in (TrainConfig, Execution, RunConfig) for entry in fields(part))
    unknown = options.keys() - known
    refuse_options(unknown & OLD_OPTIONS.keys(), known)
    for name in unknown:
        refuse_unknown(name, known)
    config, execution, run_config = merge_fields(
        (config or TrainConfig(), execution or Execution(), run_config), options
    )
    if config.architecture_search is not None:
        raise SearchError("a gradient search makes its own architecture_search: leave it out")
    method = make_gradient_method(settings.method) if isinstance(settings.method, str) else settings.method
    _check(settings, method)
    started = read_env()
    if started is not None and started.world > 1:  # only the first of them would have the weights in the end
        raise SearchError("gradient search starts the processes of its stages itself: use stages=N and not torchrun")
    seed = config.seed
    loaded = as_data(data, seed)
    if loaded.validation is None:
        raise SearchError(
            f"'{method.name}' finds the architecture on validation data, and this data set has none: "
            "split some off with weft.data.split"
        )
    space = initialise(net, seed, only=()).space
    if not space.choices:
        raise SearchError(f"'{method.name}' has nothing to search: the supernet has no choices")
    targets = _make_targets(net, loaded, settings.targets, seed, execution.device)
    start = partial(train, execution=execution, callbacks=callbacks, resume=resume)
    if isinstance(method, SampledMethod):
        trained = start(net, data, _sampled_config(config, method), run=run_config)
        return _by_samples(trained, targets, settings, on_score)
    pick = settings.pick or default_pick(method)
    if targets or not candidates(space):
        pick = "likeliest"
    steps = config.steps
    warmup = default_warmup(method, steps) if settings.weight_warmup_steps is None else settings.weight_warmup_steps
    bilevel = Bilevel(settings.architecture or default_optimizer(method, steps), warmup, order=method.order)
    if not any(bilevel.architecture(step) for step in range(warmup, steps)):
        raise SearchError(
            f"of {steps} steps, {warmup} of which train the weights alone, none trains the architecture: "
            "give more steps"
        )
    extra_inputs = (PROGRESS,) if method.anneals else ()
    mixed = make_mixed_chain(net, method, extra_inputs)
    if method.name == "pc-darts" and not _is_partial(mixed.plain):
        raise SearchError(
            "'pc-darts' mixes a part of the channels, which the supernet has to be built for: give its switches "
            "partial=4, as weft.zoo.cells(partial=4) does, or use 'darts'"
        )
    _warn_of_mismatch(net, loaded, seed)
    layout: Layout = tuple((n, len(choice_options(mixed.space, n))) for n in mixed.order)
    total = sum(count for _, count in layout)
    mixed_config = replace(
        config,
        loss=MixedLoss(config.loss, layout, targets, repr(method)),
        stream=mixed.space.first(),
        architecture_search=bilevel,
    )
    metrics: dict[str, Metric] = {name: MixedMetric(metric) for name, metric in run_config.metrics.items()}
    metrics["mixture"] = Probabilities(total)
    trained = start(
        mixed_factory(net, method, extra_inputs), data, mixed_config, run=replace(run_config, metrics=metrics)
    )
    assert isinstance(trained.chain, MixedChain)
    mixture = trained.chain.mixture()
    plain = _plain(trained, net, config, run_config)
    if pick == "perturbation":
        subnet = by_perturbation(plain, mixture)
    else:
        subnet = most_probable_subnet(mixture, targets)
    return replace(_make_result(plain, subnet, mixture, settings, method.name, layout), pick=pick)


def _plain(trained: TrainedRun, net: Chain | Factory, config: TrainConfig, run_config: RunConfig) -> TrainedRun:
    """The run with the plain supernet, which has the weights of the mixed one."""
    plain = initialise(net, config.seed, trained.device)
    load_initial(plain, trained.chain.state_dict())
    step = replace(
        trained.step,
        loss=config.loss,
        metrics=dict(run_config.metrics),
        architecture_search=None,
        consistency=consistencies(plain, config.consistency),
    )
    return replace(trained, chain=plain.eval(), net=net, config=config, step=step)


def _sampled_config(config: TrainConfig, method: SampledMethod) -> TrainConfig:
    """The configuration of a run that trains subnets as the method draws them, or as another stream than the default
    one does."""
    if config.stream == TrainConfig.stream:
        config = replace(config, stream=method.stream)
    if method.microbatches is not None:
        if config.microbatches not in (1, method.microbatches):
            raise SearchError(
                f"a step of '{method.name}' is {method.microbatches} micro-batches, one for each of its subnets: "
                "leave microbatches out"
            )
        config = replace(config, microbatches=method.microbatches)
    return replace(config, distill=config.distill or True) if method.distils else config


def _warn_of_mismatch(net: Chain | Factory, data: Data, seed: int) -> None:
    """Warns where a mixture that is certain is not its subnet: the search would learn from another network."""
    chain = initialise(net, seed, only=())
    modules = [part for block in chain.blocks for part in parts(block, chain)]
    if sum(p.numel() for module in modules for p in module.parameters(recurse=False)) > LARGE:
        return
    try:
        found = find_mixture_mismatch(initialise(net, seed), Loader(data.train, 2, 0, shuffle=False).batch(0))
    except Exception as problem:  # training raises it too, with the layer's name
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
    trained: TrainedRun,
    targets: Sequence[Target],
    settings: GradientSearchConfig,
    on_score: Callable[[Scored, bool], None] | None,
) -> GradientSearchResult:
    bounds = [f"{t.expected.metric}{op}{t.value * (1 + s)}" for t in targets for op, s in ((">=", -0.02), ("<=", 0.02))]
    front = search_run(
        trained,
        minimize="loss",  # ranks subnets with inherited weights better than accuracy does, which is the same for many
        constraints=bounds,
        budget=settings.budget,
        method="evolution",
        seed=trained.config.seed,
        bn_batches=settings.bn_batches,
        name=settings.search_name,
        on_score=on_score,
    )
    best = front.best()
    return GradientSearchResult(trained, best.subnet, dict(best.scores), None, front)


def _make_targets(
    net: Chain | Factory, data: Data, targets: str | Iterable[str], seed: int, device: str
) -> tuple[Target, ...]:
    """The targets that the texts name, for this supernet; raises SearchError where no subnet meets them."""
    texts = [targets] if isinstance(targets, str) else list(targets)
    if not texts:
        return ()
    chain = initialise(net, seed).eval()
    batch = {name: tensor[:1] for name, tensor in Loader(data.train, 1, 0, shuffle=False).batch(0).items()}
    found = parse_targets(texts, lambda metric: build_cost_model(chain, batch, metric, device=device))
    most_probable_subnet(Mixture.uniform(chain.space), found)  # raises before the training, and not after it
    return found


def _make_result(
    trained: TrainedRun, subnet: Subnet, mixture: Mixture, settings: GradientSearchConfig, method: str, layout: Layout
) -> GradientSearchResult:
    scorer = Scorer(trained, settings.bn_batches)
    scores = {**scorer.quality(subnet), **scorer.cheap(subnet)}
    quality = next(iter(trained.step.metrics), "loss")
    objectives = parse_objectives(*(((), quality) if quality == "loss" else (quality, ())))
    front = Front([Scored(subnet, scores)], objectives, (), scorer.extract, origin=trained)
    folder = trained.run.path / "results" / settings.search_name
    front.save(folder, scorer.layers, choices=choices_to_json(trained.chain.space))
    rows = {n: [round(p, 6) for p in mixture[n].tolist()] for n, _ in layout}
    write_json(folder / "mixture.json", {"method": method, "subnet": subnet.to_json(), "probabilities": rows})
    return GradientSearchResult(trained, subnet, scores, mixture, front)


def _check(settings: GradientSearchConfig, method: GradientMethod | SampledMethod) -> None:
    """Raises SearchError for settings that do not go together, before anything is built."""
    check_name(settings.search_name)
    if not isinstance(method, (GradientMethod, SampledMethod)):
        raise SearchError(f"method is a name such as 'drnas', or a method itself, not {method!r}")
    warmup, pick = settings.weight_warmup_steps, settings.pick
    if warmup is not None and (not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0):
        raise SearchError(f"weight_warmup_steps is a whole number of 0 or more, not {warmup!r}")
    if pick is not None and pick not in PICKS:
        raise SearchError(f"pick is {' or '.join(map(repr, PICKS))}, not {pick!r}")
    if pick is not None and isinstance(method, SampledMethod):
        raise SearchError(f"'{method.name}' learns no mixture to pick from: leave pick out")
    if pick == "perturbation" and settings.targets:
        raise SearchError("pick 'perturbation' ignores what a subnet costs: use 'likeliest' with targets")


# The loss and the metrics of a mixed supernet, whose outputs are followed by the probabilities of all choices.


def outputs_of(seen: tuple[Tensor, ...]) -> Any:
    """The outputs of the network itself."""
    return seen[0] if len(seen) == 2 else seen[:-1]


def mixture_of(layout: Layout, vector: Tensor) -> Mixture:
    """The mixture of a vector of probabilities."""
    parts = torch.split(vector, [count for _, count in layout])
    return Mixture.unchecked(None, {name: part for (name, _), part in zip(layout, parts, strict=True)})


@dataclass(frozen=True)
class MixedLoss:
    """The user's loss plus a penalty for expected costs that are off their targets."""

    loss: Loss
    layout: Layout
    targets: Sequence[Target] = ()
    method: str = ""
    """The method that makes the probabilities: part of the manifest, so that a run is not resumed with another."""

    def __call__(self, seen: tuple[Tensor, ...], batch: Batch) -> Tensor:
        loss = self.loss(outputs_of(seen), batch)
        if self.targets and seen[-1].requires_grad:  # only steps that train the architecture
            mixture = mixture_of(self.layout, seen[-1])
            for target in self.targets:
                loss = loss + target.penalty(mixture).to(loss.dtype)
        return loss


@dataclass(frozen=True)
class MixedMetric:
    """A metric of the network's outputs."""

    metric: Metric

    def __call__(self, seen: tuple[Tensor, ...], batch: Batch) -> tuple[Tensor, float]:
        return self.metric(outputs_of(seen), batch)


@dataclass(frozen=True)
class Probabilities:
    """The probabilities of a step, for the log."""

    size: int

    def __call__(self, seen: tuple[Tensor, ...], batch: Batch) -> tuple[Tensor, float]:
        return seen[-1].detach(), 1.0
