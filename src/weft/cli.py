"""The command line: one verb for each thing a user does, each ``weft <verb> config.toml [--a.b=c] [--json]``."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from weft import __version__
from weft.errors import ConfigError, WeftError, nearest, place_in_own_code

if TYPE_CHECKING:
    from weft.config import Config

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
console = Console(markup=False, emoji=False, highlight=False)
errors = Console(stderr=True, markup=False, emoji=False, highlight=False)

_EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}
Target = Annotated[str, typer.Argument(help="A config.toml, or the directory of a run.", metavar="CONFIG|RUN")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def main() -> None:
    """The entry point: mistakes of the user end with one line and exit code 2, never with a traceback."""
    handler = RichHandler(console=errors, show_time=False, show_path=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200  # a file or a pipe has no width to fit in
    try:
        sys.exit(app(standalone_mode=False))  # verbs return nothing, and what ends them early is a code
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except typer.Exit as end:
        sys.exit(end.exit_code)
    except WeftError as problem:
        _fail(str(problem))
    except Exception as problem:
        if hasattr(problem, "format_message"):  # a mistake in the command line itself, told by click
            _fail(_usage(problem.format_message()))
        place = place_in_own_code(problem)
        if place is None:
            raise
        _fail(f"{type(problem).__name__}: {problem} ({place})")


@app.callback(invoke_without_command=True)
def weft(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Finds neural architectures and trains them on as many devices as there are."""
    if version:
        print(f"weft {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def demo(
    as_json: AsJson = False,
    runs: Annotated[str, typer.Option(help="Where the run goes.")] = "runs",
    steps: Annotated[int, typer.Option(help="Steps of training.", min=1)] = 2000,
    budget: Annotated[int, typer.Option(help="Subnets that the search scores.", min=1)] = 120,
) -> None:
    """Train a small supernet on real digits on 2 stages, prove that 1 gives the same, search it and extract the best
    subnet: about a minute."""
    from weft.demo import run_demo

    result = run_demo(Path(runs), Console(quiet=True) if as_json else console, steps, budget)
    if as_json:
        _print_json(result)
    if not result["same"]:
        raise typer.Exit(1)


