"""The demo: from a search space to an extracted model on real digits, in about a minute on two cores."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.data import digits
from weft.pipeline import Optimizer, Trained, accuracy, train
from weft.progress import Bar
from weft.search import Scorer, latency, run_search, search
from weft.search.export import same_bits
from weft.search.objective import parse_objectives
from weft.space import Subnet
from weft.supernet import export
from weft.zoo import digits_conv

SEED = 0


def run_demo(runs: Path, console: Console, steps: int = 2000, budget: int = 120) -> dict[str, Any]:
    """Runs it all and returns what it printed, as plain values."""
    began = time.perf_counter()
    data = digits()
    subnets = digits_conv().space.size()
    _say(console, "1  train", f"a supernet of {subnets:,} subnets on {len(data.train):,} real digits")
    with Bar(console, "train", steps) as bar:
        trained = train(
            digits_conv,
            data,
            steps=steps,
            batch_size=64,
            optimizer=Optimizer("sgd", lr=0.05, momentum=0.9, weight_decay=5e-4),
            metrics={"accuracy": accuracy},
            seed=SEED,
            runs=runs,
            run=time.strftime("demo-%Y%m%d-%H%M%S"),
            callbacks=[bar.train],
        )
    _say(console, "", f"fingerprint {trained.fingerprint}")

    _say(console, "2  search", f"{budget} of them with inherited weights, on validation data only")
    with Bar(console, "search", budget) as bar:
        front = search(trained, maximize="accuracy", minimize="flops", budget=budget, seed=SEED, on_score=bar.search)
    scorer = Scorer(trained.chain, trained.data, trained.settings)
    table = Table("accuracy", "parameters", "FLOPs", "latency ms", "subnet")
    for member in front:
        ms = latency(member.extract(), scorer.inputs(member.subnet))
        s = member.scores
        choices = " ".join(str(value) for value in member.subnet.values.values())
        table.add_row(f"{s['accuracy']:.4f}", f"{s['parameters']:,.0f}", f"{s['flops']:,.0f}", f"{ms:.2f}", choices)
    console.print(table)

    _say(console, "3  test", "once, with data that neither training nor search has seen")
    objectives = parse_objectives("accuracy", ())
    drawn = run_search(trained.chain.space, scorer.quality, "random", objectives, budget=budget, seed=SEED + 1)
    best = front.best()
    picks = {"chosen": best.subnet, "random search": drawn.front.best().subnet, "largest": trained.chain.largest()}
    tested = _test(trained, scorer, picks, console)

    _say(console, "4  extract", "the chosen subnet as a plain nn.Module")
    assert data.test is not None
    equal = same_bits(trained, scorer, best.subnet, data.test.take(np.arange(len(data.test))))
    about = {
        "subnet": best.subnet.to_json(),
        "scores": dict(best.scores),
        "test": tested["chosen"],
        "command": "weft demo",
    }
    inputs, folder = scorer.inputs(best.subnet), trained.path / "results" / "best"
    files = export(scorer.extract(best.subnet), inputs, folder, ("safetensors", "torch"), about)
    _say(console, "", f"same outputs as in the supernet, to the last bit: {'yes' if equal else 'NO'}")
    _say(console, "5  where", f"the run lies in {trained.path}")
    for what, path in files.items():
        _say(console, "", f"{what:12} {path}")
    seconds = time.perf_counter() - began
    _say(console, "", f"done in {seconds:.0f} s")
    return {
        "run": str(trained.path),
        "fingerprint": trained.fingerprint,
        "front": front.to_json(),
        "test": tested,
        "extraction_bit_equal": equal,
        "files": {what: str(path) for what, path in files.items()},
        "seconds": seconds,
    }


def _say(console: Console, title: str, text: str) -> None:
    console.print(Text.assemble((title or "  ", "bold"), " ", text), soft_wrap=True)


def _test(trained: Trained, scorer: Scorer, picks: dict[str, Subnet], console: Console) -> dict[str, dict[str, float]]:
    table = Table("subnet", "test accuracy", "parameters", "FLOPs")
    found = {}
    for name, subnet in picks.items():
        scores, costs = scorer.test(subnet), scorer.cheap(subnet)
        with trained.run.locked():
            trained.run.record_test(name, scores)
        found[name] = {**scores, **costs}
        table.add_row(name, f"{scores['accuracy']:.4f}", f"{costs['parameters']:,.0f}", f"{costs['flops']:,.0f}")
    console.print(table)
    return found
