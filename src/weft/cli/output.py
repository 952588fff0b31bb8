"""What verbs print on: a console for results, one for progress and warnings, and JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console

console = Console(markup=False, emoji=False, highlight=False)
errors = Console(stderr=True, markup=False, emoji=False, highlight=False)


def show(values: Mapping[str, Any], as_json: bool, title: str) -> None:
    """Names and values: as a table for a person, or as JSON."""
    if as_json:
        print_json(values)
        return
    from weft.tables import facts

    facts(console, values, title)


def print_json(value: Any) -> None:
    """One document on one line; numbers that JSON lacks are strings."""
    from weft.runs.files import plain

    print(json.dumps(plain(value), allow_nan=False))
