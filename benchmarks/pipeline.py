"""Real speed of the pipeline: stages as processes, each pinned to one core with one thread, alternating repeats.

    python benchmarks/pipeline.py [--quick] [--json FILE]

The supernet is a chain of equal blocks (linear layers, four candidates each), so that the figures are about the
pipeline and not about the cut. In every repeat, one after the other:

    one        the reference on one core
    both       two of them at once, one on each core, with nothing to tell each other: what the machine itself can give
    exact      the same steps on two stages, stream `spaced`, every layer exact: the same bits
    flush      the same supernet with a layer that all subnets share on the first stage: the pipeline empties every step
    ours       one fixed subnet, 1F1B with a flush after every step, as the one rule does it with its usual window
    tight      the same with the window that torch's schedule has: S - s micro-batches in flight on stage s
    torch      the same network and micro-batches under torch.distributed.pipelining.Schedule1F1B
    iid        as exact, with an i.i.d. stream, where most steps wait for the one before them
    split      the same with backwards that are split

`speedup_2_over_1` is one / exact (to reach: 1.85), `machine_2_over_1` the same for two that need nothing of each other,
`ours_over_torch_1f1b` how much longer ours takes than torch (to reach: 1 or less), `exact_over_flush` how much faster
exact is than flush, `split_gain` how much faster split is than iid, `simulator_error` how far the simulated time of
exact is from the measured one (to reach: 0.1), `scheduler_share` the share of the time that decisions take (to reach:
0.01). All are medians over the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import write
from torch import Tensor, nn

import weft
from weft.data import MicroBatches
from weft.distributed.env import read_env
from weft.distributed.heartbeat import Heartbeat
from weft.distributed.launcher import launch
from weft.distributed.remote_call import Call
from weft.distributed.store import ControlStore, connect
from weft.distributed.transport import Transport
from weft.engine.consistency import Exact
from weft.engine.layer_state import layer_digest
from weft.engine.optimizer import Optimizer
from weft.engine.reference import SequentialReference
from weft.engine.rng import deterministic
from weft.engine.train_step import TrainStep
from weft.pipeline.profiler import message_seconds, profile_chain
from weft.pipeline.scheduler import SchedulePolicy
from weft.pipeline.simulator import simulate, with_messages
from weft.pipeline.stage import Stage
from weft.pipeline.worker import Worker
from weft.pipeline.workload import Workload, chain_workload
from weft.space import Fixed, Stream, make_stream
from weft.supernet.partition import best_cut
from weft.trainer.pipeline_engine import RankLoop

CPU = torch.device("cpu")
STREAM = "spaced:2"
BLOCKS, CHOICES = 12, 4
SGD = Optimizer("sgd", lr=0.01, momentum=0.9, schedule="constant")


class Gate(nn.Module):
    """A number that every subnet multiplies by: it costs nothing but makes every step wait for the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def supernet(width: int, gated: bool) -> weft.Chain:
    space = weft.Space()
    blocks: list[Any] = [
        weft.Choice(space, f"b{k}", {f"c{c}": lambda: block(width) for c in range(CHOICES)}) for k in range(BLOCKS)
    ]
    # A cheap block in front: without it the first stage would have a gradient less to compute than the second.
    first = weft.Choice(space, "in", {f"c{c}": Gate for c in range(CHOICES)})
    return weft.Chain(*([weft.Shared(Gate, "gate")] if gated else []), first, *blocks)


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU())


def squares(outputs: Tensor, batch: Any) -> Tensor:
    return ((outputs - batch["y"]) ** 2).mean()


