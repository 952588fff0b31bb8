"""The verbs that show runs: `serve`, a page that follows them, and `report`, a file that opens from disk."""

from __future__ import annotations

import re
import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.arguments import AsJson
from weft.cli.output import console, errors, print_json
from weft.errors import ConfigError, install_extra

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
    from weft.serve.library import Library

    try:
        from weft.serve.server import address, is_loopback, listen, make_server
    except ImportError as problem:
        raise ConfigError(f"weft serve needs {problem.name}: {install_extra('serve')}") from None
    root = _root(runs)
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
    from weft.serve.report import write_report

    file = write_report([Path(run) for run in runs], None if out is None else Path(out))
    if as_json:
        print_json({"report": str(file), "runs": runs, "bytes": file.stat().st_size})
    else:
        console.print(f"written to {file}: open it in a browser", soft_wrap=True)


def _root(runs: str) -> Path:
    root = Path(runs)
    if (root / "manifest.json").is_file():
        raise ConfigError(f"'{runs}' is a run: serve the directory that holds it (weft serve {root.resolve().parent})")
    if root.exists() and not root.is_dir():
        raise ConfigError(f"'{runs}' is not a directory: name the one that holds the runs")
    return root
