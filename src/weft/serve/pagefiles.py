"""The files that a browser is given: all that lie in `page`, by name."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parent / "page"


def page_files() -> dict[str, Path]:
    """By the name that a browser asks for; a name that is not in it is not there."""
    return {path.relative_to(PAGE).as_posix(): path for path in sorted(PAGE.rglob("*")) if path.is_file()}
