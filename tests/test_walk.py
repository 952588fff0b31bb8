"""The walks of CONTRIBUTING.md: the files of weft that a step of `train(stages=2)`, and a trial of a study, enter."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import weft

WALK = {
    "trainer/trainer.py": "takes what an engine gives: records of steps for the log, snapshots for checkpoints",
    "trainer/pipeline_engine.py": "the engine of one stage: take a message, let the worker do the next op, send",
    "pipeline/scheduler.py": "which op is next, by the greedy rule",
    "pipeline/worker.py": "does the op: messages and micro-batches in, messages and reports out",
    "data/loader.py": "the batch of a step, prepared ahead, and its micro-batches",
    "space/permutation_streams.py": "the subnet of a step, in the spaced stream",
    "supernet/chain.py": "the layers that the subnet uses, its route",
    "pipeline/stage.py": "forward and backward of a micro-batch through one stage, and the updates of its layers",
    "engine/tape.py": "one layer after the other, with what the backward needs of each",
    "engine/weight_versions.py": "the version of its weights that a layer computes with, and its waiting gradients",
    "engine/consistency.py": "which version that is, as formulas",
    "engine/train_step.py": "precision, micro-batches, loss and metrics of a step",
    "pipeline/message.py": "activations and gradients as bytes",
    "distributed/transport.py": "the link to the next process",
    # What these call:
    "engine/optimizer.py": "torch.optim, a layer at a time, at the learning rate of the step",
    "engine/losses.py": "cross-entropy",
    "engine/rng.py": "seeds torch's generators before each layer",
    "supernet/layer.py": "runs one layer",
    "supernet/blocks.py": "which candidate of a block the subnet picks",
    "space/streams.py": "what all streams have in common",
    "space/subnet.py": "the pick itself",
    "space/space.py": "refuses a pick from another space",
    "data/source.py": "the samples",
    "utils/rng.py": "random numbers by key",
    "trainer/metrics_log.py": "losses and metrics of whole steps, in order",
    "runs/events.py": "the line of a step in events.jsonl",
    "utils/files.py": "appends that line",
}
"""In reading order: the way of a batch through 14 files, and then what these call."""

TIMED = {"distributed/heartbeat.py"}
"""Entered twice a second, whatever the steps do."""

NET = '''
import json, os, sys, threading
from functools import partial
from pathlib import Path

import torch
from torch import nn

import weft

SOURCE = str(Path(weft.__file__).parent) + os.sep
FIRST, LAST = 20, 40
entered, counting = set(), False


def look(frame, event, argument):
    if counting and event == "call" and frame.f_code.co_filename.startswith(SOURCE):
        entered.add(frame.f_code.co_filename.removeprefix(SOURCE))


class Window(nn.Linear):
    """A layer that is in every subnet: from its 20th forward to its 40th it notes which files are entered."""

    calls = 0

    def forward(self, x):
        global counting
        self.calls += 1
        counting = FIRST <= self.calls < LAST
        if self.calls == LAST:
            Path(os.environ["WALK"], os.environ["RANK"] + ".json").write_text(json.dumps(sorted(entered)))
        return super().forward(x)


def build():
    space = weft.Space()
    options = {name: partial(nn.Linear, 6, 6) for name in "abcd"}
    middle = [weft.Choice(space, f"b{i}", options) for i in range(4)]
    return weft.Chain(weft.Shared(partial(Window, 4, 6), "in"), *middle, weft.Shared(partial(Window, 6, 3), "out"))


def load():
    threading.setprofile(look)
    sys.setprofile(look)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return weft.Data("numbers", weft.Tensors(x=x, y=x[:, :3].argmax(-1)))


if __name__ == "__main__":
    from walked_net import build, load

    run = weft.RunConfig(folder=os.environ["WALK"], checkpoint_every=1000)
    weft.train(build, load, steps=50, batch_size=8, stages=2, cut=(3,), run=run)
    sys.setprofile(None)
'''


def test_a_steady_step_on_two_stages_enters_these_files_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "walked_net.py").write_text(NET)
    path = os.pathsep.join([str(tmp_path), str(Path(weft.__file__).parents[1])])
    environment = {**os.environ, "WALK": str(tmp_path), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    script = [sys.executable, str(tmp_path / "walked_net.py")]
    subprocess.run(script, env=environment, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    stages = [set(json.loads((tmp_path / f"{rank}.json").read_text())) for rank in (0, 1)]
    entered = set.union(*stages) - TIMED
    more, fewer = sorted(entered - set(WALK)), sorted(set(WALK) - entered)
    assert not more, (
        f"a steady step now enters {', '.join(more)}: leave the detour out, or give the file its line in WALK here and "
        "in CONTRIBUTING.md"
    )
    assert not fewer, (
        f"a steady step no longer enters {', '.join(fewer)}: take it out of WALK here and in CONTRIBUTING.md"
    )


TRIAL = '''
import json, os, sys
from pathlib import Path

from torch import nn

import weft

SOURCE = str(Path(weft.__file__).parent) + os.sep
entered, seen = set(), []


def look(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
        entered.add(frame.f_code.co_filename.removeprefix(SOURCE))


def count(trials, name):
    """Note which files are entered from the second trial to the third."""
    if trials == 2:
        sys.setprofile(look)
    elif trials == 3:
        sys.setprofile(None)
        Path(os.environ["WALK"], name).write_text(json.dumps(sorted(entered)))


def build(params):
    if "WEFT_TRIAL" in os.environ:
        seen.extend([] if params["lr"] in seen else [params["lr"]])
        count(len(seen), "worker.json")
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def watch(progress):
    count(progress.count("complete"), "study.json")


if __name__ == "__main__":
    from walked_trial import build

    space = weft.Space()
    space.real("lr", 0.0, 1.0)
    recipe = weft.tune.Recipe(model=build, data=weft.data.digits, steps=2, report_every=1)
    asked = {"max_concurrent": 1, "devices": ["cpu=64MiB"], "folder": os.environ["WALK"]}
    weft.tune(recipe, space, trials=3, callback=watch, **asked)
'''


def test_a_trial_enters_the_files_of_its_walk_and_no_others(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    walk = text.partition("**One trial")[2].partition("| file |")[2].partition("**`weft.plan")[0]
    table, called = (re.findall(r"`(\w[\w/]+\.py)`", part) for part in walk.split("These call"))
    assert len(table) <= 16
    (tmp_path / "walked_trial.py").write_text(TRIAL)
    path = os.pathsep.join([str(tmp_path), str(Path(weft.__file__).parents[1])])
    environment = {**os.environ, "WALK": str(tmp_path), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    script = [sys.executable, str(tmp_path / "walked_trial.py")]
    subprocess.run(script, env=environment, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    files = [set(json.loads((tmp_path / f"{process}.json").read_text())) for process in ("study", "worker")]
    entered = set.union(*files)
    more, fewer = sorted(entered - {*table, *called}), sorted({*table, *called} - entered)
    assert not more, f"a trial now enters {', '.join(more)}: leave the detour out, or give the file its line"
    assert not fewer, f"a trial no longer enters {', '.join(fewer)}: take it out of the walk in CONTRIBUTING.md"
