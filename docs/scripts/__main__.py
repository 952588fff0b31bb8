"""Writes the pages and pictures that scripts make; with --check, names those that differ, and wrong figures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from docs.scripts import reference, results, versions

DOCS = Path(__file__).parents[1]
PAGES: dict[str, Callable[[], str]] = {
    "results.md": results.page,
    "reference/api.md": reference.api_page,
    "reference/command-line.md": reference.commands_page,
    "reference/configuration.md": reference.configuration_page,
    **{f"explanation/versions-{name}.svg": partial(versions.picture, name) for name in versions.PICTURES},
}


def problems() -> Iterator[str]:
    """The files that are not what their script makes now, and the figures that are not those of their result file."""
    for name, make in PAGES.items():
        path = DOCS / name
        if not path.is_file() or path.read_text(encoding="utf-8") != make():
            yield f"docs/{name} is not what its script makes: run `python -m docs.scripts`"
    yield from results.wrong_figures()


def main() -> int:
    if "--check" not in sys.argv[1:]:
        for name, make in PAGES.items():
            (DOCS / name).write_text(make(), encoding="utf-8")
    found = list(problems())
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
