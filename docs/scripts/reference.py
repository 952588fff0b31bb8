"""The reference pages: Python names, the command line and the configuration, from docstrings and types."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import typer.main

import weft
from weft import config
from weft.cli import tune
from weft.cli.app import app
from weft.offload.config import OffloadConfig
from weft.trainer.config import Execution, RunConfig, TrainConfig, Validation
from weft.tune.recipe import Recipe

# api.md

API = """# Python names

`python -m docs.scripts` makes this page from the docstrings of the names in `weft.__all__`. The site that `make docs`
builds shows each docstring in full, with its members. `weft.data`, `weft.elastic`, `weft.zoo` and `weft.plan` are
packages with more names: `help(weft.elastic)` lists them.
"""
SECTIONS = {
    "Spaces and streams": ("Space", "Subnet", "Stream", "make_stream"),
    "Supernets": ("Chain", "Shared", "Choice", "Optional", "Elastic", "initialise", "extract", "from_transformers"),
    "Data": ("Data", "Tensors", "Loader", "ShiftFlip"),
    "Training": (
        *("train", "retrain", "load_run", "TrainedRun", "TrainConfig", "Execution", "RunConfig"),
        *("Optimizer", "Validation", "OffloadConfig", "TensorBoard", "Run"),
    ),
    "Losses and metrics": ("cross_entropy", "mean_squared_error", "Distillation", "accuracy"),
    "Consistency": ("Exact", "Delayed", "Lagged", "Bounded"),
    "Search": ("search", "search_gradient", "GradientSearchConfig", "Front"),
    "Studies and estimates": ("tune", "estimate", "Estimate"),
    "Errors": ("WeftError",),
}


def api_page() -> str:
    """Every public name once; raises ValueError if one is missing or gone."""
    listed = [name for names in SECTIONS.values() for name in names]
    if sorted(listed) != sorted(weft.__all__):
        raise ValueError(f"SECTIONS and weft.__all__ differ in {', '.join(sorted(set(listed) ^ set(weft.__all__)))}")
    parts = [API]
    for heading, names in SECTIONS.items():
        parts.append(f"\n## {heading}\n")
        for name in names:
            thing = getattr(weft, name)
            if inspect.ismodule(thing):  # weft.search and weft.tune are packages that can be called
                thing = getattr(importlib.import_module(f"weft.{name}.api"), name)
            kind = "class" if inspect.isclass(thing) else "function"
            home = f"{thing.__module__}.{thing.__qualname__}"
            parts.append(f"\n### `weft.{name}`\n\n{kind} `{home}`: {_first_sentence(thing)}\n")
    return "".join(parts)


def _first_sentence(thing: Any) -> str:
    text = " ".join(inspect.cleandoc(thing.__doc__ or "").split("\n\n")[0].split()).replace("``", "`")
    return re.split(r"(?<=[.:;])\s+(?=[A-Z`])", text)[0]


# command-line.md

COMMANDS = """# The command line

`python -m docs.scripts` makes this page from the program itself; `weft VERB --help` prints the same. A verb takes a
`config.toml`, or the directory of a run, which holds its own. `--a.b=c` (or `--a.b c`) sets any key of [the
configuration](configuration.md), and `--json` prints JSON. A mistake ends with one line and exit code 2, Ctrl-C with a
checkpoint and exit code 130.

| verb | what it does |
|---|---|
"""


def commands_page() -> str:
    verbs: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    rows = [
        f"| [`weft {name}`](#weft-{name}) | {' '.join(_help(verb).split(chr(10) * 2)[0].split())} |\n"
        for name, verb in verbs.items()
    ]
    return COMMANDS + "".join(rows) + "".join(_verb(name, verb) for name, verb in verbs.items())


def _verb(name: str, verb: Any) -> str:
    """One verb: how it is called, and a table of what it takes."""
    arguments = [one for one in verb.params if one.param_type_name == "argument"]
    options = [one for one in verb.params if one.param_type_name == "option" and "--help" not in one.opts]
    words = " ".join([f"weft {name}", *(_metavar(one) for one in arguments), *(["[OPTIONS]"] if options else [])])
    settings = " [--a.b=c ...]" if verb.context_settings.get("ignore_unknown_options") else ""
    lines = ["", f"## weft {name}", "", _help(verb), "", "```text", words + settings, "```", ""]
    lines += ["| | | if not given |", "|---|---|---|"] if arguments or options else []
    lines += [_parameter(_metavar(one), one) for one in arguments]
    lines += [_parameter(", ".join([*one.opts, *one.secondary_opts]), one) for one in options]
    return "\n".join(lines) + "\n"


def _help(verb: Any) -> str:
    return inspect.cleandoc(verb.help or "")


def _parameter(name: str, parameter: Any) -> str:
    value = parameter.default() if callable(parameter.default) else parameter.default
    default = "" if value in (None, False, (), [], "") else f"`{value}`"
    name, text = (one.replace("|", "\\|") for one in (name, " ".join((parameter.help or "").split())))
    return f"| `{name}` | {text} | {'required' if parameter.required else default} |"


def _metavar(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


# configuration.md

CONFIGURATION = """# The configuration

