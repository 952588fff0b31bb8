"""The headline tables of each result file: a function from what the file holds to rows of cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import median
from typing import Any

Found = Mapping[str, Any]
Aims = Mapping[str, str]
Table = list[list[str]]
"""Rows of cells, the first of which is the heading."""


def columns(rows: Iterable[Found], **of: str | tuple[str, str]) -> Table:
    """A table of some keys of rows: heading=key, or heading=(key, format)."""
    pairs = {heading.replace("_", " "): (key, "") if isinstance(key, str) else key for heading, key in of.items()}
    body = [[shown(row[key], form) for key, form in pairs.values()] for row in rows]
    return [list(pairs), *body]


def shown(value: Any, form: str = "") -> str:
    if value is None or value == "nan":
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format(value, form or ("," if isinstance(value, int) else ""))


def facts(found: Found, **of: tuple[str, str]) -> Table:
    """A table of single figures: words=key, format."""
    return [
        ["", "measured"],
        *([words.replace("_", " "), shown(found[key], form)] for words, (key, form) in of.items()),
    ]


def overhead(found: Found, aims: Aims) -> Iterator[Table]:
    rows = []
    for row in found["rows"]:
        both = row["device"] == "cuda" and row["space"] == "nas-bench-macro" and row["layout"] == row["plain_layout"]
        name = f"{row['space']}, both {row['layout']}" if both else row["space"]
        place = "1 core" if row["device"] == "cpu" else "H200"
        figures = [f"{row[key]:.2f}" for key in ("plain_ms", "weft_ms", "ratio")]
        rows.append([name, *figures, aims.get(f"{name} | {place}", "")])
    yield [["supernet", "plain ms", "weft ms", "ratio", "aim"], *rows]


def quality(found: Found, _: Aims) -> Iterator[Table]:
    yield columns(
        found["rows"], stream="stream", seed="seed", steps="steps", tau=("tau", ".2f"), rank_of_the_pick="pick_rank"
    )


def elastic(found: Found, _: Aims) -> Iterator[Table]:
    mode = "graph" if found["machine"]["gpu"] else "eager"
    rows = [r for r in found["rows"] if (r["what"], r["mode"], r["precision"]) == ("network", mode, "fp32")]
    other = {(r["space"], r["tokens"]): r["ratio"] for r in rows if r["way"] == "padded"}
    table = [["network", "tokens", "mixture over plain", "padded sums over plain", "kept over plain"]]
    for row in sorted((r for r in rows if r["way"] == "ours"), key=lambda r: (r["space"], r["tokens"])):
        padded = f"{other[row['space'], row['tokens']]:.2f}"
        table.append([row["space"], f"{row['tokens']:,}", f"{row['ratio']:.2f}", padded, f"{row['memory_ratio']:.3f}"])
    yield table


def methods(found: Found, _: Aims) -> Iterator[Table]:
    table = [["space", "method", "warm", "seeds", "missed, %", "rank", "among the best 1 %", "tau"]]
    groups: dict[tuple[str, str, str], list[Found]] = {}
    for row in found["rows"]:
        if row["budget_seconds"] == 20:
            warm = "usual" if row["warm"] is None else f"{row['warm']:.1f}"
            groups.setdefault((row["space"], row["method"], warm), []).append(row)
    for (space, method, warm), rows in sorted(groups.items()):
        taus = [row["tau"] for row in rows if row["tau"] not in (None, "nan")]
        cells = [warm, str(len(rows)), f"{median(r['regret'] for r in rows):.2f}"]
        cells += [f"{median(r['rank'] for r in rows):,.0f}", f"{sum(r['top1pct'] for r in rows)} of {len(rows)}"]
        table.append([space, method, *cells, f"{median(taus):.2f}" if taus else ""])
    yield table


def picks(found: Found, _: Aims) -> Iterator[Table]:
    ways = list(found["rows"][0]["picks"])
    table = [["space", "method", "seed", *(f"{way}: rank" for way in ways), *(f"{way}: s" for way in ways)]]
    for row in sorted(found["rows"], key=lambda row: (row["space"], row["method"], row["seed"])):
        told = [row["picks"][way] for way in ways]
        ranks, seconds = [f"{one['rank']:,}" for one in told], [f"{one['seconds']:.1f}" for one in told]
        table.append([row["space"], row["method"], str(row["seed"]), *ranks, *seconds])
    yield table


def anytime(found: Found, _: Aims) -> Iterator[Table]:
    last: dict[tuple[str, str], Found] = {}
    for row in found["rows"]:
        key = (row["space"], row["method"])
        last[key] = max(last.get(key, row), row, key=lambda r: r["step"])
    yield columns(
        last.values(),
        space="space",
        method="method",
        steps="step",
        seconds=("seconds", ".1f"),
        validation_loss=("loss", ".2f"),
    )


def pipeline(found: Found, aims: Aims) -> Iterator[Table]:
    keys = {
        "two stages over one, exact, spaced stream: speed-up": ("speedup_2_over_1", ".2f"),
        "two processes that need nothing of each other over one: what the machine gives": ("machine_2_over_1", ".2f"),
        "one subnet with a flush after every step: time over torch's `Schedule1F1B`": ("ours_over_torch_1f1b", ".2f"),
        "the same with no more in flight than torch's": ("tight_over_torch_1f1b", ".2f"),
        "exact on a spaced stream over the same supernet with flushes: speed-up": ("exact_over_flush", ".2f"),
        "i.i.d. stream, split backward over whole: speed-up": ("split_gain", ".2f"),
        "simulated time against measured: error": ("simulator_error", ".3f"),
        "time that decisions take: share": ("scheduler_share", ".4f"),
    }
    yield [
        ["what", "measured", "aim"],
        *([name, format(found[key], form), aims.get(name, "")] for name, (key, form) in keys.items()),
    ]


def paci(found: Found, _: Aims) -> Iterator[Table]:
    ks = sorted({row["k"] for row in found["rows"]})
    cells = {(row["method"], row["k"]): row for row in found["rows"]}
    table = [["method", *(f"K = {k}: step, to a loss" for k in ks)]]
    for method in dict.fromkeys(row["method"] for row in found["rows"]):
        own = [cells[method, k] for k in ks]
        sooner = [shown(row["ratio_to_torch_1f1b"], ".2f") or "never" for row in own]
        table.append([method, *(f"{r['step_ratio_to_torch_1f1b']:.2f}, {s}" for r, s in zip(own, sooner, strict=True))])
    yield table
    if "rows_simulator" not in found:
        return
    equal = [
        r
        for r in found["rows_simulator"]
        if (r["costs"], r["communication"]) == ("equal", 0.0) and r["depth"] == r["stages"]
    ]
    yield columns(equal, stages="stages", K="k", simulated_speedup_over_a_flush=("ratio", ".2f"))
    yield columns(
        found["rows_memory"],
        precision="precision",
        method="method",
        stage="stage",
        in_flight="in_flight",
        copies_of_the_weights=("weight_copies", ".1f"),
        memory_over_a_flush=("ratio_to_flush", ".2f"),
    )


def delays(found: Found, _: Aims) -> Iterator[Table]:
    rows = [row for row in found["cells"] if row["method"] != "flush"]
    table = [["optimizer", "rate", "consistency", "mean delay", "above a flush", "95 % interval"]]
    for row in rows:
        name = f"{row['method']}({row['k']}, {row['depth']})" if row["depth"] else f"{row['method']}(1)"
        cells = [f"{row['delay']:.2f}", f"{row['difference']:+.3f}", f"{row['interval']:.3f}"]
        table.append([row["optimizer"], f"{row['lr']:.4g}", f"`{name}`", *cells])
    yield table


def memory(found: Found, _: Aims) -> Iterator[Table]:
    table = [["set", "against", "configurations", "median error", "95th percentile", "most under", "most over"]]
    for name, own in found["summary"].items():
        for what in ("allocated", "reserved"):
            one = own[what]
            figures = [
                f"{one['median']:.2%}",
                f"{one['p95']:.1%}",
                f"{one['most_under']:+.1%}",
                f"{one['most_over']:+.1%}",
            ]
            table.append([name, what, str(one["count"]), *figures])
    yield table


def race(found: Found, _: Aims) -> Iterator[Table]:
    both = [found["exact"], found["careless"]]
    keys = {"different fingerprints": ("fingerprints", ""), "final loss, mean": ("loss_mean", ".3f")}
    keys |= {"least": ("loss_min", ".3f"), "most": ("loss_max", ".3f"), "different picks": ("picks", "")}
    keys |= {"tau between two runs, mean": ("tau_mean", ".2f")}
    yield [
        ["", "exact", "careless"],
        *([name, *(format(one[key], form) for one in both)] for name, (key, form) in keys.items()),
    ]


def schedules(found: Found, _: Aims) -> Iterator[Table]:
    of = {
        (r["space"], r["rule"], r["stream"], r["microbatches"], r["stages"]): r["steady_bubble"] for r in found["rows"]
    }
    table = [["steady bubble, 8 / 16 stages", "naspipe, i.i.d.", "weft, i.i.d., m = 4", "weft, spaced"]]
    for space in dict.fromkeys(row["space"] for row in found["rows"]):
        kinds = (("naspipe", "iid", 1), ("weft", "iid", 4), ("weft", "spaced", 1))
        table.append([space, *(" / ".join(f"{of[space, *kind, s]:.3f}" for s in (8, 16)) for kind in kinds)])
    yield table


def planner(found: Found, _: Aims) -> Iterator[Table]:
    kept = [row for row in found["rows"] if row.get("p") in (8, 64, 1024) and row["tables"] != "model"]
    table = [["graph", "devices", "ms", "MiB", "proven optimal", "PaSE, ms"]]
    for r in kept:
        theirs = f"{1e3 * r['pase_seconds']:,.0f}" if r.get("pase_seconds") else ""
        table.append(
            [
                r["graph"],
                f"{r['p']:,}",
                f"{1e3 * r['seconds']:.1f}",
                f"{r['peak_mib']:.0f}",
                shown(r["optimal"]),
                theirs,
            ]
        )
    yield table


def capture(found: Found, _: Aims) -> Iterator[Table]:
    yield [
        ["models", "captured", "operators with a rule"],
        [str(len(found["rows"])), str(found["captured"]), f"{found['known_share']:.0%}"],
    ]


def applied(found: Found, _: Aims) -> Iterator[Table]:
    yield columns(found["claims"], model="model", measured=("measured", ".2f"), predicted=("predicted", ".2f"))
    taus = [["model", "tau of predicted and measured", "tau of two measurements"]]
    yield taus + [[name, f"{tau['step']:.2f}", f"{tau['again']:.2f}"] for name, tau in found["tau"].items()]


def predicted(found: Found, _: Aims) -> Iterator[Table]:
    table = [["dtype", "steps", "median of measured over predicted", "tau"]]
    for dtype, tau in found["tau"].items():
        own = [row["measured_ms"] / row["predicted_ms"] for row in found["rows"] if row["dtype"] == dtype]
        table.append([dtype, str(len(own)), f"{median(own):.2f}", f"{tau:.2f}"])
    yield table


def published(found: Found, _: Aims) -> Iterator[Table]:
    kept = [row for row in found["rows"] if row["p"] in (4, 16, 64)]
    yield columns(
        kept,
        network="network",
        machine="machine",
        devices="p",
        paper=("paper", ".2f"),
        as_PaSE_has_it=("published", ".2f"),
        mended=("corrected", ".2f"),
    )


def residency(found: Found, _: Aims) -> Iterator[Table]:
    ways = {(row["space"], row["tokens"], row["way"]): row for row in found["rows"]}
    heading = ["space", "tokens", "state, GiB", "budget, GiB", "all on the device, ms", "weft, ms", "on demand, ms"]
    table = [[*heading, "weft by bound", "hits"]]
    for (space, tokens, way), row in ways.items():
        if way == "weft":
            others = [f"{ways[space, tokens, other]['step_ms']:.1f}" for other in ("resident", "on-demand")]
            sizes = [f"{row[key]:.1f}" for key in ("state_gib", "budget_gib")]
            times = [others[0], f"{row['step_ms']:.1f}", others[1], f"{row['ratio_to_bound']:.2f}"]
            table.append([space, f"{tokens:,}", *sizes, *times, f"{row['hit_rate']:.1%}"])
    yield table
    crossing = {space: at for space, at in found.get("crossing", {}).items() if at is not None}
    if crossing:
        yield [["space", "crossing, tokens a step"], *([space, f"{at:,.0f}"] for space, at in crossing.items())]


def tune(found: Found, _: Aims) -> Iterator[Table]:
    yield columns(
        found["rows"],
        trials="trials",
        way="way",
        MPS="mps",
        seconds=("makespan_s", ".1f"),
        ratio=("ratio", ".2f"),
        out_of_memory="oom",
        trials_with_the_accuracy_of_those_alone="same",
    )


def packing(found: Found, _: Aims) -> Iterator[Table]:
    kept = [row for row in found["rows"] if row["loss"] == 0]
    yield columns(
        kept,
        trials="trials",
        devices="devices",
        way="way",
        time_over_the_bound=("over_bound", ".3f"),
        times_as_fast_as_one=("speedup", ".2f"),
    )
    share = {"fixed degree": "fixed_share", "each its own": "chosen_share", "with micro-batches first": "micro_share"}
    yield [
        ["degree", "share in communication"],
        *([name, f"{found['communication'][key]:.3f}"] for name, key in share.items()),
    ]


def fusion(found: Found, _: Aims) -> Iterator[Table]:
    lanes = sorted({row["lanes"] for row in found["rows"]})
    of = {(row["model"], row["dropout"], row["lanes"]): f"{row['ratio']:.2f}" for row in found["rows"]}
    names = dict.fromkeys((row["model"], row["dropout"]) for row in found["rows"])
    table = [["model", "dropout", *(f"{n} lanes" for n in lanes)]]
    yield table + [[model, shown(drop), *(of[model, drop, n] for n in lanes)] for model, drop in names]


def rows(**of: str | tuple[str, str]) -> Callable[[Found, Aims], Iterator[Table]]:
    """The whole of `rows`, some keys of it."""
    return lambda found, _: iter([columns(found["rows"], **of)])


def plain(found: Found, _: Aims) -> Iterator[Table]:
    """For a file that nobody chose columns for: the figures and words that its first rows have in common."""
    rows = list(found.get("rows", ()))[:24]
    keys = [
        key for key in (rows[0] if rows else {}) if all(isinstance(row.get(key), str | int | float) for row in rows)
    ]
    if keys:
        yield [
            keys[:9],
            *([shown(row[key], ".4g" if isinstance(row[key], float) else "") for key in keys[:9]] for row in rows),
        ]
