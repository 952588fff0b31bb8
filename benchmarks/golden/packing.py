"""Packing simulated as `benchmarks/packing.py` does it, in small, to the last digit."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.golden import digests
from benchmarks.golden.adapter import call, first, tree
from benchmarks.golden.runner import Case


def script() -> Any:
    """The benchmark of the tree that is measured, which knows its words."""
    folder = str(tree() / "benchmarks")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import packing

    return packing


def simulated(way: str) -> dict[str, Any]:
    """160 trials on 16 devices: when each starts and ends, and where."""
    own = script()
    all_, floor = own.trials(160), own.devices(16)
    given, packer, more = {
        "memory": lambda: (known(own, all_, timed=False), own.Packer(floor), {}),
        "measured": lambda: (
            known(own, all_, timed=True),
            call(own.Packer, floor, throughput=throughput(own)),
            {"measure": True},
        ),
        "window": lambda: (known(own, all_, timed=True), own.Packer(floor), {"window": 32}),
        "one": lambda: (all_, own.Static(floor, 1), {}),
        "1/4": lambda: (all_, own.Static(floor, 4), {"loss": 0.02}),
    }[way]()
    done = own.simulate(given, packer, **more)
    return {
        "makespan": float(done.makespan).hex(),
        "mean memory": float(done.mean_memory).hex(),
        "most": done.most,
        "starts": digests.sha({name: value.hex() for name, value in done.starts.items()}),
        "ends": digests.sha({name: value.hex() for name, value in done.ends.items()}),
        "places": digests.sha(done.places),
        "bound": float(own.lower_bound(all_, floor)).hex(),
    }


def known(own: Any, all_: Any, timed: bool) -> Any:
    """The trials with their seconds or without, and without the shares of a device's time that the old tree knows."""
    if hasattr(own, "known"):
        return own.known(all_, timed, False)
    return all_ if timed else own.untimed(all_)


def throughput(own: Any) -> Any:
    made = first(
        "weft.tune.packing.pool:ThroughputModel",
        "weft.tune.packing.throughput:ThroughputModel",
        "weft.tune.packing:ThroughputModel",
        "weft.tune.sharing:Sharing",
    )
    try:
        return made(ramp=2)
    except TypeError:  # how soon a rate is believed is settled by then
        return made()


def communication() -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()):
        found: dict[str, Any] = script().communication(40)
    return found


def cases() -> Iterator[Case]:
    for way in ("memory", "measured", "window", "one", "1/4"):
        yield f"simulate/{way}", lambda _, way=way: simulated(way)
    yield "communication", lambda _: communication()
