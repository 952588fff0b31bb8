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
from weft.engine.train_step import TrainStep
from weft.pipeline.profiler import message_bytes, message_seconds, profile_chain
from weft.pipeline.scheduler import SchedulePolicy
from weft.pipeline.simulator import Span, simulate, with_messages
from weft.pipeline.workload import Workload, chain_workload, common_bounded, in_flight_limits, single_copy, virtual_cut
from weft.runs import Checkpoints
from weft.space import Subnet, make_stream
from weft.supernet import Chain, Factory, initialise
from weft.supernet.partition import Cut, best_cut, check_cut, check_stages, stage_of
from weft.trainer.config import Execution, RunConfig, TrainConfig, prefers_channels_last, resolve

log = logging.getLogger("weft.pipeline")

SIMULATED_STEPS = 200

CUT_TOLERANCE = 1.05
"""A cut whose slowest stage takes no more than this share of the best cut's is about as good."""

IDLE_SHARE = 0.15
"""A share of waiting, because of layers that every subnet uses, from which there is a warning."""

Costs = Mapping[Hashable, tuple[float, float]]


def profile_layers(chain: Chain, data: Data, config: TrainStep, device: torch.device) -> tuple[Costs, list[float]]:
    """Seconds for one micro-batch: forward and backward of every layer, and a message before every block. The chain
    itself is not changed."""
    batch = config.parts(config.loader(data, device).batch(0))[0]
    twin = copy.deepcopy(chain).to(device)
    costs = profile_chain(twin, batch, 3, config.optimizer, config.loss)
    return dict(costs.items()), [message_seconds(size) for size in message_bytes(twin, batch)]


def workload_of(chain: Chain, config: TrainStep, costs: Costs | None, first: int = 0) -> Workload:
    """The next steps of the run, for simulation: a stream may narrow as it goes on, so a resumed run is cut anew."""
    steps = max(1, min(SIMULATED_STEPS, config.steps - first))
    work = chain_workload(chain, config.stream, config.consistency, config.microbatches, steps, costs)
    picks, skipped = work.picks, first * config.microbatches
    return replace(work, picks=lambda n: picks(n + skipped)) if first else work


def choose_cut(work: Workload, stages: int, cut: Sequence[int] | None) -> Cut:
    """The cut that the user gave, checked, or the best one for the expected costs; that of the virtual pipeline where
    it is about as good, since one copy of the weights is enough there."""
    check_stages(stages, work.blocks)
    if cut is not None:
        return check_cut(cut, stages, work.blocks)
    costs = work.expected_costs()
    best = best_cut(costs, stages)
    bounded = common_bounded(work.consistencies())
    if bounded is not None and bounded.depth == stages:
        virtual = virtual_cut(bounded.depth, work.blocks)
        if _slowest(costs, virtual) <= CUT_TOLERANCE * _slowest(costs, best):
            return virtual
    return best


def default_in_flight(work: Workload, cut: Cut, limit: int | None) -> list[int]:
    return in_flight_limits(len(cut) + 1, single_copy(work.consistencies(), cut, work.blocks), limit, work.microbatches)


