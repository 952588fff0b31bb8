"""Two files of golden values, and what one file promises by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SHOWN = 60
MISSING = "(missing)"


def compare(old: Path, new: Path) -> int:
    """Prints what differs, a value a line; 1 if anything does. Areas that only one file has are named, no more."""
    before, after = json.loads(old.read_text()), json.loads(new.read_text())
    for name, value in before["made"].items():
        if after["made"].get(name) != value:
            print(f"not comparable: {name} is {value} in {old} and {after['made'].get(name)} in {new}")
    apart = sorted({*before["areas"]} ^ {*after["areas"]})
    if apart:
        print(f"in one of the files only, not compared: {', '.join(apart)}")
    equal, wrong = 0, []
    for area in sorted({*before["areas"]} & {*after["areas"]}):
        lines = list(differences(before["areas"][area], after["areas"][area], area))
        equal += sum(1 for _ in leaves(before["areas"][area])) - len(lines)
        wrong += lines
    print("\n".join(wrong[:SHOWN]), end="\n" if wrong else "")
    if len(wrong) > SHOWN:
        print(f"... and {len(wrong) - SHOWN} more")
    print(f"{len(wrong)} differ, {max(equal, 0)} are equal" if wrong else f"all {equal} values are equal")
    return int(bool(wrong) or before["made"] != after["made"])


def differences(old: Any, new: Any, where: str) -> Iterator[str]:
    """A line for each value that differs, by its place."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted({*old, *new}):
            if name in old and name in new:
                yield from differences(old[name], new[name], f"{where}: {name}")
            else:
                yield f"{where}: {name}: {_short(old.get(name, MISSING))} -> {_short(new.get(name, MISSING))}"
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{where}[{number}]")
    elif old != new and not (old != old and new != new):
        yield f"{where}: {_short(old)} -> {_short(new)}"


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping) and value:
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, list) and value:
        for item in value:
            yield from leaves(item)
    else:
        yield value


def promises(areas: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Where a run does not have one fingerprint however it is executed: a case ``a/way`` must have that of ``a``."""
    broken = []
    for area in ("core", "stages"):
        for name, values in areas.get(area, {}).items():
            whole = areas.get("core", {}).get(name.rpartition("/")[0], {}).get("fingerprint")
            if whole and values.get("fingerprint") != whole:
                broken.append(f"broken: {name} has not the fingerprint of the run on one device: {_short(values)}")
    for name, values in areas.get("frozen", {}).items():
        if values.get("resumed") != values.get("whole"):
            broken.append(f"broken: {name} is not finished to the bits of a whole run: {_short(values)}")
    return broken


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 160 else f"{text[:157]}..."
