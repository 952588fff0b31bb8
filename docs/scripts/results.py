"""results.md: what was measured, from benchmarks/results: headline tables, aims, commands and machines."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from docs.scripts import tables
from docs.scripts.sections import SECTIONS, Section

OPENING = """# What was measured

Made by `python -m docs.scripts` from the files in [`benchmarks/results`](../benchmarks/results). Each section names the
file, the command that made it and the machine that it ran on, and says what was aimed at and what was missed. The
tables have the headline rows; the files have all.
"""


def page(root: Path) -> str:
    """The page; raises ValueError where a file is gone."""
    files = {file.stem: file for file in sorted((root / "benchmarks" / "results").glob("*.json"))}
    gone = set(SECTIONS) - set(files)
    if gone:
        raise ValueError(f"docs/scripts/sections.py names results that are gone: {', '.join(sorted(gone))}")
    new = {name: Section(name, tables.plain) for name in files if name not in SECTIONS}
    parts = [OPENING]
    for name, section in (SECTIONS | new).items():
        parts.append(_section(root, name, section, json.loads(files[name].read_text(encoding="utf-8"))))
    return "".join(parts)


def _section(root: Path, name: str, section: Section, found: dict[str, Any]) -> str:
    lines = ["", f"## {section.title}", ""]
    purpose = _purpose(root, str(found["command"]))
    lines += [purpose, ""] if purpose else []
    lines += [" ".join(section.text.split()), ""] if section.text else []
    for heading, *rows in section.tables(found, section.aims):
        lines += [f"| {' | '.join(heading)} |", f"|{'---|' * len(heading)}"]
        lines += [f"| {' | '.join(row)} |" for row in rows] + [""]
    lines += [f"[`{name}.json`](../benchmarks/results/{name}.json): `{found['command']}`. {_machine(found)}", ""]
    return "\n".join(lines)


def _purpose(root: Path, command: str) -> str:
    """The first sentence of the script that a command names."""
    script = re.search(r"(\w+\.py)", command)
    path = root / "benchmarks" / script[1] if script else None
    if path is None or not path.is_file():
        return ""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def _machine(found: dict[str, Any]) -> str:
    machine = found["machine"]
    measured = found.get("measured", {}).get("machine", {}).get("gpu")
    parts = [
        f"{machine['gpu']} with {machine['cores']} cores"
        if machine["gpu"]
        else f"{machine['cpu']}, {machine['cores']} cores"
    ]
    parts += [f"{machine['threads']} thread{'s' * (machine['threads'] > 1)}", f"torch {machine['torch']}"]
    text = "Machine: " + ", ".join([*parts, f"Python {machine['python']}"])
    return text + (f"; measured on {measured}." if measured else ".")
