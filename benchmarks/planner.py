"""The planner's solver on PaSE's own tables and on large graphs: optimum, CPU time, memory, and a Markov chain beside.

    python benchmarks/planner.py [--quick] [--tables DIR] [--json FILE]
    python benchmarks/planner.py --limits [--json FILE]

Each row is solved in a process of its own, on one thread: ``seconds`` is the median CPU time of five solutions from
the tables (the first, with nothing warm, is ``first``), ``peak_mib`` the most memory that the process ever held,
tables, interpreter and all. With ``--tables`` every pair of tables (JSON and NPZ) in the folder is solved, and compared
with the optimum and the CPU time of PaSE in its ``results.json``. To reach: the optimum everywhere; at least 1000 times
less CPU than PaSE in the geometric mean over Inception and Transformer; Inception at 64 devices in 0.2 s, Transformer
in 2 s and 1 GiB; 96 layers on 1024 devices within a minute, proven or within 1 %. The chain walks as long as the solver
took, and as long as PaSE took or 10 s, from data parallelism where the graph is PaSE's; its ``gap`` is
(cost - optimum) / optimum.

``--limits`` solves the rows with a limit on the weights alone, once each: with everything, and without each of the
steps that follow the pricing of the weights. ``worse`` is how much higher the cost is than with everything.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pase import tables as pase_tables
from pase.markov_chain import markov_chain

from weft.plan.solver import Problem, solve
from weft.utils import rng

Table = NDArray[np.float64]
Case = dict[str, Any]

BATCH = {"alexnet": 128, "inception3": 128, "rnnlm": 64, "transformer": 64, "transformer-large": 64}
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
LAYER = (  # a transformer's layer: the vertices, and which reads which; "in" is what comes before the layer
    ("norm1", "in"),
    ("query", "norm1"),
    ("key", "norm1"),
    ("value", "norm1"),
    ("scores", "query", "key"),
    ("softmax", "scores", "mask"),
    ("context", "softmax", "value"),
    ("out", "context"),
    ("add1", "out", "in"),
    ("norm2", "add1"),
    ("up", "norm2"),
    ("down", "up"),
    ("add2", "down", "add1"),
)


def from_files(case: Case) -> Problem:
    """Tables as PaSE's own code wrote them."""
    stem = Path(case["folder"]) / case["stem"]
    about = json.loads(stem.with_suffix(".json").read_text())
    with np.load(stem.with_suffix(".npz"), allow_pickle=False) as arrays:
        unary = tuple(arrays[f"v{vertex['id']}"] for vertex in about["vertices"])
        return Problem(unary, {(i, j): arrays[f"e{i}_{j}"] for i, j in about["edges"]})


def from_pase(case: Case) -> Problem:
    """Tables of PaSE's model, built for any number of devices."""
    unary, pairs, _ = pase_tables(case["graph"], case["p"], BATCH[case["graph"]])
    return Problem(tuple(unary), pairs)


