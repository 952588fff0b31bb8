"""How a training run is divided among ranks: the job that all of them get, and the part that each makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from weft.data import Data, as_data
from weft.pipeline.accord import Accord
from weft.pipeline.opening import lay_out
from weft.pipeline.placement import Placement
from weft.pipeline.scheduler import DEFER, Rule
from weft.pipeline.session import Teacher
from weft.pipeline.settings import Settings, make_settings
from weft.pipeline.simulator import Span
from weft.pipeline.survey import (
    choose_cut,
    foresee,
    measure,
    usual_windows,
    warn_of_depth,
    warn_of_waiting,
    workload_of,
)
from weft.plan.cut import Cut, stage_of
from weft.runs import Checkpoints
from weft.space import make_stream
from weft.supernet import Chain, Factory, initialise


@dataclass(frozen=True)
class Job:
    """A training run as every rank gets it; the names are those of ``weft.train``."""

    net: Chain | Factory
    data: Any
    given: Mapping[str, Any]
    """The arguments of ``make_settings``."""
    init: Any = None
    teacher: Teacher | None = None
    run: str | None = None
    runs: Path | str = "runs"
    resume: bool = False
    checkpoint_every: int | None = None
    keep: int = 3
    config: Mapping[str, Any] | None = None
    cut: Sequence[int] | None = None
    window: int | None = None
    trace: bool = False
    split_backward: bool | str = False
    placement: Placement | None = None
    """Which rank has which stages; None: each has one."""
    prefer: str = "backward"
    threads: int = field(default_factory=torch.get_num_threads)
    """Of every rank; as many as here, since they are part of what a fingerprint depends on."""


@dataclass(frozen=True)
class Part:
    """What a rank works with once the supernet is divided."""

    chain: Chain
    data: Data
    settings: Settings
    cut: Cut
    placement: Placement
    rules: tuple[Rule, ...]
    """Of every stage."""
    extremes: Mapping[str, Any]
    foreseen: tuple[Span, ...] | None


def _done(job: Job) -> int:
    """Steps that lie behind, where the run is resumed."""
    if not job.resume or job.run is None:
        return 0
    return max(Checkpoints(Path(job.runs) / job.run / "checkpoints").steps(), default=0)


def divide(job: Job, accord: Accord, device: torch.device, again: bool) -> Part:
    """Rank 0 looks at the whole supernet and decides; every rank builds its own part."""
    placement = job.placement or Placement(accord.world)
    stages = placement.stages
    given = {**job.given, "device": device}
    seed = int(given.get("seed", 0))
    data = as_data(job.data, seed)
    foreseen: tuple[Span, ...] | None = None
    if accord.rank == 0:
        whole = initialise(job.net, seed)
        settings = make_settings(whole, **given)
        found = measure(whole, data, settings, job.teacher) if job.cut is None or job.trace else None
        work = workload_of(whole, settings, None if found is None else found.costs, _done(job))
        cut = choose_cut(work, stages, job.cut)
        windows = usual_windows(work, cut, job.window)
        rules = _rules(job, windows)
        if not again:
            warn_of_waiting(whole, settings, work, cut, rules, placement)
            warn_of_depth(work, cut, rules, placement)
        if job.trace:
            foreseen = foresee(work, cut, rules, None if found is None else found.messages, placement).spans
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
    own = [name for name, layer in chain.layers.items() if placement.rank_of(of[layer.block]) == accord.rank]
    chain = initialise(chain, seed, where, only=own)
    if division["stream"] is not None:
        given["stream"] = make_stream(chain.space, division["stream"])
    given["channels_last"] = division["channels_last"]
    settings = make_settings(chain, **given)
    extremes = {name: chain.space.load_subnet(division[name]) for name in ("largest", "smallest")}
    rules = _rules(job, map(int, division["windows"]))
    return Part(lay_out(chain, settings), data, settings, cut, placement, tuple(rules), extremes, foreseen)


def _rules(job: Job, windows: Iterable[int]) -> list[Rule]:
    return [Rule(window, job.prefer, job.split_backward == DEFER) for window in windows]
