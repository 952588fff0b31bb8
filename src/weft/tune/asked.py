"""What ``weft.tune`` is asked for, checked before anything is made: a mistake is told in one line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from weft.errors import TuneError
from weft.space import Space
from weft.tune.recipe import Recipe

_EXECUTOR = ("devices", "start", "answer", "stop", "poll", "close")


def check_space_given(space: object) -> None:
    if not isinstance(space, Space):
        made = "make one by weft.Space(), and give it choices: space.real('lr', 1e-4, 1e-1, log=True)"
        raise TuneError(f"a space is a weft.Space, not a {type(space).__name__}: {made}")


def check_place(name: object, runs: object, storage: object) -> None:
    """Where the study is to be."""
    if name is not None and (not isinstance(name, str) or not 0 < len(name) <= 200):
        raise TuneError(f"a study needs a name of 1 to 200 characters, not {name!r}")
    if not isinstance(runs, str | Path):
        raise TuneError(f"runs is the folder that studies are kept in, as text or as a Path, not {runs!r}")
    if storage is not None and not isinstance(storage, str):
        raise TuneError(f"storage is the address of a database, such as 'sqlite:///study.db', not {storage!r}")


def check_numbers(**asked: object) -> None:
    """Of whole numbers by their names; ``workers`` may be None."""
    for name, value in asked.items():
        least = 0 if name in ("window", "retries") else 1
        if value is None and name == "workers":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise TuneError(f"{name} is a whole number from {least} on, not {value!r}")


def check_seconds(seconds: object) -> None:
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise TuneError(f"the time limit of a trial is a number above 0 seconds, not {seconds!r}")


def check_executor(executor: object) -> None:
    if not isinstance(executor, str) and not all(hasattr(executor, name) for name in _EXECUTOR):
        raise TuneError(f"an executor is 'local', 'ray', or what weft.tune.Executor describes, not {executor!r}")


def names_of(what: str, given: object) -> tuple[str, ...]:
    """One name or several, of objectives."""
    found = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else None
    if found is None or not all(isinstance(one, str) for one in found):
        raise TuneError(f"{what} takes the name of an objective, or several, not {given!r}")
    return found


def enqueued(given: object) -> list[Mapping[str, Any]]:
    """Trials by hand."""
    found = None if isinstance(given, str | Mapping) or not isinstance(given, Iterable) else list(given)
    if found is None or not all(isinstance(one, Mapping) for one in found):
        raise TuneError(f"enqueue is a list of trials, each a mapping of values such as {{'lr': 0.1}}, not {given!r}")
    return found


def check_recipe(recipe: Recipe, space: Space) -> None:
    """TuneError for what would fail every trial: all of the recipe but what the space chooses."""
    from weft.tune.setting import FIELDS, setting

    own: dict[str, Any] = {one.name: one.default for one in fields(Recipe) if one.name in FIELDS and one.name in space}
    if "optimizer" in space:
        own["options"] = {}  # which are of those that may be chosen
    setting(replace(recipe, **own), {})
