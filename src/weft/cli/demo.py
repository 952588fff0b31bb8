"""The verb that shows what weft does, with no config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weft.cli.arguments import AsJson
from weft.cli.output import console, print_json


def demo(
    as_json: AsJson = False,
    runs: Annotated[str, typer.Option(help="Where the run goes.")] = "runs",
    steps: Annotated[int, typer.Option(help="Steps of training.", min=1)] = 2000,
    budget: Annotated[int, typer.Option(help="Subnets that the search scores.", min=1)] = 120,
) -> None:
    """Train a small supernet on real digits on 2 stages, prove that 1 gives the same, search it, extract the best
    subnet and write a report to look at: about a minute."""
    from weft.demo import run_demo

    result = run_demo(Path(runs), Console(quiet=True) if as_json else console, steps, budget)
    if as_json:
        print_json(result)
    if not result["same"]:
        raise typer.Exit(1)
