"""reference/configuration.md: every key of a config and of a study, from the typed values that read them."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any

import msgspec

from docs.scripts.keys import KEYS
from weft import config
from weft.cli import tune

OPENING = """# The configuration

Made by `python -m docs.scripts` from `src/weft/config.py` and `src/weft/cli/tune.py`. A config is a TOML file;
`--a.b=c` on the command line changes any key of it. Unknown keys and wrong types are refused, with the nearest key
that there is.
"""
RUN = [
    ("", config.Config),
    ("[supernet]", config.Source),
    ("[data]", config.DataSource),
    ("[train]", config.Train),
    ("[residency]", config.Residency),
    ("[search]", config.Search),
    ("[export]", config.Export),
]
STUDY = [
    ("", tune.StudyConfig),
    ("[study]", tune.Study),
    ("[recipe]", tune.Training),
    ("a choice of [space]", tune.Range),
]


def page(source: Path) -> str:
    notes = {**_notes(source / "config.py"), **_notes(source / "cli" / "tune.py")}
    parts = [OPENING, "\n## A run\n\nFor `weft train`, `search`, `export`, `simulate` and `verify`.\n"]
    parts += [table(name, kind, notes) for name, kind in RUN]
    parts += ["\n## A study\n\nFor `weft tune`.\n"]
    parts += [table(name, kind, notes) for name, kind in STUDY]
    return "".join(parts)


def table(name: str, kind: Any, notes: dict[tuple[str, str], str]) -> str:
    """One table of the file: what it is for, and its keys."""
    head = f"\n### {name}\n" if name else ""
    lines = [head, _linked(inspect.cleandoc(kind.__doc__ or "").replace("``", "`")), ""]
    lines += ["| key | kind | if not given | |", "|---|---|---|---|"]
    for field in msgspec.structs.fields(kind):
        note = notes.get((kind.__name__, field.name)) or KEYS[kind.__name__][field.name]
        lines.append(f"| `{field.name}` | {_kind(field.type)} | {_default(field)} | {note} |")
    return "\n".join(lines) + "\n"


def _linked(text: str) -> str:
    """The text with public names as links to their docstrings."""
    return re.sub(r"`weft\.(train|search|tune|Residency)`", r"[`weft.\1`](api.md#weft\1)", text).replace(
        "#weftResidency", "#weftresidency"
    )


def _default(field: Any) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
        return "" if isinstance(value, msgspec.Struct) or not value else _toml(value)
    if field.default is msgspec.NODEFAULT:
        return "required"
    if field.default is None or isinstance(field.default, msgspec.Struct):
        return ""
    return _toml(field.default)


def _toml(value: Any) -> str:
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
        words = [_kind(one) for one in arguments if one is not type(None)]
        return " or ".join(dict.fromkeys(words))
    return {str: "text", int: "whole number", float: "number", bool: "true or false"}.get(kind, "any")


def _notes(path: Path) -> dict[tuple[str, str], str]:
    """The texts that stand under the fields of classes, by class and field."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            for field, note in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and _is_text(note):
                    text = " ".join(str(note.value.value).split())  # type: ignore[attr-defined]
                    found[node.name, field.target.id] = text.replace("``", "`").replace("|", "\\|")
    return found


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
