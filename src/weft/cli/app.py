"""The program ``weft``: its verbs in the order of its help, and how a mistake ends it."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.logging import RichHandler

from weft import __version__
from weft.cli.demo import demo
from weft.cli.output import console, errors, printable
from weft.cli.plan import calibrate, plan
from weft.cli.search import export, search
from weft.cli.serve import report, runs, serve, zoo
from weft.cli.simulate import simulate, trace
from weft.cli.train import train, verify
from weft.cli.tune import tune
from weft.errors import WeftError, nearest, place_in_own_code

_HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=_HELP)


class _PrintableMessage(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def main() -> None:
    """The entry point: mistakes of the user end with one line and exit code 2, never with a traceback."""
    handler = RichHandler(console=errors, show_time=False, show_path=False)
    handler.setFormatter(_PrintableMessage())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
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
            _fail(_usage(problem))
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


def _add(*verbs: Callable[..., None], example: str | None = None) -> None:
    settings = {"allow_extra_args": True, "ignore_unknown_options": True} if example else {}  # --a.b=c
    epilog = f"Any setting of the config may follow it, such as {example}." if example else None
    for verb in verbs:
        app.command(context_settings={**_HELP, **settings}, epilog=epilog)(verb)


_add(demo)
_add(train, search, example="--train.steps=500 or --run.name=second")
_add(tune, example="--study.trials=50")
_add(export, example="--export.formats=onnx")
_add(simulate, verify, example="--train.microbatches=4")
_add(runs, zoo)
_add(plan, example="--train.batch_size=256")
_add(calibrate, trace, serve, report)


def _usage(problem: Any) -> str:
    """Click's words for a mistake, with the nearest verb, and where to read on."""
    message = str(problem.format_message())
    unknown = re.match(r"No such command '(.*?)'", message)
    if unknown:
        verbs = [str(command.name or getattr(command.callback, "__name__", "")) for command in app.registered_commands]
        return f"unknown verb '{unknown[1]}'{nearest(unknown[1], verbs)}"
    verb = getattr(problem.ctx, "info_name", None)
    return f"{message.removesuffix('.')} (see weft {verb} --help)" if verb in sys.argv else message


def _fail(message: str) -> None:
    print(printable(f"error: {' '.join(message.split())}"), file=sys.stderr)
    sys.exit(2)