def from_layers(case: Case) -> Problem:
    """A made-up transformer: each vertex has 60 to 130 configurations, each of which reads and writes its tensors in
    some of 24 ways; moving a tensor costs the distance between the ways. All layers read one mask. Layers are equal, or
    each costs a little else; with ``limit`` the weights have to fall to that part of the way from those of the optimum
    to the least."""
    draw = rng.generator("layers", case["layers"])
    ways = draw.normal(size=(24, 3))
    moves = np.abs(ways[:, None] - ways[None]).sum(axis=2)
    kinds = {name: int(draw.integers(60, 131)) for name, *_ in LAYER} | {"mask": 20, "in": 60}
    reads = {name: draw.integers(24, size=count) for name, count in kinds.items()}
    writes = {name: draw.integers(24, size=count) for name, count in kinds.items()}
    costs = {name: draw.gamma(2.0, 1.0, count) for name, count in kinds.items()}
    weights = {name: draw.gamma(2.0, 1.0, count) for name, count in kinds.items()}
    edges: dict[tuple[str, str], Table] = {}
    unary: list[Table] = []
    loads: list[Table] = []
    pairs: dict[tuple[int, int], Table] = {}

    def add(name: str) -> int:
        other = 1.0 if case["equal"] else draw.uniform(0.8, 1.2, kinds[name])
        unary.append(costs[name] * other)
        loads.append(weights[name])
        return len(unary) - 1

    mask, before, kind = add("mask"), add("in"), "in"
    for _ in range(case["layers"]):
        here = {"mask": (mask, "mask"), "in": (before, kind)}
        for name, *sources in LAYER:
            here[name] = (add(name), name)
            for source in sources:
                vertex, what = here[source]
                if (what, name) not in edges:
                    edges[what, name] = draw.uniform(0.2, 2.0) * moves[np.ix_(writes[what], reads[name])]
                pairs[vertex, here[name][0]] = edges[what, name]
        before, kind = here["add2"]
    problem = Problem(tuple(unary), pairs)
    if "limit" not in case:
        return problem
    heavy = Problem(problem.unary, pairs, tuple(loads)).weight(solve(problem).assignment)
    light = math.fsum(float(load.min()) for load in loads)
    return Problem(problem.unary, pairs, tuple(loads), light + case["limit"] * (heavy - light))


