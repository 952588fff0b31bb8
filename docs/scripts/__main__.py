"""Writes every page and picture that is made by a script; with --check, says which are not as they would be made."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from docs.scripts import api, commands, configuration, law, results

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent

Maker = Callable[[], str]
PAGES: dict[str, Maker] = {
    "results.md": lambda: results.page(ROOT),
    "reference/api.md": api.page,
    "reference/command-line.md": commands.page,
    "reference/configuration.md": lambda: configuration.page(ROOT / "src" / "weft"),
    **{f"explanation/law-{name}.svg": lambda name=name: law.picture(name) for name in law.LAWS},  # type: ignore[misc]
}


def stale() -> Iterator[str]:
    """The files that are not what their script makes now."""
    for name, make in PAGES.items():
        path = DOCS / name
        if not path.is_file() or path.read_text(encoding="utf-8") != make():
            yield name


def main() -> int:
    if "--check" in sys.argv[1:]:
        found = list(stale())
        for name in found:
            print(f"docs/{name} is not what its script makes: run `python -m docs.scripts`", file=sys.stderr)
        return 1 if found else 0
    for name, make in PAGES.items():
        path = DOCS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(make(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
