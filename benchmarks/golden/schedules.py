"""The scheduler, stepped by the simulator: when each op of each stage runs, for every consistency."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.golden import digests
from benchmarks.golden.adapter import first, known
from benchmarks.golden.runner import Case

CONSISTENCIES = ("exact", "delayed(3)", "lagged(3)", "bounded(4, 3)", "bounded(8, 4)")
RULES: dict[str, tuple[int, str]] = {"window 8": (8, "1f1b"), "window 2": (2, "1f1b"), "gpipe": (4, "gpipe")}


def simulated(text: str, candidates: int, microbatches: int, limit: int, schedule: str) -> dict[str, Any]:
    """Four blocks cut into four stages; block b of step n uses candidate (n + b) modulo their number."""
    simulate = first("weft.pipeline.simulator:simulate")
    workload = first("weft.pipeline.workload:Workload")
    promise = first(
        "weft.engine.consistency:parse_consistency", "weft.engine.consistency:parse", "weft.pipeline.consistency:parse"
    )(text)
    policy = first("weft.pipeline.scheduler:SchedulePolicy", "weft.pipeline.scheduler:Rule")
    if "schedule" not in known(policy):
        schedule = {"1f1b": "backward", "gpipe": "forward"}[schedule]
    policy = policy(limit, schedule)

    def picks(step: int) -> list[tuple[int, tuple[int, int]]]:
        return [(block, (block, (step + block) % candidates)) for block in range(4)]

    done = simulate(workload(4, microbatches, 30, picks, lambda layer: promise), (1, 2, 3), policy)
    return {"time": done.time, "spans": digests.sha([[str(one.op), one.start, one.end] for one in done.spans])}


def cases() -> Iterator[Case]:
    for text in CONSISTENCIES:
        for candidates in (1, 6):
            for microbatches in (1, 4):
                for name, (limit, schedule) in RULES.items():
                    yield (
                        f"simulate/{text}/{candidates} candidates/{microbatches} micro-batches/{name}",
                        lambda _, given=(text, candidates, microbatches, limit, schedule): simulated(*given),
                    )
