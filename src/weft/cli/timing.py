"""The verbs that tell where the time of stages goes: `simulate` before a run, `trace` after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.arguments import AsJson, Target, read_target, stage_counts
from weft.cli.output import console, print_json
from weft.errors import ConfigError, nearest


def simulate(
    context: typer.Context,
    config: Target,
    stages: Annotated[str, typer.Option(help="Numbers of stages, separated by commas.")] = "1,2,4,8",
    steps: Annotated[int, typer.Option(help="How many steps of the run are simulated at most.")] = 400,
    window: Annotated[
        int | None, typer.Option(help="Micro-batches in flight on a stage; as many as a run would have if not given.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Processes that share the stages; one for every stage if not given.", min=1)
    ] = None,
    placement: Annotated[
        str | None, typer.Option(help="line, loop or v: which of the ranks has which stages; see --ranks.")
    ] = None,
    defer: Annotated[
        bool, typer.Option("--defer", help="Gradients of weights are put off until a stage would wait.")
    ] = False,
    latency: Annotated[float, typer.Option(help="Time of a message between stages, in the unit of the costs.")] = 0.0,
    bandwidth: Annotated[
        float | None, typer.Option(help="Bytes between stages in one unit of the costs; no limit if not given.")
    ] = None,
    slow: Annotated[str, typer.Option(help="Slow ranks and their speeds, such as 3:0.5,0:0.8; the rest have 1.")] = "",
    jitter: Annotated[float, typer.Option(help="Operation times vary by up to this share, such as 0.25.")] = 0.0,
    costs: Annotated[str, typer.Option(help="measured (on this machine) or equal")] = "measured",
    as_json: AsJson = False,
) -> None:
    """Say how the run would fare on several stages: throughput, bubble, activations, and what would help."""
    settings, folder = read_target(config, context)
    counts = stage_counts(stages)
    if costs not in ("measured", "equal"):
        raise ConfigError(f"unknown costs '{costs}'{nearest(costs, ('measured', 'equal'))}")
    from weft import assembly
    from weft.simulation import simulate_run
    from weft.tables import simulated

    assembly.set_threads(settings)
    data = assembly.data_of(settings, folder)
    net = assembly.supernet_of(settings, folder, data)
    arguments = assembly.train_arguments(settings, folder)
    found = simulate_run(
        net,
        data,
        arguments,
        counts,
        steps=steps,
        window=window,
        latency=latency,
        bandwidth=bandwidth,
        slow=_slow(slow),
        spread=jitter,
        costs=costs,
        ranks=ranks,
        placement=placement,
        defer=defer,
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
    """Say how busy the stages of a run were and what they waited for; write a trace for ui.perfetto.dev."""
    from weft.pipeline.perfetto import perfetto
    from weft.pipeline.trace import read_traces
    from weft.pipeline.utilisation import summary
    from weft.runs import Run, write_atomic
    from weft.tables import traced_stages

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
