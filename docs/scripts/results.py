"""results.md: what was measured, from benchmarks/results: headline rows, command, machine, and what was missed."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from docs.scripts import tables
from docs.scripts.headlines import HEADLINES, Headline

OPENING = """# What was measured

Made by `python -m docs.scripts` from the files in [`benchmarks/results`](../benchmarks/results): no figure is typed
by hand. Each has the command that made it and the machine that it ran on. What was aimed at, and what was missed,
is said in the words of the README and of the pages of these docs, which the tests compare with the same files. A
table has the headline rows; the file has all.
"""


def page(root: Path) -> str:
    """The page; raises ValueError where a file, or words that are quoted, are gone."""
    files = {file.stem: file for file in sorted((root / "benchmarks" / "results").glob("*.json"))}
    gone = set(HEADLINES) - set(files)
    if gone:
        raise ValueError(f"docs/scripts/headlines.py names results that are gone: {', '.join(sorted(gone))}")
    new = {name: Headline(name, tables.plain) for name in files if name not in HEADLINES}
    parts = [OPENING]
    for name, headline in (HEADLINES | new).items():
        parts.append(_section(root, name, headline, json.loads(files[name].read_text(encoding="utf-8"))))
    return "".join(parts)


def _section(root: Path, name: str, headline: Headline, found: dict[str, Any]) -> str:
    lines = ["", f"## {headline.title}", ""]
    purpose = _purpose(root, str(found["command"]))
    lines += [purpose, ""] if purpose else []
    lines += [f"[`{name}.json`](../benchmarks/results/{name}.json): `{found['command']}`", "", _machine(found), ""]
    aims = {label: _cell(root, label) for label in headline.aims}
    for heading, *rows in headline.tables(found, aims):
        lines += [f"| {' | '.join(heading)} |", f"|{'---|' * len(heading)}"]
        lines += [f"| {' | '.join(row)} |" for row in rows] + [""]
    for quote in headline.says:
        lines += [f"> {_quote(root, *quote)}", ""]
    return "\n".join(lines)


def _purpose(root: Path, command: str) -> str:
    """The first sentence of the script that a command names."""
    script = re.search(r"(\w+\.py)", command)
    path = root / "benchmarks" / script[1] if script else None
    if path is None or not path.is_file():
        return ""
    told = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(told.split("\n\n")[0].split())


def _machine(found: dict[str, Any]) -> str:
    machine = found["machine"]
    measured = found.get("measured", {}).get("machine", {}).get("gpu")
    parts = [
        f"{machine['gpu']} with {machine['cores']} cores"
        if machine["gpu"]
        else f"{machine['cpu']}, {machine['cores']} cores"
    ]
    parts += [f"{machine['threads']} thread{'s' * (machine['threads'] > 1)}", f"torch {machine['torch']}"]
    told = "Machine: " + ", ".join([*parts, f"Python {machine['python']}"])
    return told + (f"; measured on {measured}." if measured else ".")


def _quote(root: Path, file: str, start: str, end: str) -> str:
    """The words of a page from one phrase to another, without its links."""
    text = " ".join((root / file).read_text(encoding="utf-8").split())
    match = re.search(re.escape(start) + r".*?" + re.escape(end), text)
    if match is None:
        raise ValueError(f"{file} no longer says '{start} ... {end}', which the page of results quotes")
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match[0]).replace("|", "\\|")


def _cell(root: Path, label: str) -> str:
    """The last cell of the row of a table in the README: what was to be reached."""
    text = (root / "README.md").read_text(encoding="utf-8")
    match = re.search(rf"^\| {re.escape(label)} \|.*\| *(\S*) *\|$", text, re.MULTILINE)
    if match is None:
        raise ValueError(f"README.md has no row '{label}', whose aim the page of results takes over")
    return match[1]
