"""Verification of a run: short trainings on several numbers of stages, compared with the sequential law bit for bit."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from weft.data import as_data
from weft.errors import PipelineError, RunError
from weft.supernet import Chain, Factory
from weft.verification.case import Case, Outcome, Way, make_case
from weft.verification.cause import DATA, KERNEL, UNKNOWN, Cause, Subject, by_threads, kernel, one_thread
from weft.verification.difference import PLACES, Difference, first_difference, first_loss

STEPS = 50
"""Steps that are trained at most if the user does not say."""


def verify_run(
    net: Chain | Factory,
    data: Any,
    arguments: Mapping[str, Any],
    stages: Sequence[int],
    *,
    steps: int = STEPS,
    on_way: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Trains the first steps on one stage, again with a stop and a resume in the middle, and on every number of stages.

    ``net``, ``data`` and ``arguments`` are those of ``weft.train``. ``equal`` says whether all ``rows`` have the
    fingerprint of the first. If not, ``difference`` has the first step and layer in which one of them parts from it,
    and ``cause`` the likely cause, found by experiment. ``on_way`` is told what is going to be run.
    """
    case = make_case(net, data, arguments, stages, steps)
    say = on_way or (lambda told: None)
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="weft-verify-") as folder:
        for way in (Way(1), Way(1, resumed=True), *map(Way, sorted(set(stages) - {1}))):
            say(str(way))
            found.append(case.train(way, Path(folder) / f"row{len(found)}"))
        first = found[0]
        failed = [outcome for outcome in found if outcome.error or outcome.fingerprint != first.fingerprint]
        verdict: dict[str, Any] = {
            "equal": not failed,
            "steps": case.settings.steps,
            "threads": torch.get_num_threads(),
            "rows": [_row(outcome, outcome not in failed) for outcome in found],
            "difference": None,
            "cause": None,
        }
        if failed:
            say("what differs")
            where, why = _explained(case, first, failed[0], Path(folder))
            what = "it is not known where" if where.place is None else PLACES[where.place]
            verdict |= {"difference": {**asdict(where), "what": what, "run": str(failed[0].way)}, "cause": asdict(why)}
    return verdict


def _row(outcome: Outcome, equal: bool) -> dict[str, Any]:
    way = {"stages": outcome.way.stages, "resumed": outcome.way.resumed}
    return {
        **way,
        "fingerprint": outcome.fingerprint,
        "equal": equal,
        "seconds": outcome.seconds,
        "error": outcome.error,
    }


def _explained(case: Case, first: Outcome, failed: Outcome, folder: Path) -> tuple[Difference, Cause]:
    """Where and why a run parts from the first one."""

    def load() -> Any:
        return as_data(case.data, case.settings.seed)

    subject = Subject(case.net, load, case.settings, case.arguments.get("teacher"))
    if failed.error is not None:
        return _error_explained(subject, failed)
    ways = {"first": first.way, "second": failed.way}
    pair = [case.train(way, folder / f"recorded-{name}", record=True) for name, way in ways.items()]
    where = first_difference(case.plan(), case.evidence(pair[0]), case.evidence(pair[1]))
    if where is not None:
        return where, subject.cause(where) or _by_rerun(case, ways, folder) or _elsewhere(where, failed.way)
    # Recorded, the same two runs agree: only what is left of the first ones tells.
    step = first_loss(case.evidence(first), case.evidence(failed))
    where = Difference(case.settings.steps - 1 if step is None else step, None, None)
    return where, _by_rerun(case, ways, folder) or _gone(case)


def _error_explained(subject: Subject, failed: Outcome) -> tuple[Difference, Cause]:
    assert failed.error is not None
    try:
        step = next((event["at"] for event in failed.run.events.read() if event["event"] == "failed"), 0)
    except RunError:  # it had not begun
        step = 0
    cause = kernel(failed.error)
    if cause is not None:
        layer = re.match(r".*?layer '(.*?)' fails", failed.error)
        return Difference(step, layer[1] if layer else subject.without_kernel(step), "kernel"), cause
    where = Difference(0, None, "batch")
    cause = subject.cause(where)
    if cause is None:
        raise PipelineError(f"on {failed.way}: {failed.error}")
    return where, cause


def _by_rerun(case: Case, ways: Mapping[str, Way], folder: Path) -> Cause | None:
    threads = torch.get_num_threads()
    if threads == 1 or case.settings.device.type != "cpu":
        return None
    with one_thread():
        again = [case.train(way, folder / f"one-thread-{name}") for name, way in ways.items()]
    return by_threads(threads) if again[0].fingerprint == again[1].fingerprint else None


def _elsewhere(where: Difference, way: Way) -> Cause:
    who = "the batch" if where.place == "batch" else "the loss" if where.layer is None else f"layer '{where.layer}'"
    why = f"{who} gives the same when it is done twice in one process, and another result on {way}"
    hint = "it may depend on its process (environment, number, order of files or sets) or on what ran before it there"
    return Cause(
        DATA if where.place == "batch" else UNKNOWN, f"{why}: {hint}", "make it a function of its inputs alone"
    )


def _gone(case: Case) -> Cause:
    if case.settings.device.type == "cuda" and case.settings.cuda_graphs:
        why = "without CUDA graphs the same runs agree"
        return Cause(KERNEL, why, "set train.cuda_graphs = false, and report it with the layers that you use")
    why = (
        "the same two runs, done again, agree: it comes and goes, as with threads of one's own or uninitialised memory"
    )
    return Cause(
        UNKNOWN, why, "look for work that runs beside the training, such as a data loader that is changed meanwhile"
    )
