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

import weft
from weft.data import text
from weft.engine.losses import accuracy
from weft.engine.optimizer import Optimizer
from weft.errors import WeftError
from weft.trainer.api import TrainedRun
from weft.trainer.config import Validation
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


def test_a_tuple_travels_and_a_checkpoint_of_one_device_goes_on_on_two_stages_and_that_of_two_on_one(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"m": 2, "optimizer": "adamw"}
    one = train("encoder-decoder", tmp_path, "run", **options)
    staged = {"resume": True, "stages": 2, "cut": (2,), "max_in_flight": 3, "trace": True}
    two = train("encoder-decoder", up_to(one, 3, tmp_path / "2"), "run", **options, **staged)
    assert_same(one, two)
    assert two.run.checkpoints.steps() == [3, 6, 9, 12]
    assert sorted(path.name for path in (two.path / "traces").iterdir()) == ["stage0.jsonl", "stage1.jsonl"]
    alone = train("encoder-decoder", up_to(two, 9, tmp_path / "1"), "run", **options, resume=True)
    assert_same(one, alone)
    assert [event["at"] for event in told(alone, "started")] == [0, 3, 9]


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

NET = partial(language_model, 256, context=8, width=16, layers=4, heads=2, dropout=0.1, tied=True)


ASYNCHRONOUS: dict[str, Any] = {
    "steps": 12,
    "batch_size": 8,
    "microbatches": 2,
    "optimizer": Optimizer("adamw", lr=3e-3, groups="matrices", schedule="cosine:0.1", clip="global:0.5"),
    "consistency": "bounded(4, 3)",
    "validation": Validation(4, batch_size=512),
    "checkpoint_every": 5,
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
    """With tied weights, which lie at both ends, and a norm over all stages; and one device goes on in mid-update."""
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
    three.run.checkpoints.drop_after(5)
    again, _ = trained(tmp_path, "three", resume=True)
    assert again.fingerprint == one.fingerprint
    assert again.chain.get_parameter("head.out.weight").equal(again.chain.get_parameter("tokens.tokens.weight"))
