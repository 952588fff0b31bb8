"""What verbs print on: a console for results, one for progress and warnings, and JSON for programs."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
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


@contextmanager
def results_alone() -> Iterator[None]:
    """Within the block, what anybody in this process prints goes to standard error, libraries below Python too, since
    standard output is for results: Ray prints there when a worker dies, whatever it was told."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        for stream in (sys.stdout, sys.__stdout__):
            if stream is not None:
                stream.flush()
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
