"""Training on stages in real processes, with random delays everywhere: the bits, the log and the checkpoints of one."""

from __future__ import annotations

import json
import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import disturbed
import pytest
from stages import KINDS

import weft
from weft.data import text
from weft.engine.losses import accuracy
from weft.engine.optimizer import Optimizer
from weft.errors import WeftError
from weft.pipeline.scheduler import SchedulePolicy
from weft.supernet import initialise
from weft.trainer.api import TrainedRun
from weft.trainer.config import TrainConfig, Validation, resolve
from weft.trainer.partitioning import warn_shallow_pipeline, workload_of
from weft.zoo import language_model

OPTIMIZERS = {
    "sgd": partial(Optimizer, "sgd", lr=0.05, momentum=0.9, weight_decay=1e-3, warmup_steps=3),
    "adamw": partial(Optimizer, "adamw", lr=1e-2, weight_decay=0.1, warmup_steps=3),
}
GLOBAL = Optimizer(clip="global:1")
SHARED = {
    "convolutional": {"stem": "delayed(2)", "head": "lagged(3)"},
    "text": {"embed": "lagged(2)", "norm": "delayed(1)", "out": "delayed(4)"},
    "encoder-decoder": {"begin": "lagged(3)", "finish": "delayed(2)"},
}
"""Layers that every subnet uses see weights of a while ago; all others are exact."""


def train(
    kind: str, runs: Path, run: str, m: int = 1, optimizer: Any = "sgd", blocks: int = 4, **more: Any
) -> TrainedRun:
    net = partial(disturbed.convolutional, blocks) if kind == "convolutional" else disturbed.NETS[kind]
    options: dict[str, Any] = {
        "steps": 12,
        "batch_size": 4,
        "microbatches": m,
        "optimizer": OPTIMIZERS[optimizer](clip=1.0) if isinstance(optimizer, str) else optimizer,
        "consistency": SHARED[kind],
        "loss": disturbed.loss,
        "stream": "iid",
        "metrics": {"accuracy": accuracy},
        "checkpoint_every": 3,
        "keep_checkpoints": 10,
    }
    return weft.train(net, partial(disturbed.samples, kind), folder=runs, run=run, **{**options, **more})


def told(trained: TrainedRun, *names: str) -> list[dict[str, Any]]:
    """The events of these names, without their times."""
    return [
        {key: value for key, value in event.items() if key not in ("time", "seconds")}
        for event in trained.run.events.read()
        if event["event"] in names
    ]


def up_to(trained: TrainedRun, step: int, runs: Path) -> Path:
    """A copy of a run as it was when its checkpoint of a step was its newest."""
    shutil.copytree(trained.path, runs / trained.path.name)
    copy = weft.Run.open(runs / trained.path.name)
    assert step in copy.checkpoints.steps()
    copy.checkpoints.drop_after(step)
    return runs


def assert_same(one: TrainedRun, other: TrainedRun) -> None:
    assert told(other, "step") == told(one, "step")
    assert told(other, "validation") == told(one, "validation")
    mine, theirs = other.chain.state_dict(), one.chain.state_dict()
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not mine[name].equal(theirs[name])] == []
    assert other.fingerprint == one.fingerprint


