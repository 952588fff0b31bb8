"""The program ``weft``: its verbs in the order of its help, and how a mistake ends it."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from typing import Annotated

import typer
from rich.logging import RichHandler

from weft import __version__
from weft.cli.demo import demo
from weft.cli.output import console, errors
from weft.cli.plan import calibrate, plan
from weft.cli.runs import runs, zoo
from weft.cli.search import export, search
from weft.cli.serve import report, serve
from weft.cli.simulate import simulate, trace
from weft.cli.train import train, verify
from weft.cli.tune import tune
from weft.errors import WeftError, nearest, place_in_own_code

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


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
        if hasattr(problem, "format_message"):  # a mistake in the command line itself, which click reports
            _fail(_usage(problem.format_message()))
        place = place_in_own_code(problem)
        if place is None:
            raise
        _fail(f"{type(problem).__name__}: {problem} ({place})")


@app.callback(invoke_without_command=True)
def weft(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Neural architecture search and training for PyTorch, reproducible to the last bit."""
    if version:
        print(f"weft {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


def _add(*verbs: Callable[..., None], **settings: bool) -> None:
    for verb in verbs:
        app.command(context_settings=settings)(verb)


_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}  # --a.b=c
_add(demo)
_add(train, search, tune, export, simulate, verify, **_SETTINGS)
_add(runs, zoo)
_add(plan, **_SETTINGS)
_add(calibrate, trace, serve, report)


def _usage(message: str) -> str:
    """Click's words for a mistake, with the nearest verb."""
    unknown = re.match(r"No such command '(.*?)'", message)
    verbs = [str(command.name or getattr(command.callback, "__name__", "")) for command in app.registered_commands]
    return f"unknown verb '{unknown[1]}'{nearest(unknown[1], verbs)}" if unknown else message


def _fail(message: str) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
