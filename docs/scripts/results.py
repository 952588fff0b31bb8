"""results.md and the figures that other pages quote: plain tables from benchmarks/results, as results.toml asks for.

A table of results.toml takes `rows` of a file (a key path, or several), those `where` keys have one of some values, and
has `columns` of a heading and a value each. A value is a key path with a format behind it, the ratio of two (`a / b`),
or a constant (`= 0.70`). With `group`, a value is `count`, or `median:`, `last:` or `sum:` of a path. `pivot` makes a
column of each value of some keys, and `figures` lists single values with their aims.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = Path(__file__).with_name("figures.toml")
Row = Mapping[str, Any]
Table = list[list[str]]


def page() -> str:
    """The page; raises ValueError if a result file has no section, or a section no file."""
    asked = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    files, sections = {file.stem for file in RESULTS.glob("*.json")}, {one["file"] for one in asked["section"]}
    if files != sections:
        names = ", ".join(sorted(files ^ sections))
        raise ValueError(f"{names}: give each file of benchmarks/results one [[section]] in docs/scripts/results.toml")
    return asked["opening"] + "".join(_section(one) for one in asked["section"])


def _section(asked: Row) -> str:
    name, found = asked["file"], load(asked["file"])
    lines = ["", f"## {asked['title']}", "", *([" ".join(asked["text"].split()), ""] if "text" in asked else [])]
    for heading, *rows in (table(found, one) for one in asked["table"]):
        lines += [
            f"| {' | '.join(heading)} |",
            f"|{'---|' * len(heading)}",
            *(f"| {' | '.join(r)} |" for r in rows),
            "",
        ]
    lines += [f"[`{name}.json`](../benchmarks/results/{name}.json): `{found['command']}`. {_machine(found)}", ""]
    return "\n".join(lines)


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def table(found: Row, asked: Row) -> Table:
    """One table, its heading first."""
    if "figures" in asked:
        return [
            ["what", "measured", "aim"],
            *([words, shown(found, key), *aim] for words, key, *aim in asked["figures"]),
        ]
    rows = [row for row in _rows(found, asked.get("rows", "rows")) if _wanted(row, asked.get("where", {}))]
    if "pivot" in asked:
        return _pivot(rows, asked["pivot"])
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for n, row in enumerate(rows):
        groups.setdefault(tuple(row[key] for key in asked["group"]) if "group" in asked else (n,), []).append(row)
    body = [[shown(own[0], key, own) for _, key in asked["columns"]] for own in groups.values()]
    for (heading, key), *cells in zip(asked["columns"], *body, strict=True):
        if not any(cells):
            raise ValueError(f"results.toml: no row has '{key}', for the column '{heading}'")
    return [[heading for heading, _ in asked["columns"]], *body]


def _rows(found: Row, asked: str | Sequence[str]) -> list[Row]:
    if not isinstance(asked, str):
        return [{"name": key, **at(found, key)} for key in asked]
    rows = at(found, asked)
    if isinstance(rows, Mapping):
        return [{"name": key, **(row if isinstance(row, Mapping) else {"value": row})} for key, row in rows.items()]
    return list(rows)


def _wanted(row: Row, where: Row) -> bool:
    return all(row.get(key) in (values if isinstance(values, list) else [values]) for key, values in where.items())


def _pivot(rows: list[Row], asked: Row) -> Table:
    """A row of the table for each value of `of`, with a column for each text that `heading` makes of the rows."""
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        own = cells.setdefault(tuple(shown(row, key) for key in asked["of"]), {})
        own[asked["heading"].format(**row)] = shown(row, asked["value"])
    headings = list(dict.fromkeys(heading for own in cells.values() for heading in own))
    return [[*asked["of"], *headings], *([*key, *(own.get(h, "") for h in headings)] for key, own in cells.items())]


def at(found: Any, path: str) -> Any:
    """The value at a key path; `rows[method=flush,k=2]` is the one row with these values.

    >>> at({"rows": [{"k": 1, "ms": 3.0}, {"k": 2, "ms": 5.0}]}, "rows[k=2].ms")
    5.0
    """
    for key, condition in re.findall(r"([^.\[]+)(?:\[([^\]]*)\])?\.?", path):
        found = found[key]
        if condition:
            pairs = [pair.split("=", 1) for pair in condition.split(",")]
            (found,) = [row for row in found if all(str(row[name]) == value for name, value in pairs)]
    return found


def shown(row: Row, asked: str, group: Sequence[Row] = ()) -> str:
    """The text of a cell."""
    if asked.startswith("= "):
        return asked[2:]
    if asked == "count":
        return str(len(group))
    path, form = re.fullmatch(r"(.*?)(?: (\S*[f%ed,]))?", asked).groups()  # type: ignore[union-attr]
    fold, _, path = path.rpartition(":")
    values = [_value(one, path) for one in (group or [row])]
    numbers = [value for value in values if value not in (None, "nan", "")]
    if not numbers:
        return ""
    value = {"median": median, "sum": sum, "last": lambda all_: all_[-1], "": lambda all_: all_[0]}[fold](numbers)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format(value, form or ("," if isinstance(value, int) else ""))


def _value(row: Row, path: str) -> Any:
    above, _, below = path.partition(" / ")
    try:
        return at(row, above) / at(row, below) if below else at(row, above)
    except KeyError:  # an empty cell; a column of them is refused
        return None


def _machine(found: Row) -> str:
    machine = found["machine"]
    where = f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores"
    measured = found.get("measured", {}).get("machine", {}).get("gpu")
    return f"Machine: {where}, torch {machine['torch']}" + (f"; measured on {measured}." if measured else ".")


def wrong_figures() -> Iterator[str]:
    """The figures of figures.toml that their page does not show as their result file has them."""
    asked = tomllib.loads(FIGURES.read_text(encoding="utf-8"))
    for name, figures in asked.items():
        text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
        for words, file, *keys in figures:
            found = load(file)
            expected = words.format(*(shown(found, key) for key in keys))
            if expected not in text:
                yield f"{name} does not have '{expected}' of {file}.json ({', '.join(keys)})"
