"""weft simulate: how a run would fare on several stages, and what would help."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft.data import Data, Loader
from weft.errors import ConsistencyError, WeftError, nearest
from weft.pipeline.consistency import Bounded, Consistency, Exact, Lagged
from weft.pipeline.law import split
from weft.pipeline.placement import SHAPES, Placement, place
from weft.pipeline.profile import message_bytes, profile_chain
from weft.pipeline.scheduler import DEFER, Rule
from weft.pipeline.settings import Settings, make_settings
from weft.pipeline.simulator import Simulated, jitter, simulate
from weft.pipeline.survey import choose_cut, usual_windows
from weft.pipeline.workload import Workload, chain_workload
from weft.plan.cut import Cut
from weft.space import make_stream
from weft.supernet import Chain, Factory, initialise

Profile = Mapping[Hashable, tuple[float, float]]

ENOUGH = 0.05
"""A steady bubble below this needs no advice, and a change that gains less is none."""

CUT_STEPS = 100
"""Steps that are simulated to compare two cuts."""

EARLY = 0.5
"""The share of a backward after which the gradient of its input is there, where those of the weights are put off."""


def simulate_run(
    net: Chain | Factory,
    data: Data,
    arguments: Mapping[str, Any],
    stages: Sequence[int],
    *,
    steps: int = 400,
    window: int | None = None,
    latency: float = 0.0,
    bandwidth: float | None = None,
    slow: Mapping[int, float] | None = None,
    spread: float = 0.0,
    costs: str = "measured",
    ranks: int | None = None,
    placement: str | None = None,
    defer: bool = False,
) -> dict[str, Any]:
    """Rows by number of stages, and advice for the largest one that waits too much, the greatest speed-up first.

    ``costs`` are ``measured`` on this machine or ``equal`` (every block 1 forward, 2 backward); ``latency`` is in their
    unit, ``bandwidth`` in bytes for one such unit. ``slow`` has the speeds of ranks that are not as fast as the rest,
    which are 1; a stage has a rank to itself, unless ``ranks`` and ``placement`` say otherwise as in ``weft.train``.
    With ``defer`` a stage puts off the gradients of weights, half of a backward, until it would wait. Cut and windows
    are those that a run would choose, unless a ``window`` is given.
    """
    if placement is not None and placement not in SHAPES:
        raise ConsistencyError(f"unknown placement '{placement}'{nearest(placement, SHAPES)}")
    chain = initialise(net, arguments.get("seed", 0))
    settings = make_settings(chain, **{**arguments, "device": "cpu"})
    batch = split(Loader(data.train, settings.batch_size, settings.seed).batch(0), settings.microbatches)[0]
    measured = costs == "measured"
    profile: Any = profile_chain(chain, batch) if measured else dict.fromkeys(chain.layers, (1.0, 2.0))
    sizes = None if bandwidth is None else message_bytes(chain, batch)

    def work_of(changed: Settings, finer: int = 1) -> Workload:
        return _work(chain, changed, min(steps, settings.steps), profile, sizes, finer)

    work = work_of(settings)
    short = replace(work, steps=min(work.steps, CUT_STEPS))
    vary = jitter(settings.seed, spread) if spread else None
    rows: list[dict[str, Any]] = []
    advice: list[dict[str, Any]] = []
    slow = slow or {}
    most = max(stages) if ranks is None else ranks
    if any(not 0 <= rank < most for rank in slow):
        what = "stages" if ranks is None else "ranks"
        raise ConsistencyError(f"slow {what} {sorted(slow)}: {what} are numbered from 0 to {most - 1}")
    for count in stages:
        try:
            placed = _placed(count, work.blocks, ranks, placement)
        except ConsistencyError as problem:
            rows.append({"stages": count, "note": str(problem)})
            continue
        speeds = [slow.get(rank, 1.0) for rank in range(placed.ranks)]

        def run(
            changed: Workload,
            cut: Cut | None = None,
            places: int | None = window,
            defers: bool = defer,
            placed: Placement = placed,
            speeds: list[float] = speeds,
        ) -> dict[str, Any]:
            cut = choose_cut(changed, placed.stages, cut)
            rules = [Rule(own, defer=defers) for own in usual_windows(changed, cut, places)]
            how: dict[str, Any] = {"bandwidth": bandwidth, "speeds": speeds, "placement": placed}
            told = simulate(changed, cut, rules, latency, vary, False, split=EARLY if defers else None, **how)
            return {**_row(told), "cut": list(cut), "window": max(rule.window for rule in rules)}

        def worth(cut: Cut, run: Callable[..., dict[str, Any]] = run) -> float:
            return _speedup(run(short, cut))

        row = run(work)
        rows.append(row)
        if row["steady_bubble"] > ENOUGH:
            tried = [{**run(other), "change": change} for change, other in _changes(chain, settings, work_of, count)]
            wider = [k * row["window"] for k in (2, 4)]
            tried += [{**run(work, places=places), "change": f"window = {places}"} for places in wider]
            if not defer:
                tried.append({**run(work, defers=True), "change": f"split_backward = {DEFER}"})
            cut = better_cut(tuple(row["cut"]), work.blocks, worth)
            tried.append({**run(work, cut), "change": f"cut = {' '.join(str(block) for block in cut)}"})
            helps = [other for other in tried if _speedup(other) > (1 + ENOUGH) * _speedup(row)]
            advice = sorted(helps, key=_speedup, reverse=True)
    unit = "seconds" if measured else "forwards of one block"
    return {"unit": unit, "stream": settings.stream.describe(), "steps": work.steps, "rows": rows, "advice": advice}


def better_cut(cut: Cut, blocks: int, value: Callable[[Cut], float]) -> Cut:
    """The cut that no move of one block over one border improves, climbing from the given one."""
    best = value(cut)
    while True:
        moved = [
            (*cut[:border], cut[border] + by, *cut[border + 1 :])
            for border in range(len(cut))
            for by in (-1, 1)
            if 0 < cut[border] + by < blocks and cut[border] + by not in cut
        ]
        top, found = max(((value(other), other) for other in moved), default=(best, cut))
        if top <= best * (1 + 1e-6):
            return cut
        best, cut = top, found


def _speedup(row: Mapping[str, Any]) -> float:
    return float(row["speedup"])


def _placed(stages: int, blocks: int, ranks: int | None, shape: str | None) -> Placement:
    if not 1 <= stages <= blocks:
        raise ConsistencyError(f"the chain has {blocks} blocks: use 1 to {blocks} stages")
    return place(stages, ranks, shape)


def _row(result: Simulated) -> dict[str, Any]:
    return {
        "stages": result.stages,
        "ranks": len(result.busy),
        "time_per_step": result.time / result.steps,
        "speedup": result.speedup,
        "bubble": result.bubble,
        "steady_bubble": result.steady_bubble,
        "peak_in_flight": max(result.peak),
    }


def _work(
    chain: Chain,
    settings: Settings,
    steps: int,
    profile: Profile,
    sizes: Sequence[float] | None,
    finer: int,
) -> Workload:
    """The workload of the settings, with every micro-batch cut into ``finer`` ones that cost as much together."""
    costs = {layer: (forward / finer, backward / finer) for layer, (forward, backward) in profile.items()}
    sizes = None if sizes is None else [size / finer for size in sizes]
    m = settings.microbatches * finer
    return chain_workload(chain, settings.stream, settings.consistency, m, steps, costs, sizes)


def _changes(
    chain: Chain, settings: Settings, work_of: Callable[..., Workload], count: int
) -> list[tuple[str, Workload]]:
    """Other ways to run the same supernet: finer micro-batches, another stream, shared layers that lag; and all at
    once. A single network may also do without waiting for itself, as a pipeline of as many stages would train it."""
    changes: list[tuple[str, Settings]] = []
    everything = settings
    if settings.stream.name != "spaced":
        try:
            spaced = make_stream(chain.space, "spaced", settings.seed)
            changes.append(("stream = spaced", replace(settings, stream=spaced)))
            everything = replace(everything, stream=spaced)
        except WeftError:  # a space that cannot be spaced, with constraints for example
            pass
    lag = Lagged(-(-2 * count // settings.microbatches))
    promised: dict[str, Consistency] = {
        name: lag if layer.shared else settings.consistency[name] for name, layer in chain.layers.items()
    }
    if promised != dict(settings.consistency):
        changes.append((f"consistency.shared = {lag}", replace(settings, consistency=promised, clip=None)))
        everything = replace(everything, consistency=promised, clip=None)
    found = [(change, work_of(other)) for change, other in changes]
    if not chain.space.choices and set(settings.consistency.values()) == {Exact()} and count > 1:
        one = Bounded(settings.microbatches * -(-(count - 1) // settings.microbatches), count)
        found.append((f"consistency = {one}", work_of(replace(settings, consistency=dict.fromkeys(chain.layers, one)))))
    whole = settings.stream.microbatches is None
    factors = [k for k in (2, 4) if whole and settings.batch_size % (settings.microbatches * k) == 0]
    for k in factors:
        found.append((f"microbatches = {settings.microbatches * k}", work_of(settings, k)))
    if changes and factors:
        finest = work_of(everything, factors[-1])
        together = [change for change, _ in changes] + [f"microbatches = {settings.microbatches * factors[-1]}"]
        found.append((", ".join(together), finest))
    return found
