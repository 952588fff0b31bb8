"""What stage 0 finds out about the whole supernet before the stages divide it: costs, a cut, and what to warn of."""

from __future__ import annotations

import copy
import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from weft.data import Data, as_data
from weft.distributed.store import ControlStore
from weft.engine.consistency import Consistency, Exact, Lagged
from weft.pipeline.profiler import message_bytes, message_seconds, profile_chain
from weft.pipeline.scheduler import SchedulePolicy
from weft.pipeline.simulator import Simulated, Span, simulate, with_messages
from weft.pipeline.workload import Workload, chain_workload, moving, single_copy, virtual_cut, windows
from weft.runs import Checkpoints
from weft.space import make_stream
from weft.supernet import Chain, Factory, initialise
from weft.supernet.partition import Cut, best_cut, check_cut, check_stages, stage_of
from weft.trainer.config import Settings, make_settings
from weft.trainer.run_setup import to_memory_format
from weft.trainer.trainer import make_law, make_loader

log = logging.getLogger("weft.pipeline")

LOOKED_AT = 200
"""Steps of the run that are simulated."""

ABOUT = 1.05
"""A cut whose slowest stage takes no more than this share of the best cut's is about as good."""

WORTH_TELLING = 0.15
"""A share of waiting, because of layers that every subnet uses, that is worth a warning."""

