"""Whether one device could be trained as a pipeline of one stage: both engines of the trainer in one process, in turn.

    python benchmarks/one_stage.py [--quick] [--device cpu|cuda] [--json FILE]

Weft has two engines: `DeviceEngine` steps the sequential reference, `PipelineEngine` a stage by the scheduler. A
pipeline of one stage would make the first an oracle of tests only. Each row has the median milliseconds of a step, the
median ratio over alternating segments, and whether both end with the same weights.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from machine import write
from overhead import WeftLoop, images

import weft
from weft.data import Data, digits
from weft.distributed.store import ControlStore
from weft.distributed.transport import Transport
from weft.engine.rng import deterministic
from weft.pipeline.scheduler import SchedulePolicy
from weft.trainer.config import Execution
from weft.trainer.pipeline_engine import PipelineEngine, RankLoop
from weft.trainer.trainer import Engine
from weft.zoo import digits_conv, digits_mlp, nas_bench_macro

ROWS: list[tuple[str, Callable[[], weft.Chain], Callable[[], Data], int]] = [
    ("digits-mlp", digits_mlp, digits, 64),
    ("digits-conv", digits_conv, digits, 64),
    ("nas-bench-macro", nas_bench_macro, lambda: images(512), 32),
]


class StageLoop(WeftLoop):
    """The same run by a pipeline of one stage. Nothing is sent, and no heartbeat takes time."""

    def make_engine(self, data: Data, execution: Execution) -> Engine:
        policies = [SchedulePolicy(max_in_flight=1)]
        engine = PipelineEngine(self.chain, data, self.config, execution, ControlStore.alone(), (), policies)
        heartbeat: Any = SimpleNamespace(op=None, figures={}, others=dict)
        engine.loop = RankLoop(Transport(0, 1, torch.device(execution.device)), heartbeat, None)
        return engine


def compare(
    name: str, build: Callable[[], weft.Chain], data: Data, batch: int, device: str, shape: tuple[int, int]
) -> dict[str, Any]:
    segments, length = shape
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        one = WeftLoop(folder, build, data, batch, device, segments * length, last=False)
        stage = StageLoop(other, build, data, batch, device, segments * length, last=False)
        times: dict[str, list[float]] = {"device": [], "stage": []}
        for segment in range(segments):
            turns = [("device", one), ("stage", stage)]
            for who, run in turns if segment % 2 else reversed(turns):
                with deterministic(run.device):
                    began = time.perf_counter()
                    run.train((segment + 1) * length)
                    if device == "cuda":
                        torch.cuda.synchronize()
                    times[who].append((time.perf_counter() - began) / length * 1e3)
        one.close()
        stage.close()
        theirs = dict(one.chain.named_parameters())
        equal = all(torch.equal(weight, theirs[key]) for key, weight in stage.chain.named_parameters())
    warm = segments // 4  # the first segments capture graphs and fill caches
    ratios = [s / d for s, d in zip(times["stage"][warm:], times["device"][warm:], strict=True)]
    return {
        "space": name,
        "device": device,
        "device_ms": statistics.median(times["device"][warm:]),
        "stage_ms": statistics.median(times["stage"][warm:]),
        "ratio": statistics.median(ratios),
        "weights_bit_equal": equal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, build, data, batch in ROWS:
        shape = (4, 3) if options.quick else (40, 5 if name == "nas-bench-macro" and options.device == "cpu" else 25)
        row = compare(name, build, data(), batch, options.device, shape)
        print("{space:18}{device:6}{device_ms:9.2f}{stage_ms:9.2f}{ratio:8.3f}  {weights_bit_equal}".format(**row))
        rows.append(row)
    write(options.json, rows=rows)


if __name__ == "__main__":
    main()
