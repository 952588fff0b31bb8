"""The demo: from a search space to an extracted model and a report, on real digits, in a minute on two cores."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.cli.arguments import AsJson
from weft.cli.output import console, print_json
from weft.cli.progress import Bar
from weft.data import digits
from weft.engine.losses import accuracy
from weft.engine.optimizer import Optimizer
from weft.search import Scorer, latency, run_search, search
from weft.search.export import same_bits
from weft.search.objectives import parse_objectives
from weft.serve.report import write_report
from weft.space import Subnet
from weft.supernet import export
from weft.trace.analysis import summary
from weft.trace.reader import read_traces
from weft.trainer.api import TrainedRun, train
from weft.trainer.config import RunConfig
from weft.zoo import digits_conv

SEED = 0
STAGES = 2
SHARED = "lagged(2)"
"""The consistency of the layers that every subnet uses. With `exact` the stages would wait half of the time; `delayed`
does badly under SGD with momentum, and a longer lag costs accuracy, which this one does not."""


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread, as each stage has: fingerprints depend on it, and small networks gain nothing from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def run_demo(runs: Path, console: Console, steps: int = 2000, budget: int = 120) -> dict[str, Any]:
    """Runs the demo and returns what it printed, as plain values."""
    began = time.perf_counter()
    data = digits()
    subnets = digits_conv().space.size()
    _say(
        console, "1  train", f"a supernet of {subnets:,} subnets on {len(data.train):,} real digits, on {STAGES} stages"
    )
    trained, busy, seconds = _train(console, steps, STAGES, runs, time.strftime("demo-%Y%m%d-%H%M%S"))
    shares = ", ".join(f"stage {stage} {100 * share:.0f} %" for stage, share in enumerate(busy))
    _say(console, "", f"busy: {shares}")
    _say(console, "", f"fingerprint {trained.fingerprint} in {seconds:.1f} s")

    _say(console, "2  prove", "that one stage, where nothing runs at once, gives the same bits")
    with tempfile.TemporaryDirectory(prefix="weft-demo-") as elsewhere:
        alone, _, seconds_alone = _train(console, steps, 1, Path(elsewhere), "alone")
    same = alone.fingerprint == trained.fingerprint
    _say(console, "", f"fingerprint {alone.fingerprint} in {seconds_alone:.1f} s")
    _say(console, "", f"same: {'yes' if same else 'NO'}")

    _say(console, "3  search", f"{budget} of them with inherited weights, on validation data only")
    with Bar(console, "search", budget) as bar:
        front = search(trained, maximize="accuracy", minimize="flops", budget=budget, seed=SEED, on_score=bar.search)
    scorer = Scorer(trained)
    table = Table("accuracy", "parameters", "FLOPs", "latency ms", "subnet")
    for member in front:
        ms = latency(member.extract(), scorer.inputs(member.subnet))
        s = member.scores
        choices = " ".join(str(value) for value in member.subnet.values.values())
        table.add_row(f"{s['accuracy']:.4f}", f"{s['parameters']:,.0f}", f"{s['flops']:,.0f}", f"{ms:.2f}", choices)
    console.print(table)

    _say(console, "4  test", "once, with data that neither training nor search has seen")
    objectives = parse_objectives("accuracy", ())
    drawn = run_search(trained.chain.space, scorer.quality, "random", objectives, budget=budget, seed=SEED + 1)
    best = front.best()
    picks = {"chosen": best.subnet, "random search": drawn.front.best().subnet, "largest": trained.chain.largest()}
    tested = _test(trained, scorer, picks, console)

    _say(console, "5  extract", "the chosen subnet as a plain nn.Module")
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
    _say(console, "6  where", f"the run lies in {trained.path}")
    for what, path in files.items():
        _say(console, "", f"{what:12} {path}")
    _say(console, "", f"what each stage did when: weft trace {trained.path}")
    report = write_report([trained.path])
    took = time.perf_counter() - began
    _say(console, "", f"done in {took:.0f} s")
    _say(console, "7  look", f"at all of it in a browser: {report}")
    return {
        "run": str(trained.path),
        "stages": STAGES,
        "busy": busy,
        "fingerprint": trained.fingerprint,
        "fingerprint_one_stage": alone.fingerprint,
        "same": same,
        "training_seconds": {str(STAGES): seconds, "1": seconds_alone},
        "front": front.to_json(),
        "test": tested,
        "extraction_bit_equal": equal,
        "files": {what: str(path) for what, path in files.items()},
        "report": str(report),
        "seconds": took,
    }


def _train(console: Console, steps: int, stages: int, runs: Path, name: str) -> tuple[TrainedRun, list[float], float]:
    """A training run, the share of the time in which each of several stages was busy, and the seconds of the run."""
    began = time.perf_counter()
    with Bar(console, "train", steps) as bar:
        trained = train(
            digits_conv,
            digits,
            steps=steps,
            batch_size=64,
            optimizer=Optimizer("sgd", lr=0.05, momentum=0.9, weight_decay=5e-4),
            consistency={"shared": SHARED},
            seed=SEED,
            stages=stages,
            trace=stages > 1,
            run=RunConfig(name=name, folder=runs, metrics={"accuracy": accuracy}),
            callbacks=[bar.train],
        )
    seconds = time.perf_counter() - began
    rows = summary(read_traces(trained.path))["stages"] if stages > 1 else []
    return trained, [stage["busy_share"] for stage in rows], seconds


def _say(console: Console, title: str, text: str) -> None:
    console.print(Text.assemble((title or "  ", "bold"), " ", text), soft_wrap=True)


def _test(
    trained: TrainedRun, scorer: Scorer, picks: dict[str, Subnet], console: Console
) -> dict[str, dict[str, float]]:
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


def demo(
    as_json: AsJson = False,
    runs: Annotated[str, typer.Option(help="Where the run goes.")] = "runs",
    steps: Annotated[int, typer.Option(help="Steps of training.", min=1)] = 2000,
    budget: Annotated[int, typer.Option(help="Subnets that the search scores.", min=1)] = 120,
) -> None:
    """Show weft at work on digits, in a minute.

    Trains a small supernet on 2 stages, proves that 1 stage gives the same bits, searches it, extracts the best subnet,
    and writes a report.
    """
    result = run_demo(Path(runs), Console(quiet=True) if as_json else console, steps, budget)
    if as_json:
        print_json(result)
    if not result["same"]:
        raise typer.Exit(1)
