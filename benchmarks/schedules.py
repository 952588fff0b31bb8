"""Bubbles of the one rule and of its rivals on NASPipe's seven spaces, simulated with the scheduler that training uses.

    python benchmarks/schedules.py [--quick] [--json FILE]

Every block costs 1 forward and 2 backward, stages are cut evenly, messages are free, 400 subnets. Rules:
`naspipe` (whole-stage gate, one batch a subnet, forward and backward in turn, no window to speak of), `weft` (backward
first, window 2S), `gpipe` and `1f1b` (a flush after every step). `rows` has costs that divide by the number of
micro-batches; `rows_small` lets each micro-batch cost 5 % of a whole batch more; `rows_jitter` lets operation times
vary by 25 %, at windows of S, 2S and 3S. `over_bound` is how much longer `weft` takes than the critical path or the
busiest stage of the same stream, whichever is longer: what no exact schedule can beat.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Hashable, Mapping
from typing import Any

from machine import write

from weft.pipeline.bound import lower_bound
from weft.pipeline.consistency import Exact
from weft.pipeline.cut import best_cut
from weft.pipeline.scheduler import Rule
from weft.pipeline.simulator import Simulated, jitter, simulate
from weft.pipeline.workload import Workload
from weft.space import Space, Stream, Subnet, make_stream

SPACES = {
    "NLP.c0": (48, 96),
    "NLP.c1": (48, 72),
    "NLP.c2": (48, 48),
    "NLP.c3": (48, 24),
    "CV.c1": (32, 48),
    "CV.c2": (32, 24),
    "CV.c3": (32, 12),
}
STREAMS = ("iid", "fair", "spaced")
SMALL = 0.05  # what a micro-batch costs beside its share of the batch, as a share of the whole batch


class Uniform(Mapping[Hashable, tuple[float, float]]):
    """The same cost for every layer, and none for the marks that make a flush."""

    def __init__(self, forward: float) -> None:
        self.forward = forward

    def __getitem__(self, layer: Hashable) -> tuple[float, float]:
        return (0.0, 0.0) if isinstance(layer, int) else (self.forward, 2 * self.forward)

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


class Recorded:
    """The picks of a stream, drawn once and used by every simulation."""

    def __init__(self, stream: Stream, steps: int) -> None:
        drawn: list[Subnet] = [stream[i][0] for i in range(steps)]
        self.plain = [[(b, (b, choice)) for b, choice in enumerate(subnet.values.values())] for subnet in drawn]
        # A layer of each block that everybody uses: no step starts before the one before it is through.
        self.flush = [[*picks, *((b, b) for b, _ in picks)] for picks in self.plain]


def workload(picks: list[Any], blocks: int, m: int, extra: float = 0.0) -> Workload:
    costs = Uniform(1 / m + (extra if m > 1 else 0.0))
    return Workload(blocks, m, len(picks), lambda n: picks[n // m], lambda layer: Exact(), costs)


def run(
    picks: list[Any], blocks: int, stages: int, m: int, rule: Rule | list[Rule], extra: float = 0.0, spread: float = 0.0
) -> Simulated:
    work = workload(picks, blocks, m, extra)
    vary = jitter(0, spread) if spread else None
    return simulate(work, best_cut([1.0] * blocks, stages), rule, duration=vary, keep_spans=False)


def rules(recorded: Recorded, stages: int, m: int) -> dict[str, tuple[list[Any], Rule | list[Rule]]]:
    return {
        "weft": (recorded.plain, Rule(2 * stages)),
        "gpipe": (recorded.flush, Rule(stages + m, "forward")),
        "1f1b": (recorded.flush, [Rule(stages - s) for s in range(stages)]),
    }


def table(recorded: dict[tuple[str, str], Recorded], sizes: list[int], extra: float) -> list[dict[str, Any]]:
    rows = []
    for (space, stream), picks in recorded.items():
        blocks = SPACES[space][0]
        for stages in sizes:
            base = run(picks.plain, blocks, stages, 1, Rule(10**6, "alternate"))
            found = [("naspipe", 1, base)]
            for m in (1, 4):
                for name, (chosen, rule) in rules(picks, stages, m).items():
                    found.append((name, m, run(chosen, blocks, stages, m, rule, extra)))
            for name, m, result in found:
                rows.append(
                    {
                        "space": space,
                        "stages": stages,
                        "rule": name,
                        "stream": stream,
                        "microbatches": m,
                        "bubble": result.bubble,
                        "steady_bubble": result.steady_bubble,
                        "speedup_over_naspipe": base.time / result.time,
                    }
                )
                if name == "weft":  # how much longer it takes than any exact schedule of this stream must
                    least = lower_bound(workload(picks.plain, blocks, m, extra), best_cut([1.0] * blocks, stages))
                    rows[-1]["over_bound"] = result.time / least - 1
    return rows


def jittered(recorded: dict[tuple[str, str], Recorded], sizes: list[int]) -> list[dict[str, Any]]:
    rows = []
    for (space, stream), picks in recorded.items():
        if stream == "spaced":
            for stages in sizes:
                for times in (1, 2, 3):
                    result = run(picks.plain, SPACES[space][0], stages, 1, Rule(times * stages), spread=0.25)
                    told = {"space": space, "stages": stages, "window": f"{times}S"}
                    rows.append({**told, "bubble": result.bubble, "steady_bubble": result.steady_bubble})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer subnets and stages")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    steps, sizes = (60, [4]) if options.quick else (400, [4, 8, 16])
    began = time.perf_counter()
    recorded: dict[tuple[str, str], Recorded] = {}
    for name, (blocks, choices) in SPACES.items():
        space = Space()
        for block in range(blocks):
            space.categorical(f"b{block}", list(range(choices)))
        for stream in STREAMS:
            recorded[name, stream] = Recorded(make_stream(space, stream, 0), steps)
    rows, small, jittery = table(recorded, sizes, 0.0), table(recorded, sizes, SMALL), jittered(recorded, sizes)
    print(
        f"{'space':8}{'stages':>7}{'stream':>8}"
        + "".join(f"{head:>13}" for head in ("naspipe", "weft m=1", "weft m=4", "1f1b m=4"))
    )
    for space in SPACES:
        for stages in sizes:
            for stream in STREAMS:
                by = {
                    (row["rule"], row["microbatches"]): row["steady_bubble"]
                    for row in rows
                    if (row["space"], row["stages"], row["stream"]) == (space, stages, stream)
                }
                shown = [by["naspipe", 1], by["weft", 1], by["weft", 4], by["1f1b", 4]]
                print(f"{space:8}{stages:7}{stream:>8}" + "".join(f"{value:13.3f}" for value in shown))
    print(f"steady bubbles; {time.perf_counter() - began:.0f} s")
    write(options.json, rows=rows, rows_small=small, rows_jitter=jittery)


if __name__ == "__main__":
    main()