@app.command(context_settings=_EXTRA)
def train(
    context: typer.Context,
    config: Target,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest good checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be run, and run nothing.")] = False,
    stages: Annotated[int | None, typer.Option(help="On how many processes, each with a part of the chain.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train the supernet that the config names."""
    settings, folder = _config(config, context, [] if stages is None else [f"--train.stages={stages}"])
    import weft as library
    from weft import assembly
    from weft.config import to_dict
    from weft.pipeline.ranks import ranks
    from weft.progress import Bar

    assembly.set_threads(settings)
    told = ranks()
    if told is not None and told.rank > 0:  # under torchrun: the first process speaks for all
        console.quiet = errors.quiet = True
    net, data = assembly.supernet_of(settings, folder), assembly.data_of(settings, folder)
    arguments = assembly.train_arguments(settings, folder)
    path = Path(settings.runs) / str(settings.run)
    if dry_run:
        from weft.dryrun import describe

        _show(describe(net, data, arguments, path), as_json, "what would be run")
        return
    arguments |= assembly.extra_arguments(settings, folder)
    saved = {**to_dict(settings), "folder": str(folder.resolve())}
    load = data if (settings.train.stages or 1) == 1 else partial(assembly.data_of, settings, folder.resolve())
    typed = [*context.args, *([] if stages is None else [f"--stages={stages}"]), "--resume"]
    again = shlex.join(["weft", "train", config, *typed])
    with _resumable(path, again), Bar(errors, "train", settings.train.steps) as bar:
        trained = library.train(net, load, **arguments, callbacks=[bar.train], resume=resume, config=saved)
    if told is not None and told.rank > 0:
        return
    _show(
        {"run": str(trained.path), "steps": settings.train.steps, "fingerprint": trained.fingerprint},
        as_json,
        "trained",
    )


@app.command(context_settings=_EXTRA)
def search(
    context: typer.Context,
    config: Target,
    method: Annotated[
        str | None,
        typer.Option(
            help="random, evolution or nsga2 search a trained run; darts, darts2, drnas, gdas, pc-darts, spos, fairnas "
            "and sandwich train the supernet too.",
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="What the found subnet shall cost, such as parameters=5e6; for gradient methods, repeatable."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the training of a gradient method from its newest checkpoint.")
    ] = False,
    stages: Annotated[int | None, typer.Option(help="For gradient methods: on how many processes.")] = None,
    as_json: AsJson = False,
) -> None:
    """Search a trained supernet and print its Pareto front; or, by a gradient method, train and search at once."""
    more = {"search.method": method, "search.targets": json.dumps(target) if target else None, "train.stages": stages}
    settings, folder = _config(
        config, context, [f"--{key}={value}" for key, value in more.items() if value is not None]
    )
    from weft.searching import check_method, is_gradient, tell_unused

    s, asked = settings.search, {"--method": method, "--stages": stages}
    typed = [*context.args, *(f"{option}={value}" for option, value in asked.items() if value is not None)]
    typed += [f"--target={one}" for one in target or ()]
    check_method(s.method)
    if is_gradient(s.method):
        tell_unused(s)
        _learn(settings, folder, resume, shlex.join(["weft", "search", config, *typed, "--resume"]), as_json)
        return
    for option, value in {"--target": target, "--resume": resume, "--stages": stages}.items():
        if value:
            raise ConfigError(
                f"{option} is for methods that train, such as --method drnas: '{s.method or 'evolution'}' searches a "
                f"trained run{', bounded by --search.constraints' if option == '--target' else ''}"
            )
    tell_unused(s)
    import weft as library
    from weft import assembly
    from weft.progress import Bar

    trained = assembly.open_trained(settings, folder)
    try:
        with Bar(errors, "search", s.budget) as bar:
            front = library.search(
                trained,
                maximize=s.maximize,
                minimize=s.minimize,
                constraints=s.constraints,
                budget=s.budget,
                method=s.method,
                seed=s.seed,
                recalibrate=s.recalibrate,
                batch_size=s.batch_size,
                name=s.name,
                on_score=bar.search,
            )
    except KeyboardInterrupt:
        again = shlex.join(["weft", "search", config, *typed])
        print(f"stopped; the scores so far are kept. Go on with: {again}", file=sys.stderr)
        raise
    where = trained.path / "results" / s.name
    if as_json:
        _print_json({"run": str(trained.path), "results": str(where), "front": front.to_json()})
        return
    console.print(front.table())
    console.print(f"saved as front.json and front.csv in {where}", soft_wrap=True)


def _learn(settings: Config, folder: Path, resume: bool, again: str, as_json: bool) -> None:
    """A search that trains: what it found, or how to go on with it."""
    from weft import tables
    from weft.searching import learn, told

    with _resumable(Path(settings.runs) / str(settings.run), again):
        found = learn(settings, folder, resume, errors)
    result = told(found, settings)
    if as_json:
        _print_json(result)
        return
    if result["probabilities"] is not None:
        tables.mixture(console, result["probabilities"])
    names = ("architecture", "run", "steps", "fingerprint")
    scores = {name: f"{value:.6g}" for name, value in result["scores"].items()}
    tables.facts(console, {**{name: result[name] for name in names}, **scores}, f"searched by {result['method']}")
    console.print(f"saved in {result['results']}: {', '.join(result['files'])}", soft_wrap=True)


@app.command(context_settings=_EXTRA)
def export(context: typer.Context, config: Target, as_json: AsJson = False) -> None:
    """Write the best subnet, or the one named by --export.subnet, as plain PyTorch and ONNX files."""
    settings, folder = _config(config, context)
    from weft import assembly
    from weft.search.export import export_subnet

    trained = assembly.open_trained(settings, folder)
    command = shlex.join(["weft", "export", config, *context.args])
    written = export_subnet(trained, settings.export, settings.search, command)
    _show({name: str(path) for name, path in written.items()}, as_json, "exported")


@app.command(context_settings=_EXTRA)
def simulate(
    context: typer.Context,
    config: Target,
    stages: Annotated[str, typer.Option(help="Numbers of stages, separated by commas.")] = "1,2,4,8",
    steps: Annotated[int, typer.Option(help="How many steps of the run are simulated at most.")] = 400,
    window: Annotated[
        int | None, typer.Option(help="Micro-batches in flight on a stage; 2 x stages if not given.")
    ] = None,
    latency: Annotated[float, typer.Option(help="Time of a message between stages, in the unit of the costs.")] = 0.0,
    bandwidth: Annotated[
        float | None, typer.Option(help="Bytes between stages in one unit of the costs; no limit if not given.")
    ] = None,
    slow: Annotated[str, typer.Option(help="Slow stages and their speeds, such as 3:0.5,0:0.8; the rest have 1.")] = "",
    jitter: Annotated[float, typer.Option(help="Operation times vary by up to this share, such as 0.25.")] = 0.0,
    costs: Annotated[str, typer.Option(help="measured (on this machine) or equal")] = "measured",
    as_json: AsJson = False,
) -> None:
    """Say how the run would fare on several stages: throughput, bubble, activations, and what would help."""
    settings, folder = _config(config, context)
    counts = _stages(stages)
    if costs not in ("measured", "equal"):
        raise ConfigError(f"unknown costs '{costs}'{nearest(costs, ('measured', 'equal'))}")
    from weft import assembly
    from weft.simulation import simulate_run
    from weft.tables import simulated

    assembly.set_threads(settings)
    net, data = assembly.supernet_of(settings, folder), assembly.data_of(settings, folder)
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
    )
    if as_json:
        _print_json(found)
        return
    console.print(
        f"{found['stream']}; {found['steps']} steps, time in {found['unit']}", highlight=False, soft_wrap=True
    )
    simulated(console, found["rows"], "stages")
    if found["advice"]:
        console.print(f"what would help on {found['advice'][0]['stages']} stages:")
        simulated(console, found["advice"], "change")


@app.command(context_settings=_EXTRA)
def verify(
    context: typer.Context,
    config: Target,
    stages: Annotated[str, typer.Option(help="Numbers of stages, separated by commas.")] = "1,2",
    steps: Annotated[int, typer.Option(help="How many steps of the run are trained at most.", min=1)] = 50,
    as_json: AsJson = False,
) -> None:
    """Prove that the run has the same bits on several stages, or say where and why not; exit code 1 if not."""
    settings, folder = _config(config, context)
    counts = _stages(stages)
    from weft import assembly
    from weft.tables import verified
    from weft.verification import verify_run

    assembly.set_threads(settings)
    net, load = assembly.supernet_of(settings, folder), partial(assembly.data_of, settings, folder.resolve())
    arguments = {**assembly.train_arguments(settings, folder), **assembly.extra_arguments(settings, folder)}
    with errors.status("verify") as status:
        found = verify_run(
            net, load, arguments, counts, steps=steps, on_way=lambda way: status.update(f"verify: {way}")
        )
    _print_json(found) if as_json else verified(console, found)
    if not found["equal"]:
        raise typer.Exit(1)


@app.command()
def runs(
    folder: Annotated[str, typer.Argument(help="The directory that holds the runs.")] = "runs", as_json: AsJson = False
) -> None:
    """List the runs: state, progress, loss."""
    from weft.runs import list_runs

    found = list_runs(folder)
    if as_json:
        _print_json([asdict(run) for run in found])
        return
    if not found:
        console.print(f"no runs in {folder} yet: try `weft demo`", soft_wrap=True)
        return
    table = Table()
    for column in ("run", "state", "steps", "loss", "created"):
        table.add_column(column)
    for run in found:
        loss = "" if run.loss is None else f"{run.loss:.4f}"
        table.add_row(run.name, run.state, f"{run.done}/{run.total or '?'}", loss, run.created or "")
    console.print(table)


@app.command()
def zoo(as_json: AsJson = False) -> None:
    """List the spaces of the zoo: how many subnets, of how many choices, and the parameters of the ends."""
    from weft import tables
    from weft.zoo import SUPERNETS
    from weft.zoo.catalogue import catalogue

    entries = list(catalogue(SUPERNETS))
    _print_json([asdict(entry) for entry in entries]) if as_json else tables.zoo(console, entries)


@app.command()
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
        _print_json({"run": run, "trace": str(file), **found})
        return
    traced_stages(console, found)
    console.print(f"written to {file}: open it in https://ui.perfetto.dev", soft_wrap=True)


def _config(target: str, context: typer.Context, more: Sequence[str] = ()) -> tuple[Config, Path]:
    """The configuration in a file, or that a run was started from; and the folder that its code is found from."""
    from weft.config import make_config, read_config, to_dict

    known = [option for parameter in context.command.params for option in parameter.opts if option[:2] == "--"]
    for argument in context.args:
        if not re.match(r"--[\w.-]+=", argument):
            raise ConfigError(
                f"unknown option '{argument}' (settings are written --a.b=c){nearest(argument, [*known, '--help'])}"
            )
    path = Path(target)
    if path.is_dir():
        from weft.runs import Run

        run = Run.open(path.resolve())
        saved = dict(run.manifest.get("config") or {})
        if not saved:
            raise ConfigError(f"run '{path}' was not started from a config: use weft.load_run in Python")
        folder = Path(saved.pop("folder", "."))
        where = {"runs": str(run.path.parent), "run": run.path.name}
        return make_config({**saved, **where}, [*context.args, *more]), folder
    config = read_config(path, [*context.args, *more])
    if config.run is None:
        config = make_config({**to_dict(config), "run": path.stem})
    return config, path.parent


@contextmanager
def _resumable(path: Path, command: str) -> Iterator[None]:
    """Around a training: whoever stops it is told how to go on, and whoever begins it twice, that it is there."""
    try:
        yield
    except KeyboardInterrupt:
        from weft.runs import Checkpoints

        steps = Checkpoints(path / "checkpoints").steps()
        what = f"a checkpoint after {steps[-1]} steps is written" if steps else "there is no checkpoint yet"
        print(f"stopped; {what}. Resume with: {command}", file=sys.stderr)
        raise
    except WeftError as problem:
        if "already holds a run" in str(problem):
            raise ConfigError(f"{problem} (--resume, or --run=NAME)") from None
        raise


def _show(values: Mapping[str, Any], as_json: bool, title: str) -> None:
    if as_json:
        _print_json(values)
        return
    from weft.tables import facts

    facts(console, values, title)


def _stages(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise ConfigError(f"--stages takes whole numbers from 1 on, such as 1,2,4, not '{text}'")
    return counts


def _slow(text: str) -> dict[int, float]:
    try:
        return {int(stage): float(speed) for stage, speed in (part.split(":") for part in text.split(",") if part)}
    except ValueError:
        raise ConfigError(f"--slow takes stages and speeds, such as 3:0.5,0:0.8, not '{text}'") from None


def _print_json(value: Any) -> None:
    from weft.runs.files import plain

    print(json.dumps(plain(value), allow_nan=False))


def _usage(message: str) -> str:
    """Click's words for a mistake, with the nearest verb."""
    unknown = re.match(r"No such command '(.*?)'", message)
    verbs = [str(command.name or getattr(command.callback, "__name__", "")) for command in app.registered_commands]
    return f"unknown verb '{unknown[1]}'{nearest(unknown[1], verbs)}" if unknown else message


def _fail(message: str) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