@pytest.mark.long
def test_eight_stages_give_the_bits_losses_metrics_and_scores_of_one(tmp_path: Path) -> None:
    options: dict[str, Any] = {"m": 4, "blocks": 6, "steps": 6, "validation": Validation(3, batch_size=5)}
    one = train("convolutional", tmp_path, "one", **options)
    seen: list[Any] = []
    calls: list[Any] = []

    def fails(event: Any) -> None:
        calls.append(event)
        raise ValueError("a callback that fails")

    eight = train("convolutional", tmp_path, "eight", **options, stages=8, callbacks=[fails, seen.append])
    assert_same(one, eight)
    assert [event["step"] for event in told(eight, "step")] == list(range(6))
    assert all(event.keys() >= {"loss", "accuracy", "rate", "subnets"} for event in told(eight, "step"))
    assert [event["pick"] for event in told(eight, "validation")] == ["largest", "smallest", "random0", "random1"] * 2
    assert sorted(event["at"] for event in told(eight, "checkpoint")) == [3, 6]
    assert eight.run.state() == "finished"
    figures = told(eight, "pipeline")
    assert figures
    assert {len(event["utilisation"]) for event in figures} == {8}
    assert {len(event["in_flight"]) for event in figures} == {8}
    # Callbacks, in the process that started the stages, see the same events.
    assert [event for event in seen if event["event"] == "step"] == told(eight, "step")
    assert seen[-1]["event"] == "finished"
    assert len(calls) == 1  # and the one that failed disturbs nobody


def test_a_tuple_travels_and_a_checkpoint_of_two_stages_goes_on_on_one_and_on_three(tmp_path: Path) -> None:
    options: dict[str, Any] = {"m": 2, "optimizer": "adamw"}
    one = train("encoder-decoder", tmp_path, "one", **options)
    two = train("encoder-decoder", tmp_path, "run", **options, stages=2, max_in_flight=3, trace=True)
    assert_same(one, two)
    assert two.run.checkpoints.steps() == [3, 6, 9, 12]
    assert sorted(path.name for path in (two.path / "traces").iterdir()) == ["stage0.jsonl", "stage1.jsonl"]
    three = train("encoder-decoder", up_to(two, 6, tmp_path / "3"), "run", **options, resume=True, stages=3, cut=(1, 4))
    assert_same(one, three)
    assert [event["at"] for event in told(three, "started")] == [0, 6]
    for name, made, step in (("1a", two, 3), ("1b", three, 9)):
        alone = train("encoder-decoder", up_to(made, step, tmp_path / name), "run", **options, resume=True)
        assert_same(one, alone)
        assert told(alone, "started")[-1]["at"] == step


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_number_of_stages_gives_the_bits_of_one(tmp_path: Path, kind: str, m: int, optimizer: str) -> None:
    one = train(kind, tmp_path, "one", m=m, optimizer=optimizer, validation=5, blocks=6)
    blocks = len(one.chain.blocks)
    cuts = {2: (blocks - 1,), 3: None, 4: (1, 2, 3), blocks: None}
    for stages, cut in cuts.items():
        options: dict[str, Any] = {"m": m, "optimizer": optimizer, "validation": 5, "blocks": 6}
        parts = train(kind, tmp_path, f"of{stages}", **options, stages=stages, cut=cut)
        assert_same(one, parts)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_on_any_other_number_of_stages(tmp_path: Path, kind: str) -> None:
    one = train(kind, tmp_path, "run", m=2, optimizer="adamw")
    made = one
    for number, (stages, step) in enumerate([(4, 3), (2, 6), (5, 9), (1, 3), (3, 6), (1, 9)]):
        runs = up_to(made, step, tmp_path / str(number))
        made = train(kind, runs, "run", m=2, optimizer="adamw", resume=True, stages=stages)
        assert_same(one, made)


# Mistakes that show before there is a run


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ({"stages": 0}, "stages=0: a whole number, 1 or more"),
        ({"stages": 9}, "9 stages cannot share 6 blocks: use 1 to 6 stages"),
        ({"stages": 2, "max_in_flight": 0}, "max_in_flight=0: a whole number, 1 or more"),
        ({"stages": 2, "max_restarts": -1}, "max_restarts=-1: a whole number, 0 or more"),
        ({"stages": 2, "cut": (1, 2)}, "the cut (1, 2) makes 3 stages, but 2 are asked for"),
        ({"stages": 2, "cut": (6,)}, "the cut (6,) of 6 blocks must rise from 1 to at most 5"),
        ({"cut": (2,)}, "the cut (2,) makes 2 stages, but 1 is asked for"),
        ({"stages": 2, "optimizer": GLOBAL, "consistency": {"shared": "lagged(2)"}}, "one consistency for all layers"),
        ({"stages": 2, "split_backward": "defer"}, "split_backward='defer': True or False"),
        ({"stages": 2, "loss": lambda outputs, batch: outputs.sum()}, "<lambda>, cannot be sent to them"),
        ({"stages": 2, "metrics": {"a": lambda outputs, batch: 0}}, "and 'a', "),
    ],
)
def test_a_mistake_is_reported_in_one_line_and_leaves_no_run(
    tmp_path: Path, mistake: dict[str, Any], words: str
) -> None:
    with pytest.raises(WeftError, match=re.escape(words)) as caught:
        train("text", tmp_path / "runs", "x", **mistake)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs" / "x").exists()