`python -m docs.scripts` makes this page from `src/weft/config.py` and the classes that it reads. A config is a TOML
file. `--a.b=c` on the command line changes any of its keys. Unknown keys and wrong types are refused, and the error
names the nearest key. `weft train`, `search`, `export`, `simulate` and `verify` read the tables under "A run",
`weft tune` those under "A study".
"""
RUN = [
    ("## A run", config.Config, config.Config),
    ("### [supernet]", config.NamedSource, config.NamedSource),
    ("### [data]", config.DataSource, config.DataSource),
    ("### [train]", config.Train, TrainConfig),
    ("### [execution]", config.ExecutionTable, Execution),
    ("### [offload]", config.OffloadTable, OffloadConfig),
    ("### [run]", config.RunTable, RunConfig),
    ("### [run.validation]", config.ValidationTable, Validation),
    ("### [search]", config.Search, config.Search),
    ("### [export]", config.Export, config.Export),
]
"""A heading, the typed table, and the class whose fields say what the keys mean."""
STUDY = [
    ("## A study", tune.StudyFile, tune.StudyFile),
    ("### [study]", tune.StudyTable, tune.StudyOptions),
    ("### [recipe]", tune.RecipeTable, Recipe),
    ("### A choice of [space]", tune.Range, tune.Range),
]


def configuration_page() -> str:
    """Every key once; raises KeyError if one is not explained."""
    return CONFIGURATION + "".join(_table(*one) for one in (*RUN, *STUDY))


def _table(heading: str, table: Any, source: type) -> str:
    text = re.sub(r"`weft\.(\w+)`", _link, inspect.cleandoc(source.__doc__ or "").replace("``", "`"))
    lines = ["", heading, "", text, "", "| key | kind | if not given | |", "|---|---|---|---|"]
    notes = dict(_notes(source))
    for field in msgspec.structs.fields(table):
        note = notes.get(field.name) or NOTES[table.__name__][field.name]
        lines.append(f"| `{field.name}` | {_kind(field.type)} | {_default(field)} | {note} |")
    return "\n".join(lines) + "\n"


def _link(name: re.Match[str]) -> str:
    return f"[`weft.{name[1]}`](api.md#weft{name[1].lower()})" if name[1] in weft.__all__ else name[0]


def _notes(source: type) -> Iterator[tuple[str, str]]:
    """The texts that stand under the fields of a class and of its bases, by field."""
    for base in source.__bases__:
        if base.__module__.startswith("weft."):
            yield from _notes(base)
    body = ast.parse(inspect.getsource(source)).body[0].body  # type: ignore[attr-defined]
    for field, note in pairwise(body):
        match field, note:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def _default(field: Any) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    elif field.default is msgspec.NODEFAULT:
        return "required"
    else:
        value = field.default
    if value is None or value == {} or value == () or isinstance(value, msgspec.Struct):
        return ""
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"


def _kind(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return "table"
    origin, arguments = getattr(kind, "__origin__", None), getattr(kind, "__args__", ())
    if origin is dict:
        return "table"
    if origin is tuple:
        return f"list of {_kind(arguments[0])}"
    if arguments:
        return " or ".join(dict.fromkeys(_kind(one) for one in arguments if one is not type(None)))
    return {str: "text", int: "whole number", float: "number", bool: "true or false"}.get(kind, "any")


NOTES = {
    "Range": {
        "low": "the least",
        "high": "the most",
        "log": "uniform in the logarithm",
        "step": "whole numbers, so far apart",
    },
}
"""What the keys of a study mean whose fields do not say so themselves."""
