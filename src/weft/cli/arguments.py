"""Arguments that several verbs take, and how they are read."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.errors import ConfigError, WeftError, nearest

if TYPE_CHECKING:
    from weft.config import Config

Target = Annotated[str, typer.Argument(help="A config.toml, or the directory of a run.", metavar="CONFIG|RUN")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def read_target(target: str, context: typer.Context, more: Sequence[str] = ()) -> tuple[Config, Path]:
    """The configuration in a file, or that a run was started from; and the folder that its code is found from."""
    from weft.config import make_config, modern, read_config

    if target.startswith("--"):
        raise ConfigError(f"'{target}' stands where the config is expected: the config comes first, then its settings")
    settings = [_from_here(setting) for setting in settings_of(context)]
    path = Path(target)
    if path.is_dir():
        from weft.runs import Run

        run = Run.open(path.resolve())
        saved = dict(run.manifest.get("config") or {})
        if not saved:
            raise ConfigError(f"run '{path}' was not started from a config: use weft.load_run in Python")
        folder, saved = Path(saved.pop("folder", ".")), modern(saved)
        saved["run"] = {**saved["run"], "folder": str(run.path.parent), "name": run.path.name}
        return make_config(saved, [*settings, *more]), folder
    if not path.exists():
        raise ConfigError(f"there is no config and no run at '{target}'")
    config = read_config(path, [*settings, *more])
    if config.run.name is None:
        config = read_config(path, [*settings, *more, f"--run.name={path.stem}"])
    return config, path.parent


def settings_of(context: typer.Context) -> list[str]:
    """The settings among the words after a verb; ConfigError for a word that is none."""
    known = [option for parameter in context.command.params for option in parameter.opts if option[:2] == "--"]
    return joined(context.args, [*known, "--help"])


def joined(words: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """Settings as ``--a.b=c``, from words where a blank may replace the sign. ``options`` are the verb's other ones.

    >>> joined(["--train.steps=5", "--data.path", "input.txt"])
    ['--train.steps=5', '--data.path=input.txt']
    """
    from weft.config import Config

    found, left = [], iter(words)
    for word in left:
        if re.match(r"--[\w.-]+=", word):
            found.append(word)
            continue
        name = word.removeprefix("--").split(".")[0].replace("-", "_")
        if not word.startswith("--") or ("." not in word and name not in Config.__struct_fields__):
            raise ConfigError(
                f"unknown option '{word}' (settings are written --a.b=c or --a.b c){nearest(word, options)}"
            )
        value = next(left, None)
        if value is None or value.startswith("--"):
            raise ConfigError(f"'{word}' has no value: settings are written --a.b=c or --a.b c")
        found.append(f"{word}={value}")
    return found


def _from_here(setting: str) -> str:
    """A path to data on the command line is relative to the current folder, also when the run is resumed elsewhere."""
    key, _, value = setting.partition("=")
    path = Path(value).expanduser()
    return f"{key}={path.resolve()}" if key == "--data.path" and value and path.exists() else setting


def stage_counts(text: str) -> list[int]:
    """Numbers of stages, from ``1,2,4``."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise ConfigError(f"--stages takes whole numbers from 1 on, such as 1,2,4, not '{text}'")
    return counts


@contextmanager
def resume_hint(path: Path, command: str) -> Iterator[None]:
    """Around a training: prints how to resume it when it is stopped, and names --resume where the run exists."""
    try:
        yield
    except KeyboardInterrupt:
        from weft.runs import Checkpoints

        steps = Checkpoints(path / "checkpoints").steps()
        what = f"a checkpoint after {steps[-1]} steps is written" if steps else "there is no checkpoint yet"
        print(f"stopped; {what}. Resume with: {command}", file=sys.stderr)
        raise
    except WeftError as problem:
        if "already holds a run" in str(problem):
            raise ConfigError(f"{problem} (--resume, or --run=NAME)") from None
        raise
