"""Bubbles of the one rule and of its rivals on NASPipe's seven spaces, simulated with the scheduler that training uses.

    python benchmarks/schedules.py [--quick] [--json FILE]

Every block costs 1 forward and 2 backward, stages are cut evenly, messages are free, 400 subnets. Rules:
`naspipe` (whole-stage gate, one batch a subnet, forward and backward in turn, no window to speak of), `weft` (backward
first, window 2S), `gpipe` and `1f1b` (a flush after every step). `over_bound` is how much longer `weft` takes than the
critical path or the busiest stage of the same stream, whichever is longer: what no exact schedule can beat.

rows            costs that divide by the number of micro-batches
rows_small      each micro-batch costs 5 % of a whole batch more
rows_jitter     operation times vary by 25 %, at windows of S, 2S and 3S; `peak_in_flight` counts micro-batches on the
                stage that holds most
rows_real       candidates cost what theirs cost (NLP and CV below), stages are cut by expected cost; windows likewise,
                6S for whole batches, and 8S for quarters, which are as many activations as 2S whole batches
rows_split      a backward sends the gradient of its input after half of its time, then does those of its weights;
                `gain` is the time without over the time with
rows_headline   subnets, samples and tokens per second of whole systems, below

The headline. NASPipe's "up to 7.8x" over GPipe and others counts samples or tokens, not subnets. Its artifact trains
192 sentences of 64 tokens a subnet; GPipe and PipeDream, which keep the whole supernet on the devices, get what memory
leaves (BATCH), and their shipped scripts feed sentences of 8 tokens. Here a subnet's step takes one device
fixed + (1 - fixed) * tokens / 12,288 seconds (a second is the work of a NASPipe step; m micro-batches pay the fixed
part m times), and:

naspipe, weft   causal order; the supernet lies on the host and its copies are hidden behind work
naspipe-shipped the artifact on 4 stages: the gates of 8 stages, so that 22 of 48 blocks are looked at, on wrong stages
gpipe           no causal order; as many subnets as stages, then a flush
pipedream       no causal order, no flush
vpipe           gpipe with 192 sentences; a subnet's 65 M weights (0.26 GB) cross PCIe (12 GB/s) three times, and work
                waits for them: 65 ms against the 1.8 s that devices work for a step of naspipe-shipped

`fixed` is 0 or 0.10. The latter was chosen so that naspipe-shipped comes near the artifact's sample output in NLP.c1;
the other spaces and systems were not fitted. `shipped_over_gpipe` is what that output has (tokens, 4 GPUs).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from machine import write

from weft.engine.consistency import Exact
from weft.pipeline.scheduler import SchedulePolicy
from weft.pipeline.simulator import Simulated, jitter, simulate
from weft.pipeline.workload import Workload
from weft.space import Space, make_stream
from weft.supernet.partition import Cut, best_cut

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "pipeline"))
from schedule_bound import lower_bound

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
SPREAD = 0.25
INPUT_SHARE = 0.5  # of a backward: a linear layer's two gradients take as many operations as each other

# What a candidate of NASPipe's costs: multiply-adds a token of a forward, in units of d * d, at d = 1024 and sentences
# of 64 tokens; the backward takes twice that. Spaces with more than 24 choices have these several times.
D, LENGTH = 1024, 64
BLOCK = 7 * 4 * 20 / (2 * D)  # norm, addition and the op itself move 7 d floats; 20 FLOP take as long as a byte
NLP = {
    **{f"conv1d k={k}": float(k) for k in (1, 3, 5)},
    **{f"separable conv k={k}": 1 + k / D for k in (3, 5, 7, 9, 11)},
    **{f"lightweight conv k={k} heads={h}": k / D for k in (3, 5, 7, 15) for h in (1, 4, 16)},
    **{f"attention heads={h}": 4 + 2 * LENGTH / D for h in (4, 8, 16)},
    "cross-attention heads=8": 4 + 2 * LENGTH / D,
    "gated linear unit": 2.0,
}
# Nothing is known of its CV candidates. Assumed: inverted residuals at 96 channels, expansion e and kernel k, by
# multiply-adds a pixel and channel; the dearest costs 3.6 times the cheapest.
CV = {f"inverted residual e={e} k={k}": float(e * (2 * 96 + k * k)) for e in (2, 3, 4, 6) for k in (3, 5, 7)}

SENTENCES, TOKENS, SHIPPED_TOKENS = 192, 64, 8
BATCH = {"gpipe": {"c1": 32, "c2": 64, "c3": 128}, "pipedream": {"c1": 16, "c2": 24, "c3": 48}}  # c0: out of memory
COPIES = 0.04
FIXED = 0.10
GATES = ((0, 4), (4, 10), (10, 16), (16, 22))  # the blocks that each stage of the artifact looks at
SHIPPED = {
    "naspipe-shipped": {"c1": 8.0, "c2": 4.3, "c3": 2.8},
    "vpipe": {"c1": 5.4, "c2": 3.6, "c3": 2.2},
    "pipedream": {"c1": 0.9, "c2": 0.8, "c3": 1.25},
}


@dataclass(frozen=True)
class Case:
    """One simulation."""

    space: str
    stream: str
    stages: int
    steps: int
    rule: str = "weft"
    m: int = 1
    window: int = 2  # times the stages; weft's only
    costs: str = "even"
    spread: float = 0.0
    split: float | None = None

    @property
    def blocks(self) -> int:
        return SPACES[self.space][0]


class Costs(Mapping[Hashable, tuple[float, float]]):
    """What a layer (block, choice) costs; the marks that make a flush or a gate cost nothing."""

    def __init__(self, scale: float, kinds: list[float]) -> None:
        self.forward = [scale * kind * len(kinds) / sum(kinds) for kind in kinds]

    def __getitem__(self, layer: Any) -> tuple[float, float]:
        if is_mark(layer):
            return (0.0, 0.0)
        forward = self.forward[layer[1] % len(self.forward)]
        return (forward, 2 * forward)

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


@cache
def plain(space: str, stream: str, steps: int) -> list[list[Any]]:
    """The picks of a stream, drawn once and used by every simulation."""
    blocks, choices = SPACES[space]
    drawn = Space()
    for block in range(blocks):
        drawn.categorical(f"b{block}", list(range(choices)))
    subnets = make_stream(drawn, stream, 0)
    return [[(b, (b, choice)) for b, choice in enumerate(subnets[i][0].values.values())] for i in range(steps)]


@cache
def flushed(space: str, stream: str, steps: int) -> list[list[Any]]:
    """The same with a layer of each block that everybody uses: no step starts before the one before it is through."""
    return [[*picks, *((b, b) for b, _ in picks)] for picks in plain(space, stream, steps)]


@cache
def misgated(space: str, stream: str, steps: int) -> list[list[Any]]:
    """The same with the artifact's gates beside the layers, which themselves wait for nobody."""
    first = [stage * SPACES[space][0] // len(GATES) for stage in range(len(GATES))]
    return [
        [*picks, *((first[s], ("gate", *picks[b][1])) for s, (a, z) in enumerate(GATES) for b in range(a, z))]
        for picks in plain(space, stream, steps)
    ]


def workload(case: Case) -> Workload:
    source = {"gpipe": flushed, "1f1b": flushed, "bulk": flushed, "naspipe-shipped": misgated}.get(case.rule, plain)
    picks, m = source(case.space, case.stream, case.steps), case.m
    kinds = [1.0]
    if case.costs == "real":
        kinds = [cost + BLOCK for cost in NLP.values()] if case.space.startswith("NLP") else list(CV.values())
    costs = Costs(1 / m + (SMALL if case.costs == "small" and m > 1 else 0.0), kinds)
    if source is plain and case.rule != "unordered":
        return Workload(case.blocks, m, case.steps, lambda n: picks[n // m], lambda layer: Exact(), costs)
    if case.rule == "bulk":
        return Workload(case.blocks, case.stages, case.steps // case.stages, lambda n: picks[n], marked, costs)
    return Workload(case.blocks, m, case.steps, lambda n: picks[n // m], marked, costs)


def marked(layer: Any) -> Exact | None:
    """Marks wait for each other, layers for nobody: they could not wait longer than the marks beside them."""
    return Exact() if is_mark(layer) else None


def is_mark(layer: Any) -> bool:
    return isinstance(layer, int) or len(layer) > 2


def cut_of(case: Case, work: Workload) -> Cut:
    return best_cut(work.expected_costs() if case.costs == "real" else [1.0] * case.blocks, case.stages)


@cache
def simulated(case: Case) -> Simulated:
    if case.m == 1 and case.costs == "small":
        return simulated(replace(case, costs="even"))
    down = [SchedulePolicy(case.stages - stage) for stage in range(case.stages)]
    rules: dict[str, SchedulePolicy | list[SchedulePolicy]] = {
        "weft": SchedulePolicy(case.window * case.stages),
        "naspipe": SchedulePolicy(10**6, "naspipe"),
        "naspipe-shipped": SchedulePolicy(10**6, "naspipe"),
        "gpipe": SchedulePolicy(case.stages + case.m, "gpipe"),
        "bulk": SchedulePolicy(2 * case.stages, "gpipe"),
        "1f1b": down,
        "unordered": down,
    }
    work = workload(case)
    vary = jitter(0, case.spread) if case.spread else None
    cut = cut_of(case, work)
    return simulate(work, cut, rules[case.rule], duration=vary, keep_spans=False, split=case.split)


def row(case: Case, **more: Any) -> dict[str, Any]:
    result = simulated(case)
    base = simulated(replace(case, rule="naspipe", m=1, window=2, split=None))
    return {
        "space": case.space,
        "stages": case.stages,
        "rule": case.rule,
        "stream": case.stream,
        "microbatches": case.m,
        "bubble": result.bubble,
        "steady_bubble": result.steady_bubble,
        "speedup_over_naspipe": base.time / result.time,
        **more,
    }


@cache
def over_bound(case: Case) -> float:
    """How much longer it takes than any exact schedule of this stream must."""
    if case.m == 1 and case.costs == "small":
        return over_bound(replace(case, costs="even"))
    work = workload(case)
    return simulated(case).time / lower_bound(work, cut_of(case, work), split=case.split) - 1


def table(cases: list[Case]) -> list[dict[str, Any]]:
    rows = []
    for case in cases:
        rows.append(row(replace(case, rule="naspipe")))
        for m, rule in product((1, 4), ("weft", "gpipe", "1f1b")):
            one = replace(case, rule=rule, m=m)
            rows.append(row(one, **({"over_bound": over_bound(one)} if rule == "weft" else {})))
    return rows


def windows(cases: list[Case], wider: list[tuple[int, int]]) -> list[dict[str, Any]]:
    rows = []
    for case in cases:
        found = [(None, replace(case, rule="naspipe")), (None, replace(case, rule="1f1b", m=4))]
        for m, times in [*product((1, 4), (1, 2, 3)), *wider]:
            found.append((f"{times}S", replace(case, m=m, window=times)))
        rows += [row(one, window=window, peak_in_flight=max(simulated(one).peak)) for window, one in found]
    return rows


def splits(cases: list[Case]) -> list[dict[str, Any]]:
    rows = []
    for case, m in product(cases, (1, 4)):
        whole = replace(case, m=m)
        for split in (None, INPUT_SHARE):
            one = replace(whole, split=split)
            gain = simulated(whole).time / simulated(one).time
            rows.append(row(one, split=split, gain=gain, over_bound=over_bound(one)))
    return rows


def headline(sizes: list[int], steps: int) -> list[dict[str, Any]]:
    rows = []
    for (space, stages), fixed, shipped in product(
        product([name for name in SPACES if name.startswith("NLP")], sizes), (0.0, FIXED), (False, True)
    ):
        iid = Case(space, "iid", stages, steps)
        systems = [
            ("naspipe", replace(iid, rule="naspipe")),
            ("naspipe-shipped", replace(iid, rule="naspipe-shipped")),
            ("weft", iid),
            ("weft", replace(iid, m=4)),
            ("weft", replace(iid, stream="spaced")),
            ("gpipe", replace(iid, rule="bulk")),
            ("pipedream", replace(iid, rule="unordered")),
            ("vpipe", replace(iid, rule="bulk")),
        ]
        found: list[dict[str, Any]] = []
        for system, case in systems:
            batch = BATCH.get(system, {}).get(space[-2:], None if system in BATCH else SENTENCES)
            if batch is None or (system == "naspipe-shipped" and stages != len(GATES)):
                continue
            length = SHIPPED_TOKENS if shipped and system in BATCH else TOKENS
            work = case.m * fixed + (1 - fixed) * batch * length / (SENTENCES * TOKENS)
            subnets = simulated(case).speedup / (work + (COPIES if system == "vpipe" else 0.0))
            found.append(
                {
                    "space": space,
                    "stages": stages,
                    "system": system,
                    "stream": case.stream,
                    "microbatches": case.m,
                    "causal": system in ("naspipe", "weft"),
                    "fixed": fixed,
                    "batch": batch,
                    "tokens_a_sample": length,
                    "sentences": "as shipped" if shipped else "alike",
                    "bubble": simulated(case).bubble,
                    "subnets_per_second": subnets,
                    "samples_per_second": subnets * batch,
                    "tokens_per_second": subnets * batch * length,
                }
            )
        base = next((one for one in found if one["system"] == "gpipe"), None)
        for one in found:
            for what in ("subnets", "samples", "tokens"):
                key = f"{what}_per_second"
                one[f"{what}_over_gpipe"] = one[key] / base[key] if base else None
            known = shipped and fixed and stages == len(GATES)
            one["shipped_over_gpipe"] = SHIPPED.get(one["system"], {}).get(space[-2:]) if known else None
        rows += found
    return rows


def show(rows: list[dict[str, Any]], sizes: list[int]) -> None:
    heads = ("naspipe", "weft m=1", "weft m=4", "1f1b m=4")
    print(f"{'space':8}{'stages':>7}{'stream':>8}" + "".join(f"{head:>13}" for head in heads))
    for space, stages, stream in product(SPACES, sizes, STREAMS):
        by = {
            (one["rule"], one["microbatches"]): one["steady_bubble"]
            for one in rows
            if (one["space"], one["stages"], one["stream"]) == (space, stages, stream)
        }
        shown = [by["naspipe", 1], by["weft", 1], by["weft", 4], by["1f1b", 4]]
        print(f"{space:8}{stages:7}{stream:>8}" + "".join(f"{value:13.3f}" for value in shown))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer subnets and stages")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    steps, sizes = (60, [4]) if options.quick else (400, [4, 8, 16])
    began = time.perf_counter()
    cases = [Case(space, stream, stages, steps) for space, stream, stages in product(SPACES, STREAMS, sizes)]
    pair = [case for case in cases if case.stream != "fair"]
    rows = table(cases)
    found = {
        "rows_small": table([replace(case, costs="small") for case in cases]),
        "rows_jitter": windows([replace(case, spread=SPREAD) for case in pair], []),
        "rows_real": windows([replace(case, costs="real") for case in pair], [(1, 6), (4, 8)]),
        "rows_split": splits([case for case in pair if case.stages > 4 or options.quick]),
        "rows_headline": headline(sizes[:2], steps),
    }
    show(rows, sizes)
    for one in found["rows_headline"]:
        if one["shipped_over_gpipe"]:
            told = f"{one['tokens_over_gpipe']:.2f} times gpipe's tokens; as shipped {one['shipped_over_gpipe']}"
            print(f"{one['space']:8}{one['system']:>17}  {told}")
    print(f"steady bubbles; {time.perf_counter() - began:.0f} s")
    write(options.json, rows=rows, **found)


if __name__ == "__main__":
    main()