def from_model(case: Case) -> Problem:
    """A model captured from ``transformers``, on a mesh of H100s."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

    from weft.hardware.machine import machine
    from weft.plan.capture import capture
    from weft.plan.costs import TrainingSpec, tables
    from weft.plan.sharding import Mesh

    with torch.device("meta"):
        batch = {"input_ids": torch.zeros(case["p"], 128, dtype=torch.long)}
        model: torch.nn.Module
        if case["graph"] == "t5-base":
            sizes = {"d_model": 768, "d_ff": 3072, "num_layers": case["layers"], "num_heads": 12}
            model = T5ForConditionalGeneration(T5Config(**sizes, use_cache=False, decoder_start_token_id=0))
            batch["labels"] = batch["input_ids"]
        else:
            config = GPT2Config(n_layer=case["layers"], n_embd=1536, n_head=16, use_cache=False)
            model = GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]
        graph = capture(model, batch).graph
    found = tables(graph, Mesh(tuple(case["mesh"])), machine("h100"), TrainingSpec(dtype="bfloat16"))
    if "limit" not in case:
        return found.problem()
    heavy = found.weight(solve(found.problem()).assignment)
    light = math.fsum(float(memory.min()) for memory in found.memory)
    return found.problem(light + case["limit"] * (heavy - light))


def leave_out(step: str) -> None:
    """Solves without one of the steps that follow the pricing of the weights."""
    limited: Any = importlib.import_module("weft.plan.solver.solve")
    if "beam" in step:
        limited.beam_search = lambda *_: (None, 0.0)
    if "cases" in step:
        limited.branch_on_vertex = lambda _, found, *__: found


BUILD: dict[str, Callable[[Case], Problem]] = {
    "files": from_files,
    "pase": from_pase,
    "layers": from_layers,
    "model": from_model,
}


def cases(quick: bool, folder: str | None) -> list[Case]:
    """What is solved, in order."""
    found: list[Case] = []
    if folder:
        known = _results(folder)
        for path in sorted(Path(folder).glob("*.npz")):
            about = json.loads(path.with_suffix(".json").read_text())
            graph, p = about["graph"], about["p"]
            found.append({"from": "files", "folder": folder, "stem": path.stem, "graph": graph, "p": p})
            found[-1] |= known.get((graph, p), {})
        found.sort(key=lambda case: (case["graph"], case["p"]))
    graphs = ("alexnet", "inception3", "rnnlm", "transformer")
    counts = (16, 64) if quick else (16, 64, 96, 256, 1024)
    found += [{"from": "pase", "graph": graph, "p": p} for graph in graphs for p in counts]
    for layers in (12,) if quick else (12, 96):
        for equal in (True, False):
            case = {"from": "layers", "graph": f"layers-{layers}{'' if equal else '-unequal'}", "layers": layers}
            found.append(case | {"equal": equal})
            found += [case | {"equal": equal, "limit": share} for share in (0.7, 0.3)]
    if not quick:
        model = {"from": "model", "graph": "gpt2-96", "layers": 96, "p": 1024, "mesh": [8, 16, 8]}
        found += [model, *[model | {"limit": share} for share in (0.9, 0.5, 0.1)]]
        model = {"from": "model", "graph": "t5-base", "layers": 12, "p": 64, "mesh": [4, 4, 4]}
        found += [model, *[model | {"limit": share} for share in (0.5, 0.1, 0.05)]]
    return found


def _results(folder: str) -> dict[tuple[str, int], Case]:
    path = Path(folder) / "results.json"
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text())
    return {
        (row["graph"], row["p"]): {
            "optimum": row["optimal_cost_dense_elim"],
            "pase_seconds": row.get("pase_search_cpu_s"),
        }
        for row in rows
    }


def solved(case: Case, quick: bool) -> Case:
    """One row; meant for a process of its own."""
    problem = BUILD[case["from"]](case)
    times = []
    for _ in range(3 if quick else 5):
        started = time.process_time()
        found = solve(Problem(problem.unary, problem.pairs, problem.weights, problem.limit))
        times.append(time.process_time() - started)
        if sum(times) > 20:
            break
    peak = _peak_mib()
    row = {
        "graph": case["graph"],
        "p": case.get("p"),
        "vertices": len(problem.unary),
        "edges": len(problem.pairs),
        "configs": max(len(costs) for costs in problem.unary),
        "cost": found.cost,
        "optimal": found.optimal,
        "gap": found.gap,
        "seconds": statistics.median(times),
        "first": times[0],
        "peak_mib": peak,
        "method": found.method,
        "tables": case["from"],
    }
    if "limit" in case:
        return row | {"limit": case["limit"], "filled": found.weight / problem.limit}
    if "optimum" in case:
        row |= {"optimum": case["optimum"], "equal": abs(found.cost - case["optimum"]) <= 1e-9 * case["optimum"]}
    paid = case.get("pase_seconds")
    if paid:
        row |= {"pase_seconds": paid, "ratio": paid / row["seconds"]}
    longer = min(10.0, paid or 10.0)
    walked, start = _chain_of(case, problem)
    row["chain_start"] = None if start is None else walked.cost(start) / found.cost - 1
    for name, seconds in (("same", row["seconds"]), ("longer", min(longer, 1.0) if quick else longer)):
        walk = markov_chain(walked, seconds, start=start)
        row[f"chain_{name}"] = {"seconds": seconds, "gap": walk.cost / found.cost - 1, "proposals": walk.proposals}
    return row


def _chain_of(case: Case, problem: Problem) -> tuple[Problem, tuple[int, ...] | None]:
    """What a chain walks on and where it starts: data parallelism on PaSE's networks, all on every device for a
    model."""
    if case["graph"] in BATCH:  # the files' tables with configurations in an order in which we know that one
        unary, pairs, about = pase_tables(case["graph"], case["p"], BATCH[case["graph"]])
        return Problem(tuple(unary), pairs), about.data_parallel()
    return problem, (0,) * len(problem.unary) if case["from"] == "model" else None


def limits(case: Case) -> Case:
    """One row with a limit, solved once, perhaps without a step."""
    leave_out(case["without"])
    problem = BUILD[case["from"]](case)
    started = time.process_time(), time.monotonic()
    found = solve(problem)
    return {
        **{key: case[key] for key in ("graph", "limit", "without")},
        "cost": found.cost,
        "gap": found.gap,
        "method": found.method,
        "seconds": time.process_time() - started[0],
        "elapsed": time.monotonic() - started[1],
    }


def _peak_mib() -> float:
    """The most memory this process held. What getrusage says starts from what the process that started it held."""
    status = Path("/proc/self/status")
    if status.is_file():
        held = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(held.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def apart(case: Case, quick: bool) -> Case:
    """One row from a fresh process."""
    command = [sys.executable, __file__, "--row", json.dumps(case), *(["--quick"] if quick else [])]
    done = subprocess.run(command, env=os.environ | ONE_THREAD, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case['graph']} (p = {case.get('p')}) failed:\n{done.stderr}")
    row: Case = json.loads(done.stdout.splitlines()[-1])
    return row


def without_each(quick: bool) -> Iterator[Case]:
    """The rows with a limit, with everything and without each step."""
    for case in cases(quick, None):
        if "limit" not in case:
            continue
        whole = math.nan
        for step in ("", "beam, cases", "beam", "cases"):
            row = apart(case | {"without": step}, quick)
            whole = row["cost"] if not step else whole
            row["worse"] = row["cost"] / whole - 1
            print(
                f"{row['graph']:20} <{row['limit']:<5} without {step or '-':8} cost {row['cost']:<18.12g} "
                f"{row['worse']:+8.3%} gap {row['gap']:8.3%} {row['seconds']:8.2f} s",
                flush=True,
            )
            yield row


def summary(rows: list[Case]) -> Case:
    """The figures that the targets are about."""
    ratios = [row["ratio"] for row in rows if "ratio" in row and row["graph"] in ("inception3", "transformer")]
    wide = {row["graph"]: row for row in rows if row["p"] == 64 and row["tables"] == "pase"}
    return {
        "all_optimal": all(row["optimal"] for row in rows if "limit" not in row),
        "all_equal": all(row.get("equal", True) for row in rows),
        "worst_gap": max(row["gap"] for row in rows),
        "ratio_geomean": math.exp(statistics.fmean(map(math.log, ratios))) if ratios else None,
        "ratios": len(ratios),
        "inception3_64_seconds": wide["inception3"]["seconds"],
        "transformer_64_seconds": wide["transformer"]["seconds"],
        "transformer_64_peak_mib": wide["transformer"]["peak_mib"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer devices, layers and repetitions")
    parser.add_argument("--tables", metavar="DIR", help="a folder with pairs of tables, and results.json beside them")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--limits", action="store_true", help="rows with a limit alone, also without each step")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        case = json.loads(options.row)
        print(json.dumps(limits(case) if "without" in case else solved(case, options.quick)))
        return
    from machine import write  # imports torch, which a row does without

    if options.limits:
        write(options.json, rows=list(without_each(options.quick)))
        return
    print(
        f"{'graph':24} {'p':>5} {'vertices':>8} {'configs':>7} {'cost':>18} {'gap':>8} {'seconds':>9} {'MiB':>6}"
        f" {'over PaSE':>9}  chain: start, same time, longer"
    )
    rows = []
    for case in cases(options.quick, options.tables):
        row = apart(case, options.quick)
        rows.append(row)
        name = row["graph"] + (f" <{row['limit']}" if "limit" in row else "")
        proven = "optimal" if row["optimal"] else f"{row['gap']:.3%}"
        ratio = f"{row['ratio']:.0f}x" if "ratio" in row else ""
        chain = ""
        if "chain_same" in row:
            gaps = (row["chain_start"], row["chain_same"]["gap"], row["chain_longer"]["gap"])
            chain = "  ".join("" if gap is None else f"{gap:+.2%}" for gap in gaps)
        print(
            f"{name:24} {row['p'] or '':>5} {row['vertices']:>8} {row['configs']:>7} {row['cost']:>18.12g} {proven:>8}"
            f" {row['seconds']:>9.4f} {row['peak_mib']:>6.0f} {ratio:>9}  {chain}",
            flush=True,
        )
    found = summary(rows)
    for key, value in found.items():
        print(f"{key}: {value}")
    write(options.json, rows=rows, **found)


if __name__ == "__main__":
    main()
