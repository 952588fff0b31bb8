"""The verbs that show what is there: `runs`, `serve`, a page that follows them, `report`, a file, and the `zoo`."""

from __future__ import annotations

import re
import secrets
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from weft.cli.arguments import AsJson
from weft.cli.output import console, errors, print_json
from weft.errors import ConfigError, install_extra
from weft.runs import list_runs
from weft.serve.library import Library
from weft.serve.report import write_report
from weft.zoo import SUPERNETS, catalogue

SHORTEST = 8
"""The least characters of a token."""


def serve(
    runs: Annotated[str, typer.Argument(help="The directory that holds the runs.", metavar="RUNS_DIR")] = "runs",
    host: Annotated[
        str, typer.Option(help="The address to listen on; any but this machine itself needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on; 0 for any that is free.", min=0, max=65535)] = 8765,
    token: Annotated[
        str | None, typer.Option(help="A password in the address; weft makes one where it is needed.")
    ] = None,
    browse: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the runs in a browser while they run.

    Ctrl-C ends it.
    """
    try:
        from weft.serve.server import address, is_loopback, listen, make_server
    except ImportError as problem:
        raise ConfigError(f"weft serve needs {problem.name}: {install_extra('serve')}") from None
    root = _directory(runs)
    if (root / "manifest.json").is_file():
        raise ConfigError(f"'{runs}' is a run: serve the directory that holds it (weft serve {root.resolve().parent})")
    if token is not None and not re.fullmatch(rf"[A-Za-z0-9._~-]{{{SHORTEST},}}", token):
        raise ConfigError(
            f"--token needs {SHORTEST} or more characters, each a letter, a digit or one of . _ ~ -; "
            "leave it out, and weft makes one where it is needed"
        )
    library = Library.under(root)
    listener = listen(host, port)
    local = is_loopback(listener.getsockname()[0])
    if token is None and not local:
        token = secrets.token_urlsafe(24)
    place = address(host, listener, token)
    if as_json:
        print_json({"address": place, "port": listener.getsockname()[1], "token": token})
    else:
        console.print(f"{runs} is shown at {place}", soft_wrap=True)
        console.print("Ctrl-C ends it" + ("" if local else "; whoever has this address can look"), soft_wrap=True)
    sys.stdout.flush()
    if browse:
        import webbrowser

        if not webbrowser.open(place):
            errors.print("no browser was found: open the address yourself")
    try:
        make_server(listener, library, token).run(sockets=[listener])
    except KeyboardInterrupt:  # which uvicorn passes on when all is closed
        pass
    finally:
        listener.close()


def report(
    runs: Annotated[list[str], typer.Argument(help="Directories of runs; several are compared.", metavar="RUN")],
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="The file to write; RUN/report.html of the first if not given.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file about runs, for any browser.

    It is the page of weft serve with all its data inside.
    """
    file = write_report([Path(run) for run in runs], None if out is None else Path(out))
    if as_json:
        print_json({"report": str(file), "runs": runs, "bytes": file.stat().st_size})
    else:
        console.print(f"written to {file}: open it in a browser", soft_wrap=True)


def _directory(runs: str) -> Path:
    root = Path(runs)
    if root.exists() and not root.is_dir():
        raise ConfigError(f"'{runs}' is not a directory: name the one that holds the runs")
    return root


def runs(
    folder: Annotated[str, typer.Argument(help="The directory that holds the runs.")] = "runs", as_json: AsJson = False
) -> None:
    """List the runs: state, progress, loss."""
    found = list_runs(_directory(folder))
    if as_json:
        print_json([asdict(run) for run in found])
        return
    if not found:
        console.print(f"no runs in {folder} yet: try `weft demo`", soft_wrap=True)
        return
    table = Table("run", "state", "steps", "loss", "created")
    for run in found:
        loss = "" if run.loss is None else f"{run.loss:.4f}"
        table.add_row(run.name, run.state, f"{run.done}/{run.total or '?'}", loss, run.created or "")
    console.print(table)


def zoo(as_json: AsJson = False) -> None:
    """List the ready-made spaces of the zoo.

    Prints how many subnets each has, of how many choices, and the parameters of the smallest and the largest one.
    """
    entries = list(catalogue(SUPERNETS))
    if as_json:
        print_json([asdict(entry) for entry in entries])
        return
    table = Table("supernet", "subnets", "choices", "parameters", "")
    for column in table.columns[1:4]:
        column.justify = "right"
    for entry in entries:
        subnets = "too many" if entry.subnets is None else count(entry.subnets)
        ends = " to ".join("?" if end is None else f"{end:,}" for end in (entry.smallest, entry.largest))
        table.add_row(entry.name, subnets, str(entry.choices), ends, entry.about)
    console.print(table)


def count(number: int) -> str:
    """Exact below a million.

    >>> count(6561), count(1791153), count(21758655492572485851)
    ('6,561', '1.79e6', '2.18e19')
    """
    digits, _, power = f"{number:.2e}".partition("e+")
    return f"{number:,}" if number < 1_000_000 else f"{digits}e{int(power)}"
