"""weft simulate: how a run would fare on several stages, and what would help."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft.data import Data, Loader
from weft.errors import WeftError
from weft.pipeline.consistency import Consistency, Lagged
from weft.pipeline.cut import best_cut
from weft.pipeline.profile import profile_chain
from weft.pipeline.scheduler import Rule
from weft.pipeline.sequential import split
from weft.pipeline.settings import Settings, make_settings
from weft.pipeline.simulator import Simulated, jitter, simulate
from weft.pipeline.workload import Workload, chain_workload
from weft.space import make_stream
from weft.supernet import Chain, Factory, initialise

Profile = Mapping[Hashable, tuple[float, float]]

ENOUGH = 0.05
"""A steady bubble below this needs no advice."""


def simulate_run(
    net: Chain | Factory,
    data: Data,
    arguments: Mapping[str, Any],
    stages: Sequence[int],
    *,
    steps: int = 400,
    window: int | None = None,
    latency: float = 0.0,
    spread: float = 0.0,
    costs: str = "measured",
) -> dict[str, Any]:
    """Rows by number of stages, and advice for the largest one that waits too much.

    ``costs`` are ``measured`` on this machine or ``equal`` (every block 1 forward, 2 backward); ``latency`` is in their
    unit. The window is twice the number of stages unless given.
    """
    chain = initialise(net, arguments.get("seed", 0))
    settings = make_settings(chain, **{**arguments, "device": "cpu"})
    batch = Loader(data.train, settings.batch_size, settings.seed).batch(0)
    profile: Any = profile_chain(chain, split(batch, settings.microbatches)[0]) if costs == "measured" else None
    work = _work(chain, settings, min(steps, settings.steps), profile)
    vary = jitter(settings.seed, spread) if spread else None
    rows: list[dict[str, Any]] = []
    advice: list[dict[str, Any]] = []
    for count in stages:
        if not 1 <= count <= work.blocks:
            rows.append({"stages": count, "note": f"the chain has {work.blocks} blocks: use 1 to {work.blocks} stages"})
            continue

        def run(changed: Workload, count: int = count) -> dict[str, Any]:
            cut = best_cut(changed.expected_costs(), count)
            result = simulate(changed, cut, Rule(window or 2 * count), latency, vary, keep_spans=False)
            return {**_row(result), "cut": list(cut)}

        row = run(work)
        rows.append(row)
        if row["steady_bubble"] > ENOUGH:
            tried = [
                {**run(other), "change": change} for change, other in _changes(chain, settings, work, profile, count)
            ]
            advice = sorted((other for other in tried if _bubble(other) < 0.95 * _bubble(row)), key=_bubble)
    unit = "seconds" if profile else "forwards of one block"
    return {"unit": unit, "stream": settings.stream.describe(), "steps": work.steps, "rows": rows, "advice": advice}


def _bubble(row: Mapping[str, Any]) -> float:
    return float(row["steady_bubble"])


def _row(result: Simulated) -> dict[str, Any]:
    return {
        "stages": result.stages,
        "time_per_step": result.time / result.steps,
        "speedup": result.speedup,
        "bubble": result.bubble,
        "steady_bubble": result.steady_bubble,
        "peak_in_flight": max(result.peak),
    }


def _work(chain: Chain, settings: Settings, steps: int, profile: Profile | None, finer: int = 1) -> Workload:
    """The workload of the settings, with every micro-batch cut into ``finer`` ones that cost as much together."""
    costs = None if profile is None else {k: (f / finer, b / finer) for k, (f, b) in profile.items()}
    m = settings.microbatches * finer
    return chain_workload(chain, settings.stream, settings.consistency, m, steps, costs)


def _changes(
    chain: Chain, settings: Settings, work: Workload, profile: Profile | None, count: int
) -> list[tuple[str, Workload]]:
    """Other ways to run the same supernet: finer micro-batches, another stream, shared layers that lag; and all at
    once."""
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
        changes.append((f"consistency.shared = {lag}", replace(settings, consistency=promised)))
        everything = replace(everything, consistency=promised)
    found = [(change, _work(chain, other, work.steps, profile)) for change, other in changes]
    whole = settings.stream.microbatches is None
    factors = [k for k in (2, 4) if whole and settings.batch_size % (settings.microbatches * k) == 0]
    for k in factors:
        found.append((f"microbatches = {settings.microbatches * k}", _work(chain, settings, work.steps, profile, k)))
    if changes and factors:
        finest = _work(chain, everything, work.steps, profile, factors[-1])
        together = [change for change, _ in changes] + [f"microbatches = {settings.microbatches * factors[-1]}"]
        found.append((", ".join(together), finest))
    return found
