"""What verbs print: tables for a person, JSON for programs, and the consoles for both."""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.utils.units import format_bytes


def facts(console: Console, values: Mapping[str, Any], title: str) -> None:
    """Names and values, one a row."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in values.items():
        shown = format_bytes(value) if name.startswith("memory") and isinstance(value, int) else value
        table.add_row(name.replace("_", " "), f"{shown:,}" if isinstance(shown, int) else str(shown))
    console.print(table)


def mixture(console: Console, rows: Iterable[Mapping[str, Any]]) -> None:
    """The options that a gradient search chose, with their probabilities."""
    table = Table("choice", "found", "bits", "probabilities", title="found", title_justify="left")
    table.columns[2].justify = "right"
    for row in rows:
        shares = ", ".join(f"{o} {p:.0%}" for o, p in zip(row["options"], row["probabilities"], strict=True))
        table.add_row(row["choice"], "" if row["found"] is None else str(row["found"]), f"{row['bits']:.2f}", shares)
    console.print(table)


def simulated(console: Console, rows: list[dict[str, Any]], first: str) -> None:
    """Numbers of stages, or changes, with what the simulator expects of each."""
    table = Table(first, "time a step", "speed-up", "bubble", "steady bubble", "most in flight", "cut before block")
    for row in rows:
        if "note" in row:
            table.add_row(str(row[first]), row["note"])
            continue
        shown = [f"{row['time_per_step']:.4g}", f"{row['speedup']:.2f}", f"{row['bubble']:.3f}"]
        cut = " ".join(str(block) for block in row.get("cut", ()))
        table.add_row(str(row[first]), *shown, f"{row['steady_bubble']:.3f}", str(row["peak_in_flight"]), cut)
    console.print(table)


def traced_stages(console: Console, found: dict[str, Any]) -> None:
    """How busy every stage was, and the worst waits."""
    console.print(
        f"{found['time']:.4g} s; bubble {found['bubble']:.3f}, steady bubble {found['steady_bubble']:.3f}",
        soft_wrap=True,
    )
    if simulated := found["simulated"]:
        error = "" if simulated["error"] is None else f" ({100 * simulated['error']:+.1f} %)"
        real = f" for the first {simulated['steps']:,} steps, which took {simulated['real_time']:.4g} s{error}"
        steady = f"bubble {simulated['bubble']:.3f}, steady bubble {simulated['steady_bubble']:.3f}"
        console.print(f"simulated: {simulated['time']:.4g} s{real}; {steady}", soft_wrap=True)
    table = Table("stage", "busy", "ops", "ops/s", "most in flight", "mean wait", "worst wait")
    for row in found["stages"]:
        waits = [f"{1000 * row[name]:.4g} ms" for name in ("mean_wait", "worst_wait")]
        counts = [f"{row['ops']:,}", f"{row['ops_per_second']:.4g}", str(row["peak_in_flight"])]
        table.add_row(str(row["stage"]), f"{100 * row['busy_share']:.1f} %", *counts, *waits)
    console.print(table)
    if not found["waits"]:
        return
    table = Table("op", "waited", "after", "for", "blocked meanwhile", title="worst waits", title_justify="left")
    for wait in found["waits"]:
        words = {"op": wait["source"], "message": f"the message of {wait['source']}"}
        cause = words.get(wait["cause"], f"its {wait['cause']}")
        table.add_row(
            wait["op"], f"{1000 * wait['seconds']:.4g} ms", f"{wait['start']:.4g} s", cause, wait["blocked"] or ""
        )
    console.print(table)


def verified(console: Console, found: dict[str, Any]) -> None:
    """The fingerprint on every number of stages, and where and why they differ."""
    table = Table("stages", "fingerprint", "equal", "time")
    for row in found["rows"]:
        stages = f"{row['stages']}{', stopped and resumed' if row['resumed'] else ''}"
        shown = row["fingerprint"][:16] if row["fingerprint"] else " ".join(str(row["error"]).split())
        table.add_row(stages, shown, "yes" if row["equal"] else "NO", f"{row['seconds']:.1f} s")
    console.print(table)
    if found["equal"]:
        console.print(f"{found['steps']} steps, equal to the last bit", soft_wrap=True)
        return
    where, why = found["difference"], found["cause"]
    layer = "" if where["layer"] is None else f", layer '{where['layer']}'"
    console.print(f"first difference ({where['run']}): step {where['step']}{layer}: {where['what']}", soft_wrap=True)
    console.print(f"likely cause: {why['kind']}: {why['why']}", soft_wrap=True)
    console.print(f"remedy: {why['remedy']}", soft_wrap=True)


# All but tab and line feed, and the marks that turn the direction of text.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text with its control characters spelled out. Names and reasons come from files, and a terminal obeys such
    characters: they move its cursor, change its title, and hide what follows."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class _PrintableConsole(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


console = _PrintableConsole(markup=False, emoji=False, highlight=False)
errors = _PrintableConsole(stderr=True, markup=False, emoji=False, highlight=False)


def show(values: Mapping[str, Any], as_json: bool, title: str) -> None:
    """Names and values: as a table for a person, or as JSON."""
    if as_json:
        print_json(values)
    else:
        facts(console, values, title)


def print_json(value: Any) -> None:
    """One document on one line; numbers that JSON lacks are strings."""
    from weft.utils.files import to_json

    print(json.dumps(to_json(value), allow_nan=False))


@contextmanager
def results_alone() -> Iterator[None]:
    """Within the block, all that this process prints goes to standard error, C libraries included: standard output is
    for results, and Ray prints there when a worker dies."""
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
