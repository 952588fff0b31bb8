"""The verbs that find: `search` for the best subnets, and `export` one of them."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.arguments import AsJson, Target, read_target
from weft.cli.output import console, errors, print_json, show
from weft.cli.resumption import resumable
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.config import Config


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
    settings, folder = read_target(
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
    import weft
    from weft import assembly
    from weft.progress import Bar

    trained = assembly.open_trained(settings, folder)
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
        print_json({"run": str(trained.path), "results": str(where), "front": front.to_json()})
        return
    console.print(front.table())
    console.print(f"saved as front.json and front.csv in {where}", soft_wrap=True)


def export(context: typer.Context, config: Target, as_json: AsJson = False) -> None:
    """Write the best subnet, or the one named by --export.subnet, as plain PyTorch and ONNX files."""
    settings, folder = read_target(config, context)
    from weft import assembly
    from weft.search.export import export_subnet

    trained = assembly.open_trained(settings, folder)
    command = shlex.join(["weft", "export", config, *context.args])
    written = export_subnet(trained, settings.export, settings.search, command)
    show({name: str(path) for name, path in written.items()}, as_json, "exported")


def _learn(settings: Config, folder: Path, resume: bool, again: str, as_json: bool) -> None:
    """A search that trains: what it found, or how to go on with it."""
    from weft import tables
    from weft.searching import learn, told

    with resumable(Path(settings.runs) / str(settings.run), again):
        found = learn(settings, folder, resume, errors)
    result = told(found, settings)
    if as_json:
        print_json(result)
        return
    if result["probabilities"] is not None:
        tables.mixture(console, result["probabilities"])
    names = ("architecture", "run", "steps", "fingerprint")
    picked = {"missed": "of each choice what is missed most", "likeliest": "the likeliest of the mixture"}
    how = {"picked": picked[result["picked"]]} if result["picked"] else {}
    scores = {name: f"{value:.6g}" for name, value in result["scores"].items()}
    tables.facts(
        console, {**how, **{name: result[name] for name in names}, **scores}, f"searched by {result['method']}"
    )
    console.print(f"saved in {result['results']}: {', '.join(result['files'])}", soft_wrap=True)