class Random:
    """The same batch at every step: reading data is not what is measured."""

    def __init__(self, rows: int, width: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.batch = {
            "x": torch.randn(rows, width, generator=draw),
            "y": torch.randn(rows, width, generator=draw),
        }

    def iterate(self, start: int, stop: int) -> Any:
        for _ in range(start, stop):
            yield self.batch


def config_of(chain: weft.Chain, stream: Stream, steps: int, m: int) -> TrainStep:
    exact = dict.fromkeys(chain.layers, Exact())
    return TrainStep(steps=steps, stream=stream, consistency=exact, microbatches=m, loss=squares, optimizer=SGD)


class Bench:
    """One process of it."""

    def __init__(self, options: dict[str, Any]) -> None:
        me = read_env()
        assert me is not None
        self.rank, self.world = me.rank, me.world
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[self.rank % len(cores)]})
        torch.set_num_threads(1)
        store = connect()
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world)
        self.transport = Transport(self.rank, self.world, CPU)
        self.heartbeat = Heartbeat(store, self.rank, self.world, lambda rank, message: None)
        self.steps, self.rows, self.width = options["steps"], options["rows"], options["width"]
        self.store = ControlStore(store, self.rank, self.world)
        self.surveys = 0
        _, self.cut = self.survey()

    def timed(self, work: Callable[[], Any]) -> float:
        """Seconds from the moment that all are ready to the moment that all are through."""
        dist.barrier()
        began = time.perf_counter()
        work()
        dist.barrier()
        return time.perf_counter() - began

    def one(self, both: bool = False) -> tuple[float, dict[str, str]]:
        """On the first core, while the other waits; or on both, each for itself."""
        chain = weft.initialise(lambda: supernet(self.width, False), 0)
        config = config_of(chain, make_stream(chain.space, STREAM, 0), self.steps, 1)
        sequential = SequentialReference(chain, config, CPU)
        sequential.train_mode()

        def train() -> None:
            for step, batch in enumerate(Random(self.rows, self.width).iterate(0, self.steps)):
                sequential.step(step, batch)

        seconds = self.timed(train if both or self.rank == 0 else lambda: None)
        return seconds, {name: layer_digest(w, sequential.optimizer) for name, w in sequential.weights.items()}

    def staged(self, kind: str) -> tuple[float, RankLoop, dict[str, str]]:
        gated, fixed, free = kind == "flush", kind in ("ours", "tight"), kind in ("iid", "split")
        m = 8 if fixed else 1
        steps = self.steps // 8 if fixed else self.steps
        chain = weft.initialise(lambda: supernet(self.width, gated), 0)
        named = make_stream(chain.space, "iid" if free else STREAM, 0)
        stream = Fixed(chain.space, chain.largest()) if fixed else named
        cut = tuple(block + gated for block in self.cut)
        config = config_of(chain, stream, steps, m)
        stage = Stage(chain, config, CPU, cut, self.rank, split_backward=kind == "split")
        stage.train_mode()
        loop = RankLoop(self.transport, self.heartbeat, None)
        batches = MicroBatches(Random(self.rows * m, self.width), 0, steps, m, config.parts)
        policy = SchedulePolicy(self.world - self.rank if kind == "tight" else 2 * self.world)
        worker = Worker(stage, policy, 0, steps * m, batches, loop.send)
        seconds = self.timed(lambda: list(loop.drive(worker, lambda: False)))
        worker.finish()
        return seconds, loop, {name: layer_digest(w, stage.optimizer) for name, w in stage.weights.items()}

    def torchs(self) -> float:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        m, steps = 8, self.steps // 8
        parts = [Gate(), *(block(self.width) for _ in range(BLOCKS))]
        ends = (0, *self.cut, len(parts))
        module = nn.Sequential(*parts[ends[self.rank] : ends[self.rank + 1]])
        stage = PipelineStage(module, self.rank, self.world, CPU)
        schedule = Schedule1F1B(stage, m, loss_fn=lambda out, y: ((out - y) ** 2).mean())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, fused=True)
        batch = Random(self.rows * m, self.width).batch

        def train() -> None:
            for _ in range(steps):
                optimizer.zero_grad(set_to_none=True)
                if self.rank == 0:
                    schedule.step(batch["x"])
                else:
                    schedule.step(target=batch["y"])
                optimizer.step()

        return self.timed(train)

    def survey(self) -> tuple[Any, tuple[int, ...]]:
        """Costs of the layers, measured by the first process while the other waits, and the best cut for them."""
        chain = weft.initialise(lambda: supernet(self.width, False), 0)
        self.surveys += 1
        if self.rank == 0:
            batch = Random(self.rows, self.width).batch
            self.store.set(f"costs/{self.surveys}", profile_chain(chain, batch, 7, SGD, squares))
        costs = self.store.get(f"costs/{self.surveys}")
        return costs, best_cut(self.work(chain, costs).expected_costs(), self.world)

    def work(self, chain: weft.Chain, costs: Any) -> Workload:
        exact = dict.fromkeys(chain.layers, Exact())
        return chain_workload(chain, make_stream(chain.space, STREAM, 0), exact, 1, self.steps, costs)

    def simulated(self) -> float:
        """The time that the simulator foresees for `exact`, from layers measured alone."""
        chain = weft.initialise(lambda: supernet(self.width, False), 0)
        costs, _ = self.survey()
        message = [message_seconds(4.0 * self.rows * self.width)] * len(chain.blocks)
        told = with_messages(self.cut, message)
        return simulate(self.work(chain, costs), self.cut, SchedulePolicy(2 * self.world), duration=told).time


