"""Asynchronous training through ``weft.train``: real processes, one copy of the weights, the fingerprint of one
device."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.data import text
from weft.zoo import language_model

NET = partial(language_model, 256, context=8, width=16, layers=4, heads=2, dropout=0.1)


def adamw(clip: Any) -> weft.Optimizer:
    return weft.Optimizer("adamw", lr=3e-3, groups="matrices", warmup_steps=2, schedule="cosine:0.1", clip=clip)


OPTIONS: dict[str, Any] = {
    "steps": 12,
    "batch_size": 8,
    "microbatches": 2,
    "optimizer": adamw("global:0.5"),
    "consistency": "bounded(4, 3)",
    "validation": weft.Validation(4, batch_size=512),
    "seed": 3,
}


def data() -> weft.Data:
    whole = text(8, tokens="bytes")
    assert whole.validation is not None
    return weft.Data("text", whole.train, weft.data.Subset(whole.validation, range(900)), info=whole.info)


def trained(runs: Path, name: str, **changes: Any) -> tuple[weft.TrainedRun, list[dict[str, Any]]]:
    run = weft.train(NET, data(), folder=runs, run=name, **{**OPTIONS, **changes})
    events = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    return run, events


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    keys = ("step", "pick", "scores", "version_lag")
    found = [{key: event[key] for key in keys if key in event} for event in events if event["event"] == kind]
    return sorted(found, key=lambda event: event.get("step", 0))


def test_three_processes_with_one_copy_have_the_bits_scores_and_version_lag_of_one_device(
    tmp_path: Path,
) -> None:
    one, told = trained(tmp_path, "one")
    three, said = trained(tmp_path, "three", stages=3)
    other, heard = trained(tmp_path, "other", stages=2, cut=[2], split_backward=True)
    assert one.fingerprint == three.fingerprint == other.fingerprint
    assert of(told, "validation") == of(said, "validation") == of(heard, "validation")
    assert [event["step"] for event in of(told, "validation")] == [3, 7, 11]
    assert of(told, "finished") == of(said, "finished") == of(heard, "finished")
    # Virtual stages hold two blocks each: L = 3 and K = 4, so of 24 micro-batches all after the first four but two of
    # each four come one update late; the last stage never does.
    lag = of(told, "finished")[0]["version_lag"]
    assert lag["tokens"] == lag["layer0"] == {"0": 14, "1": 10}
    assert lag["layer1"] == {"0": 19, "1": 5}
    assert set(lag) == {"tokens", "layer0", "layer1", "layer2"}


def test_each_of_the_settings_has_a_result_of_its_own(tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "as-is": {},
        "clip": {"optimizer": adamw(0.5)},
        "none": {"optimizer": adamw(None)},
        "stashed": {"consistency": "stashed(4, 3)"},
        "deeper": {"consistency": "bounded(4, 6)"},
    }
    found = {name: trained(tmp_path, name, steps=6, **change)[0].fingerprint for name, change in changes.items()}
    assert len(set(found.values())) == len(changes)
    unscored = trained(tmp_path, "unscored", steps=6, validation=None)[0].fingerprint
    assert unscored == found["as-is"]  # to be scored leaves no trace in the weights


def test_more_stages_than_virtual_ones_are_warned_of_with_the_predicted_stall(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, _ = trained(tmp_path, "many", steps=4, stages=3, consistency="bounded(2, 2)", validation=None)
    assert "3 stages are more than the 2 virtual ones of bounded(2, 2)" in caplog.text
    assert "bounded(2, 3) would leave" in caplog.text
    assert (
        run.fingerprint
        == trained(tmp_path, "one", steps=4, consistency="bounded(2, 2)", validation=None)[0].fingerprint
    )


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"consistency": "bounded(0, 3)"}, "1 or more"),
        ({"consistency": "bounded(3, 3)"}, "multiple of the 2 micro-batches"),
        ({"consistency": "bounded(4, 7)"}, "the chain has 6 blocks"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(weft.WeftError, match=match):
        trained(tmp_path, "wrong", **changes)
    assert not (tmp_path / "wrong").exists()
