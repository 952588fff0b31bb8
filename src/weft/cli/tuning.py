"""The verb that tunes: `tune` runs a study, many trainings at once on the devices there are."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.arguments import AsJson, joined
from weft.cli.output import console, errors, print_json, results_alone
from weft.errors import ConfigError


def tune(
    context: typer.Context,
    config: Annotated[str, typer.Argument(help="A config.toml of a study.", metavar="CONFIG")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the study of this name.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a study: propose trials, pack them onto the devices, print the best; exit code 1 if every trial failed."""
    if config.startswith("--"):
        raise ConfigError(f"'{config}' stands where the config is expected: the config comes first, then its settings")
    from weft.tuneconfig import read_study

    known = [option for parameter in context.command.params for option in parameter.opts if option[:2] == "--"]
    path = Path(config)
    study = read_study(path, joined(context.args, [*known, "--help"]))
    import weft
    from weft.tune.live import Live, summary
    from weft.tuning import saved, tune_arguments

    objective, space, arguments = tune_arguments(study, path.parent)
    again = shlex.join(["weft", "tune", config, *context.args, "--resume"])
    try:
        with results_alone(), Live(errors) as live:
            found = weft.tune(
                objective, space, **arguments, resume=resume, watch=live.see, config=saved(study, path.parent)
            )
    except KeyboardInterrupt:
        print(f"stopped; every trial that has ended is kept. Go on with: {again}", file=sys.stderr)
        raise
    if as_json:
        print_json(found.to_json())
    else:
        summary(console, found)
    if found.trials and all(record.state == "failed" for record in found.trials):
        why = str(found.trials[-1].notes.get("error", "")).strip().splitlines()
        told = f"; the last: {why[-1]}" if why else ""
        print(f"error: all {len(found.trials)} trials of '{found.name}' failed{told}", file=sys.stderr)
        raise typer.Exit(1)