def test_more_than_one_stage_needs_an_importable_supernet_and_says_so(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "steps": 1,
        "stages": 2,
        "batch_size": 4,
        "folder": tmp_path,
        "run": "x",
        "stream": "fair",
    }
    with pytest.raises(WeftError, match=r"'net', .*<lambda>, cannot be sent to them.*they need importable factories"):
        weft.train(lambda: disturbed.faulty(0, ""), disturbed.numbers, **options)
    with pytest.raises(WeftError, match=r"'net', a Chain, cannot be sent to them.*they need importable factories"):
        weft.train(disturbed.text(), partial(disturbed.samples, "text"), **options)
    assert os.listdir(tmp_path) == []


# Asynchronous training, with one copy of the weights

NET = partial(language_model, 256, context=8, width=16, layers=4, heads=2, dropout=0.1)


def adamw(clip: Any) -> weft.Optimizer:
    return weft.Optimizer("adamw", lr=3e-3, groups="matrices", warmup_steps=2, schedule="cosine:0.1", clip=clip)


ASYNCHRONOUS: dict[str, Any] = {
    "steps": 12,
    "batch_size": 8,
    "microbatches": 2,
    "optimizer": adamw("global:0.5"),
    "consistency": "bounded(4, 3)",
    "validation": weft.Validation(4, batch_size=512),
    "seed": 3,
}


def texts() -> weft.Data:
    whole = text(8, tokens="bytes")
    assert whole.validation is not None
    return weft.Data("text", whole.train, weft.data.Subset(whole.validation, range(900)), info=whole.info)


def trained(runs: Path, name: str, **changes: Any) -> tuple[weft.TrainedRun, list[dict[str, Any]]]:
    run = weft.train(NET, texts(), folder=runs, run=name, **{**ASYNCHRONOUS, **changes})
    events = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    return run, events


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    keys = ("step", "pick", "scores", "version_lag")
    found = [{key: event[key] for key in keys if key in event} for event in events if event["event"] == kind]
    return sorted(found, key=lambda event: event.get("step", 0))


def test_three_processes_with_one_copy_have_the_bits_scores_and_version_lag_of_one_device(tmp_path: Path) -> None:
    one, told = trained(tmp_path, "one")
    three, said = trained(tmp_path, "three", stages=3)
    assert one.fingerprint == three.fingerprint
    assert of(told, "validation") == of(said, "validation")
    assert [event["step"] for event in of(told, "validation")] == [3, 7, 11]
    assert of(told, "finished") == of(said, "finished")
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


def test_more_stages_than_virtual_ones_are_warned_of_with_the_predicted_stall(caplog: pytest.LogCaptureFixture) -> None:
    chain = initialise(NET)
    config = resolve(TrainConfig(steps=20, consistency="bounded(2, 2)"), chain)
    work = workload_of(chain, config, None)
    warn_shallow_pipeline(work, (3,), [SchedulePolicy(4)] * 2)
    assert not caplog.records
    warn_shallow_pipeline(work, (2, 4), [SchedulePolicy(6)] * 3)
    assert "3 stages are more than the 2 virtual ones of bounded(2, 2)" in caplog.text
    assert "bounded(2, 3) would leave" in caplog.text


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
