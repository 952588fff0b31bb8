"""The house itself: folders and modules of a size that a person can read, one meaning for a class name, one order of
layers."""

from __future__ import annotations

import ast
import re
import statistics
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/weft"
MODULES = sorted(SOURCE.rglob("*.py"))


def test_a_folder_holds_at_most_15_modules() -> None:
    counts = Counter(str(path.parent.relative_to(SOURCE)) for path in MODULES)
    assert {folder: count for folder, count in counts.items() if count > 15} == {}


def test_no_module_has_more_than_400_lines_and_the_median_is_between_120_and_250() -> None:
    lines = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in MODULES}
    assert {module: count for module, count in lines.items() if count > 400} == {}
    assert 120 <= statistics.median(lines.values()) <= 250


def test_a_class_name_stands_for_one_thing() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(path.relative_to(SOURCE)))
    twice = {name: modules for name, modules in homes.items() if len(modules) > 1}
    packages = {name: [module.partition("/")[0] for module in modules] for name, modules in twice.items()}
    assert {name: twice[name] for name, found in packages.items() if len(set(found)) < len(found)} == {}
    assert len(twice) < 10, twice


def layers() -> list[set[str]]:
    """The contract of import-linter, bottom first; names on one line do not import each other."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    return [set(line.split(" | ")) for line in reversed(contract["layers"])]


def test_every_folder_is_in_the_table_of_contributing_in_the_order_of_the_layers() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text[text.index("| folder | what it is |") :].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    rows = [re.findall(r"`(\w+)(?:/|\.py)`", cell) for cell in cells]
    named = [name for row in rows for name in row]
    there = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()} | {"errors", "config"}
    assert Counter(named) == Counter(there)

    order = layers()
    assert set().union(*order) == there | {"__main__"}
    place = {name: at for at, line in enumerate(order) for name in line}
    last = [max(place[name] for name in row) for row in rows]
    assert last == sorted(last)
