"""reference/command-line.md: what every verb of `weft` says of itself."""

from __future__ import annotations

import inspect
from typing import Any

import typer.main

from weft.cli.app import app

OPENING = """# The command line

Made by `python -m docs.scripts` from the program itself: `weft VERB --help` says the same. A verb takes a
`config.toml`, or the directory of a run, which has its own. `--a.b=c` (or `--a.b c`) sets any key of [the
configuration](configuration.md), `--json` prints JSON. A mistake ends with one line and exit code 2, Ctrl-C with a
checkpoint and exit code 130.

| verb | what it does |
|---|---|
"""


def page() -> str:
    group: Any = typer.main.get_command(app)
    verbs: dict[str, Any] = group.commands
    table = "".join(f"| [`weft {name}`](#weft-{name}) | {_sentence(verb)} |\n" for name, verb in verbs.items())
    return OPENING + table + "".join(section(name, verb) for name, verb in verbs.items())


def section(name: str, verb: Any) -> str:
    """One verb: how it is called, and a table of what it takes."""
    arguments = [one for one in verb.params if one.param_type_name == "argument"]
    options = [one for one in verb.params if one.param_type_name == "option" and "--help" not in one.opts]
    words = " ".join([f"weft {name}", *(_shown(one) for one in arguments), *(["[OPTIONS]"] if options else [])])
    more = " [--a.b=c ...]" if verb.context_settings.get("ignore_unknown_options") else ""
    lines = ["", f"## weft {name}", "", inspect.cleandoc(verb.help or ""), "", "```text", words + more, "```", ""]
    lines += ["| | | if not given |", "|---|---|---|"] if arguments or options else []
    lines += [_row(_shown(one), one) for one in arguments]
    lines += [_row(", ".join([*one.opts, *one.secondary_opts]), one) for one in options]
    return "\n".join(lines) + "\n"


def _row(name: str, parameter: Any) -> str:
    value = parameter.default() if callable(parameter.default) else parameter.default
    given = "" if value in (None, False, (), [], "") else f"`{value}`"
    told = " ".join((parameter.help or "").split()).replace("|", "\\|")
    return f"| `{name.replace('|', chr(92) + '|')}` | {told} | {'required' if parameter.required else given} |"


def _shown(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def _sentence(verb: Any) -> str:
    return " ".join(inspect.cleandoc(verb.help or "").split("\n\n")[0].split())
