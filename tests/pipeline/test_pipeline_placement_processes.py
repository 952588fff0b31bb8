"""Ranks with several stages in real processes: the bits, the log and the checkpoints of one process."""

from __future__ import annotations

import os
import re
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import disturbed
import pytest

import weft
from weft.assembly import extra_arguments
from weft.config import make_config
from weft.errors import WeftError
from weft.pipeline import Optimizer, Trained, Validate, accuracy
from weft.pipeline.trace import read_traces
from weft.pipeline.utilisation import summary


def supernet(runs: Path, run: str, seen: Path | None = None, **more: Any) -> Trained:
    """Choice blocks with norms and dropout, all exact; six blocks."""
    options: dict[str, Any] = {
        "steps": 12,
        "batch_size": 4,
        "microbatches": 4,
        "optimizer": Optimizer("adamw", lr=1e-2, weight_decay=0.1),
        "consistency": "exact",
        "loss": disturbed.loss,
        "stream": "iid",
        "clip": 1.0,
        "metrics": {"accuracy": accuracy},
        "validate": Validate(6, batch_size=5, random=1),
        "checkpoint_every": 3,
        "keep": 10,
    }
    data = partial(disturbed.samples, "convolutional", None if seen is None else str(seen))
    return weft.train(disturbed.convolutional, data, runs=runs, run=run, **{**options, **more})


def plain(runs: Path, run: str, **more: Any) -> Trained:
    """Five layers that every micro-batch uses, and a block without weights."""
    return weft.train(
        partial(disturbed.faulty, -1, ""),
        disturbed.numbers,
        steps=8,
        batch_size=8,
        microbatches=4,
        consistency="exact",
        stream="fair",
        runs=runs,
        run=run,
        **more,
    )


def told(trained: Trained, *names: str) -> list[dict[str, Any]]:
    """The events of these names, without their times."""
    return [
        {key: value for key, value in event.items() if key not in ("time", "seconds")}
        for event in trained.run.events.read()
        if event["event"] in names
    ]


def assert_same(one: Trained, other: Trained) -> None:
    assert told(other, "step") == told(one, "step")
    assert told(other, "validation") == told(one, "validation")
    mine, theirs = other.chain.state_dict(), one.chain.state_dict()
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not mine[name].equal(theirs[name])] == []
    assert other.fingerprint == one.fingerprint


def up_to(trained: Trained, step: int, runs: Path) -> Path:
    """A copy of a run as it was when its checkpoint of a step was its newest."""
    shutil.copytree(trained.path, runs / trained.path.name)
    copy = weft.Run.open(runs / trained.path.name)
    assert step in copy.checkpoints.steps()
    copy.checkpoints.drop_after(step)
    return runs


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    import torch

    torch.set_num_threads(1)
    return supernet(tmp_path_factory.mktemp("one"), "run")


@pytest.mark.long
def test_a_loop_of_two_ranks_gives_the_bits_of_one_and_its_checkpoint_goes_on_in_a_v_and_in_a_line(
    tmp_path: Path, one: Trained
) -> None:
    loop = supernet(tmp_path, "run", stages=4, ranks=2, placement="loop", trace=True)
    assert_same(one, loop)
    assert loop.run.checkpoints.steps() == [3, 6, 9, 12]
    assert {len(event["utilisation"]) for event in told(loop, "pipeline")} == {2}
    found = read_traces(loop.path)
    assert found.ranks == (0, 1, 0, 1)
    assert [len(stage.spans) for stage in found.stages] == [2 * 12 * 4] * 4
    assert len(found.simulated) == 4 * 2 * 12 * 4
    assert 0.0 <= summary(found)["bubble"] < 1.0
    for rank in found.by_rank():  # one thing at a time
        assert all(a.end <= b.start for a, b in zip(rank.spans, rank.spans[1:], strict=False))
    assert all(len(stage.sent) == 48 * (1 + (0 < number < 3)) for number, stage in enumerate(found.stages))

    v = supernet(up_to(loop, 6, tmp_path / "v"), "run", resume=True, stages=4, ranks=2, placement="v", cut=(1, 2, 5))
    assert_same(one, v)
    assert [event["at"] for event in told(v, "started")] == [0, 6]
    line = supernet(up_to(v, 9, tmp_path / "line"), "run", resume=True, stages=3)
    assert_same(one, line)


@pytest.mark.long
def test_a_v_of_two_ranks_whose_rank_is_killed_goes_on_and_ends_as_one(
    tmp_path: Path, one: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_SILENCE", "4")
    seen, struck = tmp_path / "seen", []
    seen.mkdir()

    def strike(event: Any) -> None:
        if event["event"] == "step" and event["step"] == 7 and not struck:
            struck.append(int((seen / "0.1").read_text()))
            os.kill(struck[0], signal.SIGKILL)

    again = supernet(tmp_path, "run", seen, stages=4, ranks=2, placement="v", callbacks=[strike])
    assert struck
    assert (seen / "1.1").exists()
    assert_same(one, again)
    assert [event["step"] for event in told(again, "step")] == list(range(12))


@pytest.mark.parametrize(
    "placed",
    [
        pytest.param({"stages": 4, "ranks": 2}, id="loop of 2 x 2", marks=pytest.mark.long),
        pytest.param({"stages": 4, "ranks": 2, "placement": "v"}, id="v"),
        pytest.param({"stages": 3, "ranks": 1}, id="one rank"),
        pytest.param({"stages": 6, "ranks": 3}, id="loop of 2 x 3", marks=pytest.mark.long),
    ],
)
def test_layers_that_everybody_shares_give_the_bits_of_one_process(tmp_path: Path, placed: dict[str, Any]) -> None:
    assert_same(plain(tmp_path, "one"), plain(tmp_path, "placed", **placed))


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ({"stages": 4, "ranks": 0}, "ranks=0: a whole number, 1 or more"),
        ({"stages": 4, "ranks": 3}, "4 stages cannot be placed on 3 ranks: every rank has the same number of them"),
        ({"stages": 4, "ranks": 2, "placement": "line"}, "placement 'line' has one stage a rank, not 2"),
        ({"stages": 6, "ranks": 2, "placement": "v"}, "use 4 stages on 2 ranks, or 'loop'"),
        ({"stages": 4, "ranks": 2, "placement": "w"}, "unknown placement 'w'"),
        ({"stages": 8, "ranks": 2}, "8 stages cannot share 6 blocks"),
    ],
)
def test_a_mistake_is_told_in_one_line_and_leaves_no_run(tmp_path: Path, mistake: dict[str, Any], words: str) -> None:
    with pytest.raises(WeftError, match=re.escape(words)) as caught:
        plain(tmp_path / "runs", "x", **mistake)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs" / "x").exists()


def test_a_config_says_where_stages_go() -> None:
    typed = ["--train.stages=4", "--train.ranks=2", "--train.placement=v"]
    found = extra_arguments(make_config({"supernet": "digits_conv"}, typed), Path())
    assert {name: found[name] for name in ("stages", "ranks", "placement")} == {
        "stages": 4,
        "ranks": 2,
        "placement": "v",
    }