def warn_idle(chain: Chain, config: TrainStep, work: Workload, cut: Cut, policies: list[SchedulePolicy]) -> None:
    """Says how much of the time the stages will wait for exact layers that every subnet uses, and what would help."""
    shared = [name for name, layer in chain.layers.items() if layer.shared and config.consistency[name] == Exact()]
    trained = [name for name in shared if any(p.requires_grad for p in chain.module(name).parameters())]
    if not trained or len(cut) == 0:
        return
    before = simulate(work, cut, policies).steady_bubble
    lag = Lagged(-(-2 * (len(cut) + 1) // config.microbatches))
    consistency: dict[str, Consistency] = {**config.consistency, **dict.fromkeys(trained, lag)}
    changed = workload_of(chain, replace(config, consistency=consistency), work.costs)
    after = simulate(changed, cut, policies).steady_bubble
    if before > IDLE_SHARE and after < before:
        log.warning(
            "every subnet uses %s with consistency exact, so about %.0f %% of the time the stages will wait; "
            "consistency={'shared': '%s'} would leave %.0f %%, with another result",
            ", ".join(f"'{name}'" for name in trained[:3]) + (" and others" if len(trained) > 3 else ""),
            100 * before,
            lag,
            100 * after,
        )


def _slowest(costs: Sequence[float], cut: Cut) -> float:
    borders = [0, *cut, len(costs)]
    return max(sum(costs[a:b]) for a, b in pairwise(borders))


# How a training run is divided among ranks: the job that all of them get, and the stage that each makes of it.


@dataclass(frozen=True)
class LaunchSpec:
    net: Chain | Factory
    data: Any
    config: TrainConfig
    execution: Execution
    run: RunConfig
    resume: bool = False
    threads: int = field(default_factory=torch.get_num_threads)
    """Of every rank; as many as here, since they are part of what a fingerprint depends on."""


@dataclass(frozen=True)
class RankPart:
    """What a rank works with once the supernet is divided."""

    chain: Chain
    data: Data
    config: TrainStep
    execution: Execution
    """With the layout of images that rank 0 has decided on, and the rank's own device."""
    cut: Cut
    policies: list[SchedulePolicy]
    extremes: Mapping[str, Subnet]
    simulated: tuple[Span, ...] | None
    """What the simulator says that the stages will do, for a trace."""


def partition(job: LaunchSpec, store: ControlStore, device: torch.device, restarted: bool) -> RankPart:
    """Rank 0 looks at the whole supernet and decides; every rank builds its own part."""
    config, execution = job.config, replace(job.execution, device=str(device))
    data = as_data(job.data, config.seed)
    simulated: tuple[Span, ...] | None = None
    if store.rank == 0:
        simulated = _decide(job, store, data, device, restarted)
    decided = store.get("partition")
    cut = tuple(decided["cut"])
    where = device if execution.offload is None else torch.device("cpu")
    chain = initialise(job.net, config.seed, where, only=[])
    of = stage_of(cut, len(chain.blocks))
    own = [name for name, layer in chain.layers.items() if of[layer.block] == store.rank]
    chain = initialise(chain, config.seed, where, only=own)
    if decided["stream"] is not None:
        config = replace(config, stream=make_stream(chain.space, decided["stream"]))
    execution = replace(execution, channels_last=decided["channels_last"])
    return RankPart(
        chain=execution.lay_out(chain),
        data=data,
        config=resolve(config, chain, job.run.metrics),
        execution=execution,
        cut=cut,
        policies=_policies(execution, decided["max_in_flight"]),
        extremes={name: chain.space.load_subnet(decided[name]) for name in ("largest", "smallest")},
        simulated=simulated,
    )


def _decide(
    job: LaunchSpec, store: ControlStore, data: Data, device: torch.device, restarted: bool
) -> tuple[Span, ...] | None:
    """Measures the whole supernet, and tells all ranks the cut, the limits of micro-batches in flight, and what only
    the whole supernet says."""
    execution = job.execution
    chain = initialise(job.net, job.config.seed)
    config = resolve(job.config, chain, job.run.metrics)
    costs = messages = None
    if execution.cut is None or execution.trace:
        costs, messages = profile_layers(chain, data, config, device)
    work = workload_of(chain, config, costs, _steps_done(job))
    cut = choose_cut(work, store.world, execution.cut)
    limits = default_in_flight(work, cut, execution.max_in_flight)
    policies = _policies(execution, limits)
    if not restarted:
        warn_idle(chain, config, work, cut, policies)
    channels_last = execution.channels_last
    store.set(
        "partition",
        {
            "cut": cut,
            "max_in_flight": limits,
            "stream": config.stream.to_json() if isinstance(job.config.stream, str) else None,
            "channels_last": prefers_channels_last(chain, device) if channels_last is None else channels_last,
            "largest": chain.largest().to_json(),
            "smallest": chain.smallest().to_json(),
        },
    )
    if not execution.trace or messages is None:
        return None
    return simulate(work, cut, policies, duration=with_messages(cut, messages)).spans


def _steps_done(job: LaunchSpec) -> int:
    """Steps that lie behind, where the run is resumed."""
    if not job.resume or job.run.name is None:
        return 0
    return max(Checkpoints(Path(job.run.folder) / job.run.name / "checkpoints").steps(), default=0)


def _policies(execution: Execution, limits: Iterable[int]) -> list[SchedulePolicy]:
    return [SchedulePolicy(limit, execution.pipeline_schedule) for limit in limits]
