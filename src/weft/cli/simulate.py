"""The verbs ``simulate``, before a run, and ``trace``, after it: where the time of stages goes, and what would help."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli import build
from weft.cli.arguments import AsJson, Target, read_target, stage_counts
from weft.cli.output import console, print_json, simulated, traced_stages
from weft.data import Data, Loader
from weft.data.loader import split_batch
from weft.engine.consistency import Bounded, Consistency, Exact, Lagged
from weft.engine.train_step import TrainStep
from weft.errors import ConfigError, ConsistencyError, WeftError, nearest
from weft.pipeline import simulator
from weft.pipeline.profiler import message_bytes, profile_chain
from weft.pipeline.scheduler import SchedulePolicy
from weft.pipeline.simulator import jitter
from weft.pipeline.workload import Workload, chain_workload
from weft.runs import Run
from weft.space import make_stream
from weft.supernet import Chain, Factory, initialise
from weft.supernet.partition import Cut
from weft.trace.analysis import summary
from weft.trace.perfetto import perfetto
from weft.trace.reader import read_traces
from weft.trainer.config import TrainConfig, resolve
from weft.trainer.partitioning import choose_cut, default_in_flight
from weft.utils.files import write_atomic

ENOUGH = 0.05
"""A steady bubble below this needs no advice, and a change that gains less is none."""

CUT_STEPS = 100
"""Steps that are simulated to compare two cuts."""


def simulate_run(
    net: Chain | Factory,
    data: Data,
    config: TrainConfig,
    stages: Sequence[int],
    *,
    steps: int = 400,
    max_in_flight: int | None = None,
    latency: float = 0.0,
    bandwidth: float | None = None,
    slow: Mapping[int, float] | None = None,
    spread: float = 0.0,
    costs: str = "measured",
) -> dict[str, Any]:
    """Rows by number of stages, and advice for the largest one that waits too much, the greatest speed-up first.

    ``costs`` are ``measured`` on this machine or ``equal`` (every block 1 forward, 2 backward); ``latency`` is in their
    unit, ``bandwidth`` in bytes for one such unit. ``slow`` has the speeds of stages that are not as fast as the rest,
    which are 1. The cut and the limits in flight are those that a run would choose, unless ``max_in_flight`` is given.
    """
    chain = initialise(net, config.seed)
    resolved = resolve(config, chain)
    batch = split_batch(Loader(data.train, config.batch_size, config.seed).batch(0), config.microbatches)[0]
    measured = costs == "measured"
    profile: Any = profile_chain(chain, batch) if measured else dict.fromkeys(chain.layers, (1.0, 2.0))
    sizes = None if bandwidth is None else message_bytes(chain, batch)

    def work_of(changed: TrainStep, finer: int = 1) -> Workload:
        """Of the config, with every micro-batch cut into ``finer`` ones that cost as much together."""
        costs = {layer: (forward / finer, backward / finer) for layer, (forward, backward) in profile.items()}
        parts = None if sizes is None else [size / finer for size in sizes]
        m, count = changed.microbatches * finer, min(steps, resolved.steps)
        return chain_workload(chain, changed.stream, changed.consistency, m, count, costs, parts)

    work = work_of(resolved)
    short = replace(work, steps=min(work.steps, CUT_STEPS))
    vary = jitter(resolved.seed, spread) if spread else None
    slow = slow or {}
    if any(not 0 <= stage < max(stages) for stage in slow):
        raise ConsistencyError(f"slow stages {sorted(slow)}: stages are numbered from 0 to {max(stages) - 1}")

    def run(count: int, changed: Workload, cut: Cut | None = None, limit: int | None = max_in_flight) -> dict[str, Any]:
        cut = choose_cut(changed, count, cut)
        policies = [SchedulePolicy(own) for own in default_in_flight(changed, cut, limit)]
        speeds = [slow.get(stage, 1.0) for stage in range(count)]
        result = simulator.simulate(changed, cut, policies, latency, vary, False, bandwidth=bandwidth, speeds=speeds)
        return {
            "stages": result.stages,
            "time_per_step": result.time / result.steps,
            "speedup": result.speedup,
            "bubble": result.bubble,
            "steady_bubble": result.steady_bubble,
            "peak_in_flight": max(result.peak),
            "cut": list(cut),
            "max_in_flight": max(policy.max_in_flight for policy in policies),
        }

    def advise(row: Mapping[str, Any]) -> list[dict[str, Any]]:
        count = row["stages"]
        tried = [{**run(count, other), "change": change} for change, other in _changes(chain, resolved, work_of, count)]
        for limit in (2 * row["max_in_flight"], 4 * row["max_in_flight"]):
            tried.append({**run(count, work, limit=limit), "change": f"max_in_flight = {limit}"})
        cut = better_cut(tuple(row["cut"]), work.blocks, lambda cut: run(count, short, cut)["speedup"])
        tried.append({**run(count, work, cut), "change": f"cut = {' '.join(map(str, cut))}"})
        helps = [other for other in tried if other["speedup"] > (1 + ENOUGH) * row["speedup"]]
        return sorted(helps, key=itemgetter("speedup"), reverse=True)

    none = f"the chain has {work.blocks} blocks: use 1 to {work.blocks} stages"
    rows: list[dict[str, Any]] = [
        run(n, work) if 1 <= n <= work.blocks else {"stages": n, "note": none} for n in stages
    ]
    waiting = [row for row in rows if row.get("steady_bubble", 0.0) > ENOUGH]
    advice = advise(waiting[-1]) if waiting else []
    unit = "seconds" if measured else "forwards of one block"
    return {"unit": unit, "stream": resolved.stream.describe(), "steps": work.steps, "rows": rows, "advice": advice}


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


def _changes(
    chain: Chain, config: TrainStep, work_of: Callable[..., Workload], count: int
) -> list[tuple[str, Workload]]:
    """Other ways to run the same supernet: finer micro-batches, another stream, shared layers that lag; and all at
    once. A single network may also do without waiting for itself, as a pipeline of as many stages would train it."""
    changes: dict[str, dict[str, Any]] = {}
    if config.stream.name != "spaced":
        with suppress(WeftError):  # a space that cannot be spaced, with constraints for example
            changes["stream = spaced"] = {"stream": make_stream(chain.space, "spaced", config.seed)}
    lag = Lagged(-(-2 * count // config.microbatches))
    consistency: dict[str, Consistency] = {
        name: lag if layer.shared else config.consistency[name] for name, layer in chain.layers.items()
    }
    if consistency != dict(config.consistency):
        changes[f"consistency.shared = {lag}"] = {"consistency": consistency}
    found = [(change, work_of(replace(config, **fields))) for change, fields in changes.items()]
    if not chain.space.choices and set(config.consistency.values()) == {Exact()} and count > 1:
        one = Bounded(config.microbatches * -(-(count - 1) // config.microbatches), count)
        found.append((f"consistency = {one}", work_of(replace(config, consistency=dict.fromkeys(chain.layers, one)))))
    whole = config.stream.microbatches is None
    factors = [k for k in (2, 4) if whole and config.batch_size % (config.microbatches * k) == 0]
    finer = {k: f"microbatches = {config.microbatches * k}" for k in factors}
    found += [(change, work_of(config, k)) for k, change in finer.items()]
    if changes and finer:
        everything = {name: value for fields in changes.values() for name, value in fields.items()}
        finest = work_of(replace(config, **everything), factors[-1])
        found.append((", ".join([*changes, finer[factors[-1]]]), finest))
    return found


def simulate(
    context: typer.Context,
    config: Target,
    stages: Annotated[str, typer.Option(help="Numbers of stages, separated by commas.")] = "1,2,4,8",
    steps: Annotated[int, typer.Option(help="Steps of the run that are simulated at most.")] = 400,
    max_in_flight: Annotated[
        int | None, typer.Option(help="Micro-batches in flight on a stage; as many as a run would have if not given.")
    ] = None,
    latency: Annotated[float, typer.Option(help="Time of a message between stages, in the unit of the costs.")] = 0.0,
    bandwidth: Annotated[
        float | None, typer.Option(help="Bytes between stages in one unit of the costs; no limit if not given.")
    ] = None,
    slow: Annotated[str, typer.Option(help="Speeds of slow stages, such as 3:0.5,0:0.8; the others have 1.")] = "",
    jitter: Annotated[float, typer.Option(help="Operation times vary by up to this share, such as 0.25.")] = 0.0,
    costs: Annotated[str, typer.Option(help="measured, on this machine, or equal.")] = "measured",
    as_json: AsJson = False,
) -> None:
    """Predict a run's speed on several stages.

    Prints throughput, bubble and micro-batches in flight on each number of stages, and which changes would help.
    """
    settings, folder = read_target(config, context)
    counts = stage_counts(stages)
    if costs not in ("measured", "equal"):
        raise ConfigError(f"unknown costs '{costs}'{nearest(costs, ('measured', 'equal'))}")
    build.set_threads(settings)
    data = build.data_of(settings, folder)
    net = build.supernet_of(settings, folder, data)
    found = simulate_run(
        net,
        data,
        build.train_parts(settings, folder)[0],
        counts,
        steps=steps,
        max_in_flight=max_in_flight,
        latency=latency,
        bandwidth=bandwidth,
        slow=_slow(slow),
        spread=jitter,
        costs=costs,
    )
    if as_json:
        print_json(found)
        return
    console.print(
        f"{found['stream']}; {found['steps']} steps, time in {found['unit']}", highlight=False, soft_wrap=True
    )
    simulated(console, found["rows"], "stages")
    if found["advice"]:
        console.print(f"what would help on {found['advice'][0]['stages']} stages:")
        simulated(console, found["advice"], "change")


def trace(
    run: Annotated[str, typer.Argument(help="The directory of a run that wrote traces.", metavar="RUN")],
    out: Annotated[str | None, typer.Option(help="The file to write; RUN/traces/trace.json if not given.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what the stages of a run did and waited for.

    Reads the traces of a run with --execution.trace=true, and writes a file for ui.perfetto.dev.
    """
    traced = read_traces(Run.open(run).path)
    found, file = summary(traced), Path(out) if out else Path(run) / "traces" / "trace.json"
    write_atomic(file, json.dumps(perfetto(traced), separators=(",", ":"), allow_nan=False))
    if as_json:
        print_json({"run": run, "trace": str(file), **found})
        return
    traced_stages(console, found)
    console.print(f"written to {file}: open it in https://ui.perfetto.dev", soft_wrap=True)


def _slow(text: str) -> dict[int, float]:
    try:
        return {int(stage): float(speed) for stage, speed in (part.split(":") for part in text.split(",") if part)}
    except ValueError:
        raise ConfigError(f"--slow takes stages and speeds, such as 3:0.5,0:0.8, not '{text}'") from None
