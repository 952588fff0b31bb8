"""The verbs that list what is there: `runs` on this disk, and the spaces of the `zoo`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.arguments import AsJson
from weft.cli.output import console, print_json
from weft.errors import ConfigError


def runs(
    folder: Annotated[str, typer.Argument(help="The directory that holds the runs.")] = "runs", as_json: AsJson = False
) -> None:
    """List the runs: state, progress, loss."""
    from rich.table import Table

    from weft.runs import list_runs

    if Path(folder).exists() and not Path(folder).is_dir():
        raise ConfigError(f"'{folder}' is not a directory: name the one that holds the runs")
    found = list_runs(folder)
    if as_json:
        print_json([asdict(run) for run in found])
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


def zoo(as_json: AsJson = False) -> None:
    """List the ready-made spaces of the zoo.

    Prints how many subnets each has, of how many choices, and the parameters of the smallest and the largest one.
    """
    from weft.cli import output
    from weft.zoo import SUPERNETS, catalogue

    entries = list(catalogue(SUPERNETS))
    print_json([asdict(entry) for entry in entries]) if as_json else output.zoo(console, entries)
