"""The verbs that find: `search` for the best subnets, and `export` one of them."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import weft
from weft.cli import build
from weft.cli.arguments import AsJson, Target, read_target, resume_hint
from weft.cli.output import console, errors, facts, mixture, print_json, show
from weft.cli.progress import Bar
from weft.config import Config, Search, convert, modern
from weft.elastic.mixture import choice_options
from weft.errors import ConfigError, RunError, SearchError, nearest
from weft.runs import Run
from weft.search import METHODS
from weft.search.export import export_subnet
from weft.search.gradient import GRADIENT_METHODS, GradientSearchResult, search_gradient
from weft.trainer.config import TrainConfig

log = logging.getLogger("weft")


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
    """Search a trained supernet and print its Pareto front.

    With a gradient method, such as --method drnas, the supernet is trained and searched at once.
    """
    more = {
        "search.method": method,
        "search.targets": json.dumps(target) if target else None,
        "execution.stages": stages,
    }
    settings, folder = read_target(
        config, context, [f"--{key}={value}" for key, value in more.items() if value is not None]
    )

    s, options = settings.search, {"--method": method, "--stages": stages}
    typed = [*context.args, *(f"{option}={value}" for option, value in options.items() if value is not None)]
    typed += [f"--target={one}" for one in target or ()]
    if s.method is not None and s.method not in (*METHODS, *GRADIENT_METHODS):
        raise SearchError(f"unknown search method '{s.method}'{nearest(s.method, (*METHODS, *GRADIENT_METHODS))}")
    _warn_unused(s)
    if s.method in GRADIENT_METHODS:
        _learn(settings, folder, resume, shlex.join(["weft", "search", config, *typed, "--resume"]), as_json)
        return
    for option, value in {"--target": target, "--resume": resume, "--stages": stages}.items():
        if value:
            raise ConfigError(
                f"{option} is for methods that train, such as --method drnas: '{s.method or 'evolution'}' searches a "
                f"trained run{', bounded by --search.constraints' if option == '--target' else ''}"
            )
    trained = build.open_trained(settings, folder)
    try:
        with Bar(errors, "search", s.budget) as bar:
            front = weft.search(
                trained,
                maximize=s.maximize,
                minimize=s.minimize,
                constraints=s.constraints,
                budget=s.budget,
                method=s.method,
                seed=s.seed,
                bn_batches=s.bn_batches,
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
        print_json({"run": str(trained.path), "results": str(where), "front": front.to_json()})
        return
    console.print(front.table())
    console.print(f"saved as front.json and front.csv in {where}", soft_wrap=True)
    named = [] if s.name == Search().name else ["--search.name", s.name]
    console.print(f"next: {shlex.join(['weft', 'export', str(trained.path), *named])}", soft_wrap=True)


def export(context: typer.Context, config: Target, as_json: AsJson = False) -> None:
    """Write a subnet as plain PyTorch or ONNX files.

    It is the best of the front, or the one that --export.subnet names.
    """
    settings, folder = read_target(config, context)
    trained = build.open_trained(settings, folder)
    command = shlex.join(["weft", "export", config, *context.args])
    wanted, searched = settings.export, settings.search
    written = export_subnet(
        trained,
        wanted.subnet,
        wanted.limits,
        wanted.formats,
        search_name=searched.name,
        bn_batches=searched.bn_batches,
        batch_size=searched.batch_size,
        command=command,
    )
    show({name: str(path) for name, path in written.items()}, as_json, "exported")


def _learn(settings: Config, folder: Path, resume: bool, again: str, as_json: bool) -> None:
    """A search that trains: what it found, or how to go on with it."""
    with resume_hint(settings.path, again):
        found = _run_gradient_search(settings, folder, resume)
    result = result_to_json(found, settings)
    if as_json:
        print_json(result)
        return
    if result["probabilities"] is not None:
        mixture(console, result["probabilities"])
    picked = {
        "perturbation": "in each choice, the option whose removal raises the loss most",
        "likeliest": "in each choice, the most probable option",
    }
    shown = {"picked": picked[result["picked"]]} if result["picked"] else {}
    shown |= {name: result[name] for name in ("architecture", "run", "steps", "fingerprint")}
    shown |= {name: f"{value:.6g}" for name, value in result["scores"].items()}
    facts(console, shown, f"searched by {result['method']}")
    console.print(f"saved in {result['results']}: {', '.join(result['files'])}", soft_wrap=True)


def _warn_unused(search: Search) -> None:
    """Warns of settings that the method does not look at."""
    if search.method in GRADIENT_METHODS:
        others, instead = ("maximize", "minimize", "constraints", "seed"), "search.targets and train.seed"
    else:
        others, instead = ("targets", "weight_warmup_steps", "rate", "pick"), "search.constraints"
    unused = [f"search.{name}" for name in others if getattr(search, name) != getattr(Search(), name)]
    if unused:
        method = search.method or "evolution"
        log.warning("'%s' does not look at %s, but at %s", method, ", ".join(unused), instead)


def _check_resumed(config: Config) -> None:
    """Refuses to go on with a run that was searched in another way, in the words of the config."""
    made = (config.path / "manifest.json").is_file() and Run.open(config.path).manifest.get("config")
    if not made:
        return
    before = convert(modern(made).get("search", {}), (), Search)
    for name in ("method", "targets", "weight_warmup_steps", "rate"):
        was, now = getattr(before, name), getattr(config.search, name)
        if was != now:
            raise RunError(
                f"run '{config.path.name}' was made with search.{name} = {was}, now it is {now}: "
                "resume it as it was, or choose another name"
            )


def _run_gradient_search(config: Config, folder: Path, resume: bool) -> GradientSearchResult:
    """Trains and searches as the config says."""
    if resume:
        _check_resumed(config)
    build.set_threads(config)
    net, data = build.supernet_of(config, folder), build.data_of(config, folder)
    train, execution, run = build.train_parts(config, folder)
    train = replace(train, stream=TrainConfig.stream)  # that of the config is for `weft train`; a method has its own
    load = data if (execution.stages or 1) == 1 else partial(build.data_of, config, folder.resolve())
    with Bar(errors, "search", config.train.steps, "steps") as bar:
        return search_gradient(
            net,
            load,
            train,
            search=build.gradient_search(config),
            execution=execution,
            run=run,
            callbacks=[bar.train],
            resume=resume,
            on_score=partial(bar.search, budget=config.search.budget),
        )


def result_to_json(found: GradientSearchResult, config: Config) -> dict[str, Any]:
    """What was found, as plain values."""
    trained, mixture = found.trained, found.mixture
    results, rows = trained.path / "results" / config.search.name, None
    if mixture is not None:
        bits = mixture.entropies()
        rows = [
            {
                "choice": name,
                "found": found.subnet.values.get(name),
                "bits": max(0.0, float(bits[name])),
                "options": list(choice_options(trained.chain.space, name)),
                "probabilities": [float(p) for p in mixture[name]],
            }
            for name in mixture.names
        ]
    return {
        "run": str(trained.path),
        "method": config.search.method,
        "steps": config.train.steps,
        "fingerprint": trained.fingerprint,
        "architecture": str(found.subnet),
        "picked": found.pick,
        "subnet": found.subnet.to_json(),
        "scores": found.scores,
        "probabilities": rows,
        "results": str(results),
        "files": sorted(path.name for path in results.iterdir() if path.suffix in (".json", ".csv")),
    }
