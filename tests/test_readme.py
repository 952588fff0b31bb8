"""What the README shows is true: its program runs, and every figure of its tables is in a result file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def rows(name: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]
    return found


def test_the_program_on_the_first_screen_prints_what_the_readme_says(tmp_path: Path) -> None:
    code, printed = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.DOTALL)[0]
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    shown, seen = printed.splitlines(), done.stdout.splitlines()
    assert len(seen) == len(shown)
    assert re.fullmatch(
        r"[0-9a-f]{16}", seen[0]
    )  # the bits depend on the processor, the rest is the same kind of thing
    assert re.fullmatch(r"(block\d=(wide|narrow|skip) ?){6}", seen[1])
    assert float(seen[2]) > 0.9


def label(row: dict[str, object]) -> str:
    """As the README calls a row: with the layout only where both sides were told to have it."""
    told = row["device"] == "cuda" and row["space"] == "nas-bench-macro" and row["layout"] == row["plain_layout"]
    return f"{row['space']}, both {row['layout']}" if told else str(row["space"])


def test_every_figure_of_the_overhead_table_is_in_a_result_file() -> None:
    row = r"^\| ([a-z][\w-]*(?:, both [a-z ]+)?) \| (1 core|H200) \| (.*?) \| (.*?) \| (.*?) \|"
    table = re.findall(row, README, re.M)
    measured = [
        (
            label(row),
            "1 core" if row["device"] == "cpu" else "H200",
            *(f"{row[key]:.2f}" for key in ("plain_ms", "weft_ms", "ratio")),
        )
        for name in ("overhead-cpu", "overhead-gpu")
        for row in rows(name)
    ]
    assert table == measured


def test_every_figure_of_the_ranking_table_is_in_a_result_file() -> None:
    table = re.findall(
        r"^\| (iid|fair|spaced) \| (\S+) / (\S+) \| (\d+) / (\d+) \| (\S+) / (\S+) \| (\d+) / (\d+) \|", README, re.M
    )
    assert len(table) == 3
    for stream, *figures in table:
        wanted = []
        for name in ("search-quality", "search-quality-5000"):
            by = {(row["stream"], row["seed"]): row for row in rows(name)}
            pair = [by[stream, 0], by[stream, 1]]
            wanted += [*(f"{row['tau']:.2f}" for row in pair), *(str(row["pick_rank"]) for row in pair)]
        assert figures == wanted


def test_every_figure_of_the_bubble_table_is_in_a_result_file() -> None:
    table = re.findall(r"^\| (NLP\.c\d|CV\.c\d) \| (\S+) \| (\S+) \| (\S+) \|$", README, re.M)
    by = {
        (row["space"], row["rule"], row["stream"], row["microbatches"]): f"{row['steady_bubble']:.3f}"
        for row in rows("schedules")
        if row["stages"] == 8
    }
    assert len(table) == 7
    for space, naspipe, finer, spaced in table:
        assert naspipe == by[space, "naspipe", "iid", 1]
        assert finer == by[space, "weft", "iid", 4]
        assert spaced == by[space, "weft", "spaced", 1]


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return found


def test_every_figure_of_the_pipeline_table_is_in_a_result_file() -> None:
    shown = {
        "speedup_2_over_1": (r"two stages over one, .*?: speed-up", ".2f"),
        "machine_2_over_1": (r"two processes that need nothing of each other .*?", ".2f"),
        "ours_over_torch_1f1b": (r"one subnet with a flush .*?`Schedule1F1B`", ".2f"),
        "tight_over_torch_1f1b": (r"the same with no more in flight than torch's", ".2f"),
        "exact_over_flush": (r"exact on a spaced stream over .*?: speed-up", ".2f"),
        "split_gain": (r"i\.i\.d\. stream, split backward over whole: speed-up", ".2f"),
        "simulator_error": (r"simulated time against measured: error", ".3f"),
        "scheduler_share": (r"time that decisions take: share", ".4f"),
    }
    measured = result("pipeline")
    assert measured["same_bits"]
    for key, (words, form) in shown.items():
        found = re.findall(rf"^\| {words} \| (\S+) \|", README, re.M)
        assert found == [format(measured[key], form)], key


def test_every_figure_of_the_race_table_is_in_a_result_file() -> None:
    race = result("race")
    both = [race["exact"], race["careless"]]
    rows = {
        "distinct fingerprints": [f"{side['fingerprints']}" for side in both],
        "final loss, mean (least to most)": [
            f"{side['loss_mean']:.3f} ({side['loss_min']:.3f} to {side['loss_max']:.3f})" for side in both
        ],
        "Kendall's tau between the rankings of two runs, mean": [f"{side['tau_mean']:.2f}" for side in both],
        "different subnets picked as best": [f"{side['picks']}" for side in both],
    }
    for name, (exact, careless) in rows.items():
        assert f"| {name} | {exact} | {careless} |" in README


def test_stages_that_share_a_gpu_had_one_fingerprint() -> None:
    measured = result("one-device-gpu")
    assert len(measured["same"]) == 4
    assert all(measured["same"].values())
    assert {row["stages"] for row in measured["rows"]} == {1, 2, 4}


def test_every_figure_of_the_table_of_mixtures_is_in_a_result_file() -> None:
    names = {"autoformer-t": "AutoFormer-T", "autoformer-s": "AutoFormer-S", "gpt-small": "GPT small"}
    table = re.findall(
        r"^\| (AutoFormer-[TS]|GPT small) \| (1 core|H200) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|", README, re.M
    )
    measured = []
    for name, device, mode in (("elastic-cpu", "1 core", "eager"), ("elastic-gpu", "H200", "graph")):
        own = [r for r in rows(name) if (r["what"], r["mode"], r["precision"]) == ("network", mode, "fp32")]
        for row in (r for r in own if r["way"] == "ours"):
            (other,) = (r for r in own if r["way"] == "padded" and all(r[k] == row[k] for k in ("space", "tokens")))
            ratios = (f"{row['ratio']:.2f}", f"{other['ratio']:.2f}", f"{row['memory_ratio']:.3f}")
            measured.append((names[str(row["space"])], device, f"{row['tokens']:,}", *ratios))
    assert table == measured


def test_what_the_readme_says_of_mixtures_on_a_gpu_is_in_a_result_file() -> None:
    own = [row for row in rows("elastic-gpu") if row["way"] == "ours"]
    told = re.sub(r"\s+", " ", README)

    def ratios(mode: str, tokens: Sequence[int], *what: str) -> str:
        found = [r["ratio"] for r in own if r["mode"] == mode and r["tokens"] in tokens and r["what"] in what]
        return f"{min(found):.2f} to {max(found):.2f}"

    linear = ("fc1", "fc2", "qkv", "q", "proj")
    assert f"({ratios('graph', (197, 3152, 50432), 'network')} times the plain time)" in told
    assert f"linear ones take {ratios('graph', (3152,), *linear)} times the plain time at 3,152 tokens" in told
    assert f"and {ratios('graph', (197,), *linear)} at 197" in told
    assert f"layer norms {ratios('graph', (3152,), 'norm')} and {ratios('graph', (197,), 'norm')}" in told
    assert (
        sum(r["ratio"] > 1.1 for r in own if (r["mode"], r["tokens"]) == ("graph", 3152) and r["what"] in linear) == 3
    )
    assert {r["syncs"] for r in own} == {0}
    assert max(r["memory_ratio"] for r in own if r["what"] == "network") <= 1.02


def test_what_the_readme_says_of_mixtures_on_a_core_is_in_a_result_file() -> None:
    own = [row for row in rows("elastic-cpu") if row["way"] == "ours"]
    told = re.sub(r"\s+", " ", README)

    def ratios(norm: bool, *tokens: int) -> str:
        layers = [r for r in own if r["what"] != "network" and (r["what"] == "norm") is norm and r["tokens"] in tokens]
        return f"{min(r['ratio'] for r in layers):.2f} to {max(r['ratio'] for r in layers):.2f}"

    assert f"On the core linear layers take {ratios(False, 3152)} and {ratios(False, 197)} times" in told
    assert f"{ratios(True, 197, 3152)} times up to 3,152 tokens and {ratios(True, 50432)} at 50,432" in told
    kept = [r["memory_ratio"] for r in own if r["what"] == "network" and r["tokens"] == 197]
    assert f"one image keeps {100 * min(kept) - 100:.0f} to {100 * max(kept) - 100:.0f} % more" in told


GRADIENT, SAMPLED = ("darts", "darts2", "drnas", "gdas"), ("spos", "fairnas", "sandwich")


def picks(space: str, method: str, warm: float | None = None) -> list[dict[str, Any]]:
    """The runs of twenty seconds that the README speaks of, by seed."""
    if warm is None:
        warm = 0.5 if space.startswith("nas-bench-201") and method in GRADIENT else 0.2
    wanted = (space, method, 20.0, warm)
    own = [r for r in rows("search-methods") if (r["space"], r["method"], r["budget_seconds"], r["warm"]) == wanted]
    return sorted(own, key=lambda row: int(str(row["seed"])))


def test_every_figure_of_the_table_of_methods_is_in_a_result_file() -> None:
    names = {"one at random": "random", "evolution that reads 50 true accuracies": "table-evolution"}
    (body,) = re.findall(r"^\| method \| NAS-Bench-Macro: missed .*\n\|[-|]+\n((?:\|.*\n)+)", README, re.M)
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in body.splitlines()]
    assert [names.get(name, name) for name, *_ in table] == [*GRADIENT, *SAMPLED, "random", "table-evolution"]
    for name, *shown in table:
        measured = []
        for space in ("nas-bench-macro", "nas-bench-201"):
            own = picks(space, names.get(name, name))
            assert [row["seed"] for row in own] == list(range(5))
            measured += [f"{median(row['regret'] for row in own):.2f}", f"{median(row['rank'] for row in own):,.0f}"]
            measured.append(f"{sum(row['top1pct'] for row in own)} of 5")
            measured.append("" if name in names else f"{median(row['tau'] for row in own):.2f}")
        assert shown == measured


def test_what_the_readme_says_of_the_methods_is_in_a_result_file() -> None:
    better_half = {
        space: [sum(row["rank"] <= subnets / 2 for row in picks(space, m)) for m in (*GRADIENT, *SAMPLED)]
        for space, subnets in (("nas-bench-macro", 6561), ("nas-bench-201", 15625))
    }
    assert better_half == {"nas-bench-macro": [5] * 7, "nas-bench-201": [4, 2, 5, 2, 1, 1, 5]}
    later = [
        f"{median(row['regret'] for row in picks('nas-bench-201', m)[2:]):.2f}" for m in ("darts", "drnas", "gdas")
    ]
    text = " ".join(README.split())
    assert "DARTS misses {}, DrNAS {} and GDAS {};".format(*later) in text
    short = [row["regret"] for row in picks("nas-bench-201", "darts", 0.2)]
    assert len(short) == 2
    assert f"DARTS missed {max(short):.2f} in one of two runs" in text
    took = {
        m: {round(row["seconds"]) for s in ("nas-bench-macro", "nas-bench-201") for row in picks(s, m)}
        for m in GRADIENT
    }
    assert took["darts"] | took["drnas"] | took["gdas"] == {22, 23}
    assert f"stopped after {min(took['darts2'])} to {max(took['darts2'])}" in text
    lost = [row["pick"] for row in picks("nas-bench-201", "darts2") if row["rank"] > 15000]
    assert all(pick[0] == pick[1] == pick[3] == "0" for pick in lost)  # nothing leaves the input
    assert len(lost) == 3
    scored = [row["scored"] for s in ("nas-bench-macro", "nas-bench-201") for m in SAMPLED for row in picks(s, m)]
    assert f"the {min(scored)} to {max(scored)} subnets that evolution scored" in text
    assert [row["pick"] for row in picks("nas-bench-macro", "drnas")] == ["22222222"] * 5
    assert [row["pick"] for row in picks("nas-bench-201", "drnas")].count("333333") == 4
    for method in ("drnas", "gdas", "darts"):
        own = picks("nas-bench-macro-entangled", method)
        ranks, taus = [f"{row['rank']:,}" for row in own], [f"{row['tau']:.2f}" for row in own]
        assert re.search(rf"{ranks[0]} and {ranks[1]} with (a tau of )?{taus[0]} and {taus[1]}", text)
        cells = picks("nas-bench-201-entangled", method)
        assert len(cells) == (4 if method == "darts" else 5)
        places, taus = sorted(row["rank"] for row in cells), sorted(row["tau"] for row in cells)
        between = rf"{places[0]:,} to {places[-1]:,} with (a tau of )?{taus[0]:.2f} to {taus[-1]:.2f}"
        assert re.search(between, text)


def test_every_pick_by_present_defaults_is_in_a_result_file() -> None:
    (body,) = re.findall(r"^\| method, present defaults .*\n\|[-|]+\n((?:\|.*\n)+)", README, re.M)
    table = {name: shown for name, *shown in ([c.strip() for c in line.split("|")[1:-1]] for line in body.splitlines())}
    early, late = rows("search-picks"), rows("search-defaults")
    assert {row["method"] for row in early} == {"darts", "drnas", "gdas"}
    measured = {
        name: [[f"{rank:,}" for rank in ranks(name, space)] for space in ("nas-bench-macro", "nas-bench-201")]
        for name, ranks in {
            "gdas": lambda name, space: _ranks(early, name, space),
            "drnas": lambda name, space: [row["picks"]["missed"]["rank"] for row in _own(early, name, space)],
            **dict.fromkeys(SAMPLED, lambda name, space: _ranks(late, name, space)),
            "darts": lambda name, space: [
                *(row["picks"]["missed"]["rank"] for row in _own(early, name, space)),
                *_ranks(late, name, space),
            ],
            "darts, likeliest subnet": lambda name, space: _ranks(early, "darts", space),
            "drnas, likeliest subnet": lambda name, space: _ranks(early, "drnas", space),
        }.items()
    }
    assert table == {name: [", ".join(one) for one in found] for name, found in measured.items()}
    text = " ".join(README.split())
    fresh = [row for row in late if row["method"] == "darts"]
    assert [row["seed"] for row in fresh] == [2, 2, 3]
    assert all(row["top1pct"] for row in fresh)
    took = [row["seconds"] for row in fresh]
    assert f"in {min(took):.0f} to {max(took):.0f} seconds" in text
    taus = [row["tau"] for row in _own(early, "drnas", "nas-bench-macro")]
    assert "on NAS-Bench-Macro is {:.2f} and {:.2f} (aim".format(*taus) in text


def _own(found: list[dict[str, Any]], method: str, space: str) -> list[dict[str, Any]]:
    return [row for row in found if (row["method"], row["space"]) == (method, space)]


def _ranks(found: list[dict[str, Any]], method: str, space: str) -> list[int]:
    return [row["rank"] for row in _own(found, method, space)]


def test_what_the_readme_says_of_steps_of_a_search_is_in_a_result_file() -> None:
    found = rows("search-steps")
    text = " ".join(README.split())

    def ratios(graphs: bool, *tokens: int) -> str:
        own = [row for row in found if row["graphs"] is graphs and row["tokens"] in tokens]
        every = [row[f"{way}_ratio"] for row in own for way in ("weights", "architecture")]
        return f"{min(every):.2f} to {max(every):.2f}"

    assert f"a step takes {ratios(True, 197)} times" in text
    assert f"{ratios(True, 3152)} at 3,152 and {ratios(True, 50432)} at 50,432" in text
    assert f"it takes {ratios(False, 197, 3152, 50432)} times such a plain step" in text
    key = ("network", "precision", "tokens")
    timed = {(*(row[k] for k in key), row["graphs"]): row for row in found}
    slower = [
        timed[*case, False][way] / timed[*case, True][way]
        for *case, graphs in timed
        for way in ("weights_ms", "architecture_ms")
        if graphs and (*case, False) in timed
    ]
    assert f"up to {max(slower):.0f} times as long" in text


def test_every_figure_of_the_table_of_entangled_spaces_is_in_a_result_file() -> None:
    names = {"gpt": "small GPT, tiny Shakespeare", "autoformer": "small AutoFormer, CIFAR-10"}
    for space, shown in names.items():
        last = {row["method"]: f"{row['loss']:.2f}" for row in rows("anytime") if row["space"] == space}
        assert f"| {shown} | {' | '.join(last[m] for m in ('darts', 'drnas', 'gdas', 'spos'))} |" in README


def test_every_figure_of_the_table_of_the_planner_is_in_a_result_file() -> None:
    measured = [row for row in rows("planner") if "limit" not in row]
    table = re.findall(
        r"^\| (Inception-v3|Transformer) \| ([\d,]+) \| (.*?) \| (\d+) MiB \| (.*?) \| .*\|$", README, re.M
    )
    assert len(table) == 6
    names = {"Inception-v3": "inception3", "Transformer": "transformer"}
    for name, devices, taken, memory, theirs in table:
        (row,) = (r for r in measured if (r["graph"], r["p"]) == (names[name], int(devices.replace(",", ""))))
        seconds = float(str(row["seconds"]))
        assert taken == (f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s")
        assert memory == f"{row['peak_mib']:.0f}"
        assert theirs == (f"{row['pase_seconds']:.1f} s" if row.get("pase_seconds") else "")
    assert f"{result('planner')['ratio_geomean']:,.0f} times less time" in README
    single = [row["ratio"] for row in measured if row.get("ratio") and row["graph"] in names.values()]
    assert f"single cases {min(single):,.0f} to {max(single):,.0f} times" in README
    assert all(row["optimal"] for row in measured)
    capture = result("planner-capture")
    assert f"{capture['captured']} of {len(capture['rows'])} models" in README


def test_every_figure_of_the_table_of_asynchronous_pipelines_is_in_a_result_file() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "paci.json").read_text())
    rows = {(row["k"], row["method"]): row for row in found["rows"]}
    ks = sorted({k for k, _ in rows})
    names = {
        "torch-1f1b": "torch's `Schedule1F1B`",
        "torch-zbv": "torch's `ScheduleZBVZeroBubble`",
        "weft-flush": "weft, 1F1B with a flush",
        "weft-zbh1": "weft, zero-bubble H1",
        "weft-interleaved": "weft, two stages a rank",
        "weft-bounded": "weft, `bounded(K, 2)`",
        "weft-bounded-w": "the same, gradients of weights put off",
    }

    def cell(row: dict[str, Any]) -> str:
        sooner = row["ratio_to_torch_1f1b"]
        return f"{row['step_ratio_to_torch_1f1b']:.2f} ({'never' if sooner is None else f'{sooner:.2f}'})"

    for method, name in names.items():
        assert f"| {name} | {' | '.join(cell(rows[k, method]) for k in ks)} |" in README
    # The losses of every short run were those of the law on one device, to the last bit.
    assert all(row["largest_difference"] == 0.0 for row in found["rows"] if row["method"].startswith("weft"))
    assert (found["task"]["lr"], found["task"]["late_lr"]) == (2e-3, 1e-3)
    share = min(rows[k, "weft-bounded"]["utilisation"] for k in ks)
    assert f"work {100 * share:.0f} % of the time or more" in README
    wanted = ("equal", 8, 8, 0.0, 8)
    keys = ("costs", "stages", "k", "communication", "depth")
    simulated = next(row for row in found["rows_simulator"] if tuple(row[key] for key in keys) == wanted)
    assert f"8 stages with K = 8 are {simulated['ratio']:.2f} times as fast" in README
    own = [row for row in found["rows_memory"] if (row["precision"], row["method"]) == ("fp32", "weft-bounded")]
    flying = " and ".join(str(row["in_flight"]) for row in own)
    assert f"Memory with one copy: {flying} micro-batches in flight, {own[0]['weight_copies']:.0f} copy" in README
    assert f"{max(row['ratio_to_flush'] for row in own):.2f} of the flush's at most" in README


def test_what_the_readme_says_of_pipelines_with_muon_is_in_a_result_file() -> None:
    text = " ".join(README.split())

    def both(name: str, method: str, key: str) -> str:
        found = {(row["k"], row["method"]): row for row in rows(name)}
        return " and ".join(f"{found[k, method][key]:.2f}" for k in (2, 4))

    def more(name: str) -> str:
        found = {(row["k"], row["method"]): row["steps_to_loss"] for row in rows(name)}
        parts = [found[k, "weft-bounded"] / found[k, "weft-flush"] - 1 for k in (2, 4)]
        return " and ".join(f"{100 * part:.0f}" for part in parts)

    sooner, step, flush = "ratio_to_torch_1f1b", "step_ratio_to_torch_1f1b", "step_ratio_to_flush"
    large, small = (
        (both(name, "weft-bounded", sooner), both(name, "weft-bounded", step), both(name, "torch-zbv", sooner))
        for name in ("paci-muon-large", "paci-muon")
    )
    assert f"`bounded` is {large[0]} times as soon there as torch's 1F1B at K = 2 and 4 ({large[1]} by step," in text
    assert f"with {more('paci-muon-large')} % more steps), torch's zero-bubble schedule {large[2]}." in text
    assert f"it was {small[0]} times ({small[1]} by step), torch's zero-bubble schedule {small[2]};" in text
    every = result("paci-muon")["steps"]
    assert {own["seeds"] for own in every.values()} == {3}
    means = [f"{100 * every[k]['mean']:.0f}" for k in ("2", "4")]
    assert f"cost {more('paci-muon')} % more steps there, over three seeds {' and '.join(means)}." in text
    assert f"a step with 32 rows is {both('paci-muon-large', 'weft-bounded', flush)} times as fast" in text
    slower = [100 * (1 / float(ratio) - 1) for ratio in both("paci-muon-large", "weft-flush", step).split(" and ")]
    assert f"takes {slower[0]:.0f} and {slower[1]:.0f} % longer than torch's" in text
    found = [*rows("paci-muon-large"), *rows("paci-muon")]
    assert {row["repeats"] for row in found} == {9}
    assert all(row["largest_difference"] == 0.0 for row in found if row["method"].startswith("weft"))
    assert result("paci-muon-large")["task"]["rows"] == 32


def test_every_figure_of_the_table_of_studies_is_in_a_result_file() -> None:
    words = {"a fourth of the device each": "fixed=4", "an eighth of the device each": "fixed=8", "packed": "packed"}
    words |= {"one at a time": "one", "packed, equal shapes fused": "fused", "half of the device each": "fixed=2"}
    parts = {"all 64": "ways", "the 40 that can be fused": "fusable", "64, of which 8 are huge": "uneven"}
    table = re.findall(rf"^\| ({'|'.join(parts)}) \| ([\w ,]+) \| (yes|no) \| (\S+) \| (\S+) \| (\d+) \|", README, re.M)
    told = [
        (parts[which], words[way], mps == "yes", seconds, ratio, int(oom))
        for which, way, mps, seconds, ratio, oom in table
    ]
    measured = {
        (row["part"], row["way"], row["asked"]): row
        for row in (*rows("tune"), *rows("tune-uneven"), *rows("tune-fusable"))
    }
    for part, way, mps, seconds, ratio, oom in told:
        row = measured[part, way, "auto" if mps else "off"]
        assert row["mps"] is mps
        assert (f"{row['makespan_s'] + 1e-9:.1f}", f"{row['ratio']:.2f}", row["oom"]) == (seconds, ratio, oom)
    assert len(told) == len(measured) == 15


def test_what_the_readme_says_of_studies_is_in_a_result_file() -> None:
    for name, part, ratio in (("tune", "ways", "{:.2f}, since there"), ("tune-uneven", "uneven", "fit it, {:.2f};")):
        taken = {row["way"]: row["makespan_s"] for row in rows(name) if row["part"] == part and row["mps"]}
        best = min(seconds for way, seconds in taken.items() if way.startswith("fixed"))
        assert ratio.format(best / taken["fused"]) in README
    every = [
        row for name in ("tune", "tune-uneven", "tune-again", "tune-fusable", "tune-threads") for row in rows(name)
    ]
    packed = [row for row in every if row["way"] in ("packed", "fused")]
    assert sum(row["oom"] for row in packed) == 0
    assert f"none in {sum(row['trials'] for row in packed)}, with" in README
    assert all(row["same"] in (row["trials"], None) for row in packed if row["way"] == "packed")
    (fixed,) = (row for row in rows("tune") if row["way"] == "fixed=8")
    large = [seconds for number, _, _, seconds in fixed["spans"] if number % 8 == 7]
    assert f"for {sum(large):.0f} s" in README
    begun = [min(span[1] for span in row["spans"]) for row in packed]
    assert f"the first trial begins {min(begun):.1f} to {max(begun):.1f} s after" in README
    threads = {(row["way"], row["asked"]): row for row in rows("tune-threads")}
    by = [f"{threads[f'n_jobs={jobs}', 'off']['ratio']:.2f}" for jobs in (2, 4, 8)]
    assert f"one at a time {threads['one', 'off']['makespan_s']:.1f} s" in README
    assert f"threads of one process, {by[0]}, {by[1]} and {by[2]} times as fast" in README
    ours = [f"{threads[way, 'auto']['ratio']:.2f}" for way in ("packed", "fused", "fixed=8")]
    assert f"packed {ours[0]} and fused {ours[1]} times, an eighth of the device each {ours[2]} times" in README
    assert not any(row["oom"] for (way, _), row in threads.items() if way in ("packed", "fused"))


def test_what_the_readme_says_of_micro_batches_is_in_a_result_file() -> None:
    found = [row for row in rows("microbatch") if row["true"]]
    assert all(row["told"] <= row["true"] for row in found)
    ratios = {
        kind: [row["ratio"] for row in found if row["family"] == kind[0] and row["precision"] in kind[1:]]
        for kind in (("transformer", "bf16", "fp32"), ("conv", "bf16"), ("conv", "fp32"))
    }
    words = (
        "transformers {:.2f} to {:.2f} of it",
        "convolutional nets {:.2f} to {:.2f} in bf16",
        "and {:.2f} in float32",
    )
    for word, own in zip(words, ratios.values(), strict=True):
        assert word.format(min(own), max(own)) in README
    convolutions = [row["unforced_ratio"] for row in found if row["family"] == "conv"]
    calm = "they are {:.2f}, {:.2f} and {:.2f}".format(*sorted(convolutions[::2], reverse=True), convolutions[1])
    assert calm in README
    assert sum(row["ratio"] < 0.95 for row in found) == 2  # of seven, as is told
    assert sum(row["unforced_ratio"] < 0.95 for row in found) == 1
    assert sum(map(len, ratios.values())) == len(found) == 7


def test_every_figure_of_the_table_of_residency_is_in_a_result_file() -> None:
    table = re.findall(
        r"^\| (NLP\.c\d|wide) \| (\S+) \| (\S+) \| ([\d,]+) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \| (\S+) % \|",
        README,
        re.M,
    )
    measured = {(row["space"], row["tokens"], row["way"]): row for row in rows("residency")}
    for space, state, budget, tokens, *told in table:
        weft, resident, demand = (
            measured[space, int(tokens.replace(",", "")), way] for way in ("weft", "resident", "on-demand")
        )
        assert (state, budget) == (f"{weft['state_gib']:.1f}", f"{weft['budget_gib']:.1f}")
        times = [f"{row['step_ms']:.1f}" for row in (resident, weft, demand)]
        assert told == [*times, f"{weft['ratio_to_bound']:.2f}", f"{100 * weft['hit_rate']:.1f}"]  # type: ignore[operator]
    assert len(table) == 8
    again = {(row["space"], row["tokens"], row["way"]): row for row in rows("residency-again")}
    beyond = {key: f"{100 * (row['ratio_to_bound'] - 1):.0f}".replace("-0", "0") for key, row in again.items()}
    wide = again["wide", 512, "weft"]
    assert f"{beyond['wide', 512, 'weft']} % on the wide space at 512 tokens" in README
    assert f"{again['wide', 512, 'on-demand']['step_ms'] / wide['step_ms']:.1f} times as fast as on demand" in README
    first, second, third = (beyond["NLP.c2", tokens, "weft"] for tokens in (512, 2048, 8192))
    assert f"on NLP.c2 {first}, {second} and {third} % at" in README
    apart = [
        max(again["NLP.c2", 512, way]["rounds_ms"]) / min(again["NLP.c2", 512, way]["rounds_ms"]) - 1
        for way in ("weft", "resident")
    ]
    assert f"among themselves by {100 * apart[0]:.0f} % there, resident ones by {100 * apart[1]:.0f} %" in README


def test_what_the_readme_says_of_estimates_is_in_a_result_file() -> None:
    told, counts = [], []
    for name in ("memory-expandable", "memory"):
        found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["summary"]["fresh"]
        for what in ("allocated", "reserved"):
            one = found[what]
            told.append(f"{one['median']:.2%}, {one['p95']:.1%}, {-one['most_under']:.1%}".replace("%", " %"))
        assert found["allocated"]["count"] == found["reserved"]["count"]
        counts.append(str(found["allocated"]["count"]))
    sentence = re.search(r"`memory-expandable.json`, (\d+) of them.*?median error (\S+ %), 95th percentile (\S+ %), never under by more than (\S+ %); reserved, (\S+ %), (\S+ %) and (\S+ %)", README, re.S)  # fmt: skip # noqa: E501
    assert sentence is not None
    assert sentence.groups() == (counts[0], *", ".join(told[:2]).split(", "))
    own = told[3].rpartition(", ")
    assert f"(`memory.json`, {counts[1]} of them) what is allocated is known as well" in README
    assert f"what is reserved is not: {own[0]} and {own[2]}." in README
