"""What stage 0 finds out about the whole supernet before the stages divide it: costs, a cut, and what to warn of."""

from __future__ import annotations

import copy
import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from weft.data import Data
from weft.pipeline.consistency import Consistency, Exact, Lagged
from weft.pipeline.onecopy import moving, single_copy, virtual_cut, windows
from weft.pipeline.placement import Placement
from weft.pipeline.profile import message_bytes, message_seconds, profile_chain
from weft.pipeline.scheduler import Rule
from weft.pipeline.session import Teacher, make_law, make_loader, taught
from weft.pipeline.settings import Settings
from weft.pipeline.simulator import Simulated, simulate, with_messages
from weft.pipeline.workload import Workload, chain_workload
from weft.plan.cut import Cut, best_cut, check_cut, check_stages
from weft.supernet import Chain

log = logging.getLogger("weft.pipeline")

LOOKED_AT = 200
"""Steps of the run that are simulated."""

ABOUT = 1.05
"""A cut whose slowest stage takes no more than this share of the best cut's is about as good."""

WORTH_TELLING = 0.15
"""A share of waiting, because of layers that every subnet uses, that is worth a warning."""

Costs = Mapping[Hashable, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured, in seconds: forward and backward of every layer, and a message before every block."""

    costs: Costs
    messages: tuple[float, ...]


def measure(chain: Chain, data: Data, settings: Settings, teacher: Teacher | None) -> Measured:
    """Costs for one micro-batch; the chain itself is not changed."""
    whole = taught(chain, teacher, make_loader(data, settings).batch(0))
    batch = make_law(settings).parts(whole)[0]
    twin = copy.deepcopy(chain).to(settings.device)
    costs = profile_chain(twin, batch, 3, settings.optimizer, settings.loss)
    return Measured(dict(costs.items()), tuple(message_seconds(size) for size in message_bytes(twin, batch)))


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


def usual_windows(work: Workload, cut: Cut, given: int | None) -> list[int]:
    """How many micro-batches each stage may have in flight."""
    return windows(len(cut) + 1, single_copy(work.promises(), cut, work.blocks), given, work.microbatches)


def foresee(
    work: Workload,
    cut: Cut,
    rules: list[Rule],
    messages: Sequence[float] | None = None,
    placement: Placement | None = None,
) -> Simulated:
    """The run as the simulator sees it, with what messages cost, if that is known."""
    duration = None if messages is None else with_messages(cut, messages, placement)
    return simulate(work, cut, rules, duration=duration, placement=placement)


def warn_of_waiting(
    chain: Chain, settings: Settings, work: Workload, cut: Cut, rules: list[Rule], placement: Placement | None = None
) -> None:
    """Says how much of the time the stages will wait for exact layers that every subnet uses, and what would help."""
    shared = [name for name, layer in chain.layers.items() if layer.shared and settings.consistency[name] == Exact()]
    trained = [name for name in shared if any(p.requires_grad for p in chain.module(name).parameters())]
    if not trained or len(cut) == 0:
        return
    before = foresee(work, cut, rules, placement=placement).steady_bubble
    lag = Lagged(-(-2 * (len(cut) + 1) // settings.microbatches))
    promises: dict[str, Consistency] = {**settings.consistency, **dict.fromkeys(trained, lag)}
    changed = workload_of(chain, replace(settings, consistency=promises, clip=None), work.costs)
    after = foresee(changed, cut, rules, placement=placement).steady_bubble
    if before > WORTH_TELLING and after < before:
        log.warning(
            "every subnet uses %s with consistency exact, so about %.0f %% of the time the stages will wait; "
            "consistency={'shared': '%s'} would leave %.0f %%, with another result",
            ", ".join(f"'{name}'" for name in trained[:3]) + (" and others" if len(trained) > 3 else ""),
            100 * before,
            lag,
            100 * after,
        )


def warn_of_depth(work: Workload, cut: Cut, rules: list[Rule], placement: Placement | None = None) -> None:
    """Says how much of the time stages will wait where there are more of them than the virtual pipeline has."""
    one, stages = moving(work.promises()), len(cut) + 1
    if one is None or stages <= one.depth or stages > work.blocks:
        return
    before = foresee(work, cut, rules, placement=placement).steady_bubble
    deeper = replace(one, depth=stages)
    after = foresee(replace(work, consistency=lambda layer: deeper), cut, rules, placement=placement).steady_bubble
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
