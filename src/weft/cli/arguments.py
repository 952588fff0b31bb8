"""What verbs are told: arguments that several of them take, and how they are read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.errors import ConfigError, nearest

if TYPE_CHECKING:
    from weft.config import Config

Target = Annotated[str, typer.Argument(help="A config.toml, or the directory of a run.", metavar="CONFIG|RUN")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def read_target(target: str, context: typer.Context, more: Sequence[str] = ()) -> tuple[Config, Path]:
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


def stage_counts(text: str) -> list[int]:
    """Numbers of stages, from ``1,2,4``."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise ConfigError(f"--stages takes whole numbers from 1 on, such as 1,2,4, not '{text}'")
    return counts
