"""The scheduler, stepped by the simulator: when each op of each stage runs, for every consistency."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.golden import digests
from benchmarks.golden.adapter import first
from benchmarks.golden.runner import Case

CONSISTENCIES = ("exact", "delayed(3)", "lagged(3)", "bounded(4, 3)", "bounded(8, 4)")
RULES: dict[str, tuple[int, str]] = {"window 8": (8, "backward"), "window 2": (2, "backward"), "gpipe": (4, "forward")}


def simulated(text: str, candidates: int, microbatches: int, window: int, prefer: str) -> dict[str, Any]:
    """Four blocks cut into four stages; block b of step n uses candidate (n + b) modulo their number."""
    simulate = first("weft.pipeline.simulator:simulate")
    workload = first("weft.pipeline.workload:Workload")
    promise = first(
        "weft.engine.consistency:parse_consistency", "weft.engine.consistency:parse", "weft.pipeline.consistency:parse"
    )(text)
    rule = first("weft.pipeline.scheduler:SchedulePolicy", "weft.pipeline.scheduler:Rule")(window, prefer)

    def picks(step: int) -> list[tuple[int, tuple[int, int]]]:
        return [(block, (block, (step + block) % candidates)) for block in range(4)]

    done = simulate(workload(4, microbatches, 30, picks, lambda layer: promise), (1, 2, 3), rule)
    return {"time": done.time, "spans": digests.sha([[str(one.op), one.start, one.end] for one in done.spans])}


def cases() -> Iterator[Case]:
    for text in CONSISTENCIES:
        for candidates in (1, 6):
            for microbatches in (1, 4):
                for name, (window, prefer) in RULES.items():
                    yield (
                        f"simulate/{text}/{candidates} candidates/{microbatches} micro-batches/{name}",
                        lambda _, given=(text, candidates, microbatches, window, prefer): simulated(*given),
                    )