def work(options: dict[str, Any], file: str) -> None:
    with deterministic(CPU):
        bench = Bench(options)
        rows: list[dict[str, Any]] = []
        for _ in range(options["repeats"] + 1):
            row: dict[str, Any] = {}
            row["one"], whole = bench.one()
            row["both"], _ = bench.one(both=True)
            row["exact"], loop, digests = bench.staged("exact")
            row["flush"], _, _ = bench.staged("flush")
            row["ours"], _, _ = bench.staged("ours")
            row["tight"], _, _ = bench.staged("tight")
            row["torch"] = bench.torchs()
            row["iid"], _, plain = bench.staged("iid")
            row["split"], _, halved = bench.staged("split")
            row["simulated"] = bench.simulated()
            row["deciding"] = loop.deciding / row["exact"]
            row["busy"] = loop.busy / row["exact"]
            row["op_ms"] = 1e3 * loop.busy / loop.ops
            if bench.rank == 0:
                row["same_bits"] = all(whole[name] == digest for name, digest in digests.items()) and plain == halved
                rows.append(row)
        bench.heartbeat.close()
        bench.transport.close()
        if bench.rank == 0:
            Path(file).write_text(json.dumps(rows[1:]))  # the first warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps and repeats")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=256, help="rows of a micro-batch")
    options = parser.parse_args()
    told = {
        "steps": 40 if options.quick else 160,
        "repeats": 2 if options.quick else 5,
        "rows": options.rows,
        "width": options.width,
    }
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "rows.json")
        launch(2, Call(work, (told, file)), restarts=0, threads=1)
        rows = json.loads(Path(file).read_text())

    def median(value: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(value(row) for row in rows)

    found = {
        "speedup_2_over_1": median(lambda row: row["one"] / row["exact"]),
        "machine_2_over_1": median(lambda row: 2 * row["one"] / row["both"]),
        "ours_over_torch_1f1b": median(lambda row: row["ours"] / row["torch"]),
        "tight_over_torch_1f1b": median(lambda row: row["tight"] / row["torch"]),
        "exact_over_flush": median(lambda row: row["flush"] / row["exact"]),
        "split_gain": median(lambda row: row["iid"] / row["split"]),
        "simulator_error": median(lambda row: abs(row["simulated"] / row["exact"] - 1)),
        "scheduler_share": median(lambda row: row["deciding"]),
        "op_ms": median(lambda row: row["op_ms"]),
        "same_bits": all(row["same_bits"] for row in rows),
    }
    for name, value in found.items():
        print(f"{name:22}{value:10.4f}" if isinstance(value, float) else f"{name:22}{value!s:>10}")
    write(options.json, **found, rows=rows)


if __name__ == "__main__":
    main()