Costs = Mapping[Hashable, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """What was measured, in seconds: forward and backward of every layer, and a message before every block."""

    costs: Costs
    messages: tuple[float, ...]


def profile_layers(chain: Chain, data: Data, settings: Settings) -> LayerCosts:
    """Costs for one micro-batch; the chain itself is not changed."""
    batch = make_law(settings).parts(make_loader(data, settings).batch(0))[0]
    twin = copy.deepcopy(chain).to(settings.device)
    costs = profile_chain(twin, batch, 3, settings.optimizer, settings.loss)
    return LayerCosts(dict(costs.items()), tuple(message_seconds(size) for size in message_bytes(twin, batch)))


def workload_of(chain: Chain, settings: Settings, costs: Costs | None, first: int = 0) -> Workload:
    """The next steps of the run, for simulation: a stream may narrow as it goes on, so a resumed run is cut anew."""
    steps = max(1, min(LOOKED_AT, settings.steps - first))
    work = chain_workload(chain, settings.stream, settings.consistency, settings.microbatches, steps, costs)
    picks, skipped = work.picks, first * settings.microbatches
    return replace(work, picks=lambda n: picks(n + skipped)) if first else work


def choose_cut(work: Workload, stages: int, given: Sequence[int] | None) -> Cut:
    """The cut that the user gave, checked, or the best one for the expected costs; that of the virtual pipeline where
    it is about as good, since one copy of the weights is enough there."""
    check_stages(stages, work.blocks)
    if given is not None:
        return check_cut(given, stages, work.blocks)
    costs = work.expected_costs()
    best = best_cut(costs, stages)
    one = moving(work.promises())
    if one is not None and one.depth == stages:
        virtual = virtual_cut(one.depth, work.blocks)
        if _slowest(costs, virtual) <= ABOUT * _slowest(costs, best):
            return virtual
    return best


def default_in_flight(work: Workload, cut: Cut, given: int | None) -> list[int]:
    """How many micro-batches each stage may have in flight."""
    return windows(len(cut) + 1, single_copy(work.promises(), cut, work.blocks), given, work.microbatches)


def simulate_ahead(
    work: Workload, cut: Cut, rules: list[SchedulePolicy], messages: Sequence[float] | None = None
) -> Simulated:
    """The run as the simulator sees it, with what messages cost, if that is known."""
    duration = None if messages is None else with_messages(cut, messages)
    return simulate(work, cut, rules, duration=duration)


def warn_idle(chain: Chain, settings: Settings, work: Workload, cut: Cut, rules: list[SchedulePolicy]) -> None:
    """Says how much of the time the stages will wait for exact layers that every subnet uses, and what would help."""
    shared = [name for name, layer in chain.layers.items() if layer.shared and settings.consistency[name] == Exact()]
    trained = [name for name in shared if any(p.requires_grad for p in chain.module(name).parameters())]
    if not trained or len(cut) == 0:
        return
    before = simulate_ahead(work, cut, rules).steady_bubble
    lag = Lagged(-(-2 * (len(cut) + 1) // settings.microbatches))
    promises: dict[str, Consistency] = {**settings.consistency, **dict.fromkeys(trained, lag)}
    changed = workload_of(chain, replace(settings, consistency=promises, clip=None), work.costs)
    after = simulate_ahead(changed, cut, rules).steady_bubble
    if before > WORTH_TELLING and after < before:
        log.warning(
            "every subnet uses %s with consistency exact, so about %.0f %% of the time the stages will wait; "
            "consistency={'shared': '%s'} would leave %.0f %%, with another result",
            ", ".join(f"'{name}'" for name in trained[:3]) + (" and others" if len(trained) > 3 else ""),
            100 * before,
            lag,
            100 * after,
        )


def warn_shallow_pipeline(work: Workload, cut: Cut, rules: list[SchedulePolicy]) -> None:
    """Says how much of the time stages will wait where there are more of them than the virtual pipeline has."""
    one, stages = moving(work.promises()), len(cut) + 1
    if one is None or stages <= one.depth or stages > work.blocks:
        return
    before = simulate_ahead(work, cut, rules).steady_bubble
    deeper = replace(one, depth=stages)
    after = simulate_ahead(replace(work, consistency=lambda layer: deeper), cut, rules).steady_bubble
    log.warning(
        "%d stages are more than the %d virtual ones of %s, whose updates they have to wait for: about %.0f %% of the "
        "time; %s would leave %.0f %%, with another result",
        stages,
        one.depth,
        one,
        100 * before,
        deeper,
        100 * after,
    )


def _slowest(costs: Sequence[float], cut: Cut) -> float:
    borders = [0, *cut, len(costs)]
    return max(sum(costs[a:b]) for a, b in pairwise(borders))


# How a training run is divided among ranks: the job that all of them get, and the stage that each makes of it.


@dataclass(frozen=True)
class LaunchSpec:
    """A training run as every rank gets it; the names are those of ``weft.train``."""

    net: Chain | Factory
    data: Any
    given: Mapping[str, Any]
    """The arguments of ``make_settings``."""
    init: Any = None
    run: str | None = None
    runs: Path | str = "runs"
    resume: bool = False
    checkpoint_every: int | None = None
    keep: int = 3
    config: Mapping[str, Any] | None = None
    cut: Sequence[int] | None = None
    window: int | None = None
    trace: bool = False
    split_backward: bool = False
    prefer: str = "backward"
    threads: int = field(default_factory=torch.get_num_threads)
    """Of every rank; as many as here, since they are part of what a fingerprint depends on."""


@dataclass(frozen=True)
class RankPart:
    """What a rank works with once the supernet is divided."""

    chain: Chain
    data: Data
    settings: Settings
    cut: Cut
    rules: tuple[SchedulePolicy, ...]
    """Of every stage."""
    extremes: Mapping[str, Any]
    foreseen: tuple[Span, ...] | None


def _done(job: LaunchSpec) -> int:
    """Steps that lie behind, where the run is resumed."""
    if not job.resume or job.run is None:
        return 0
    return max(Checkpoints(Path(job.runs) / job.run / "checkpoints").steps(), default=0)


def partition(job: LaunchSpec, accord: ControlStore, device: torch.device, again: bool) -> RankPart:
    """Rank 0 looks at the whole supernet and decides; every rank builds its own part."""
    given = {**job.given, "device": device}
    seed = int(given.get("seed", 0))
    data = as_data(job.data, seed)
    foreseen: tuple[Span, ...] | None = None
    if accord.rank == 0:
        whole = initialise(job.net, seed)
        settings = make_settings(whole, **given)
        found = profile_layers(whole, data, settings) if job.cut is None or job.trace else None
        work = workload_of(whole, settings, None if found is None else found.costs, _done(job))
        cut = choose_cut(work, accord.world, job.cut)
        windows = default_in_flight(work, cut, job.window)
        rules = _rules(job, windows)
        if not again:
            warn_idle(whole, settings, work, cut, rules)
            warn_shallow_pipeline(work, cut, rules)
        if job.trace:
            foreseen = simulate_ahead(work, cut, rules, None if found is None else found.messages).spans
        named = isinstance(given.get("stream", ""), str)
        accord.tell(
            "division",
            {
                "cut": cut,
                "windows": windows,
                "stream": settings.stream.to_json() if named else None,
                "channels_last": settings.channels_last,
                "largest": whole.largest().to_json(),
                "smallest": whole.smallest().to_json(),
            },
        )
        del whole
    division = accord.hear("division")
    cut = tuple(division["cut"])
    where = device if given.get("residency") is None else torch.device("cpu")
    chain = initialise(job.net, seed, where, only=[])
    of = stage_of(cut, len(chain.blocks))
    own = [name for name, layer in chain.layers.items() if of[layer.block] == accord.rank]
    chain = initialise(chain, seed, where, only=own)
    if division["stream"] is not None:
        given["stream"] = make_stream(chain.space, division["stream"])
    given["channels_last"] = division["channels_last"]
    settings = make_settings(chain, **given)
    extremes = {name: chain.space.load_subnet(division[name]) for name in ("largest", "smallest")}
    rules = _rules(job, map(int, division["windows"]))
    return RankPart(to_memory_format(chain, settings), data, settings, cut, tuple(rules), extremes, foreseen)


def _rules(job: LaunchSpec, windows: Iterable[int]) -> list[SchedulePolicy]:
    return [SchedulePolicy(window, job.prefer) for window in windows]
