"""Plans measured: the predicted step time of many strategies beside the measured one, on two processes of this host.

    python benchmarks/applied.py [--quick] [--models NAME ...] [--json FILE]

The host is measured as `weft calibrate` does with two devices. Then each model trains by SGD under many strategies,
each on two processes (gloo over loopback, one thread and, where there are two, one core each): forward, backward and
update, one step of every strategy in turn, so that what else runs on the host meets all alike.

rows    for each model and strategy the predicted step and the measured one, `error` being predicted over measured less
        1, and both parts of both. A step that waits for a core says more of the host's other guests than of the plan:
        `measured_ms` is the median of that half of the repeats that waited the least, `least_ms` the least, `all_ms`
        the median of all repeats, and `waited_ms` what the threads of both processes waited together, at the median.
        The computing that is measured is that of steps whose collectives send nothing; communication is the rest.
        `plan` is the planner's optimum. `random` draws a split for every operator; `restricted` draws one for some of
        the operators, and is the best plan that keeps to these.
tau     Kendall's tau between predicted and measured steps of a model (1: all are ranked as predicted), and of parts of
        them; `again` is that between two measurements, the even and the odd repeats: no prediction can be expected to
        rank better.
claims  data parallelism over the plan, in step time, alternating, with the quartiles over the repeats; beside it what
        is predicted, and what PaSE's paper measured with 4 GPUs, the fewest that it has.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing
from machine import waiting, write
from ranks import kendall_tau
from torch import Tensor, nn
from torch.nn import functional

from weft.hardware.machine import Machine
from weft.plan import baselines
from weft.plan.calibrate import calibrate
from weft.plan.capture import CapturedModel, capture
from weft.plan.configurations import ParallelConfig, SolvedConfig, solve_config
from weft.plan.costs import PlanCost, SplitFilter, TrainingSpec
from weft.plan.graph import PARAMETER, Graph
from weft.plan.planner import plan_captured
from weft.plan.runtime import ParallelModule, parallelize, unsupported
from weft.plan.runtime.redistribute import Collective, MeshCollectives
from weft.plan.sharding import Mesh, OpSplit, ShardingStrategy, splits
from weft.utils.rng import generator

PROCESSES = 2
FLAT = Mesh((PROCESSES,))
TRAINING = TrainingSpec(optimizer_bytes=0.0)  # plain SGD
PAPER = {"alexnet": {"1080Ti": 1.65, "2080Ti": 3.54}, "rnnlm": {"1080Ti": 1.85, "2080Ti": 2.02}}  # Fig. 6, p = 4


class Perceptron(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(functional.relu(x) if number else x)
        return functional.cross_entropy(x, y)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.wide(self.after(x))))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.head(self.norm(self.blocks(self.embed(x) + self.place)))
        return functional.cross_entropy(scores.flatten(0, 1), y.flatten())


class Convolutional(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        widths = [3, width, 2 * width, 2 * width, 4 * width, 4 * width]
        self.features = nn.Sequential()
        for number, (a, b) in enumerate(pairwise(widths)):
            convolution = nn.Conv2d(a, b, 3, 2 if number % 2 else 1, 1, bias=False)
            self.features.extend([convolution, nn.BatchNorm2d(b), nn.ReLU()])
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.features(x).mean((2, 3))), y)


class AlexNet(nn.Module):
    """The layers of PaSE's AlexNet, for images of any side; ``hidden`` is 4096 there, for images of 227."""

    def __init__(self, hidden: int, classes: int, side: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 96, 11, 4), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(96, 256, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
            *(nn.Conv2d(256, 384, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(384, 384, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
        )
        for stride in (4, 2, 2, 2):
            side = (side - (11 if stride == 4 else 3)) // stride + 1
        layers = [nn.Linear(a, b) for a, b in ((256 * side**2, hidden), (hidden, hidden), (hidden, classes))]
        self.classifier = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.classifier(self.features(x).flatten(1)), y)


class Recurrent(nn.Module):
    """PaSE's RNNLM: an embedding, two layers of LSTM as one operator, and a softmax over the vocabulary."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(vocabulary, width), nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.head(self.lstm(self.embed(x))[0])
        return functional.cross_entropy(scores.flatten(0, 1), y.flatten())


def rows_of(count: int, width: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, width), torch.randint(classes, (count,))


def images(count: int, side: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, side, side), torch.randint(classes, (count,))


def text(count: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    return torch.randint(vocabulary, (count, length)), torch.randint(vocabulary, (count, length))


Made = Callable[[], tuple[nn.Module, tuple[Tensor, Tensor]]]
MODELS: dict[str, Made] = {
    "mlp": lambda: (Perceptron(512, 1024, 1024, 1024, 100), rows_of(128, 512, 100)),
    "transformer": lambda: (Transformer(2048, 256, 2, 64), text(8, 64, 2048)),
    "convnet": lambda: (Convolutional(32, 100), images(16, 32, 100)),
    "alexnet": lambda: (AlexNet(2048, 1000, 131), images(8, 131, 1000)),
    "rnnlm": lambda: (Recurrent(10_000, 256), text(8, 16, 10_000)),
}
SMALL: dict[str, Made] = {
    "mlp": lambda: (Perceptron(256, 512, 512, 100), rows_of(64, 256, 100)),
    "alexnet": lambda: (AlexNet(1024, 100, 67), images(4, 67, 100)),
    "rnnlm": lambda: (Recurrent(4000, 128), text(4, 8, 4000)),
}
CLAIMED: dict[str, Made] = {
    "alexnet": lambda: (AlexNet(4096, 1024, 227), images(8, 227, 1024)),
    "rnnlm": lambda: (Recurrent(20_000, 512), text(16, 16, 20_000)),
}


@dataclass(frozen=True, slots=True)
class Named:
    """A strategy by a name, with what it is predicted to cost."""

    name: str
    strategy: ShardingStrategy
    cost: PlanCost


@dataclass(frozen=True, slots=True)
class Case:
    """A model and the strategies that it is to be run under; a `claim` is of the first two alone."""

    name: str
    model: nn.Module
    batch: tuple[Tensor, Tensor]
    captured: CapturedModel
    named: list[Named]
    claim: bool


def one_weird_trick(graph: Graph, mesh: Mesh) -> SplitFilter:
    """Convolutions, and what belongs to them, have parts of the batch; the linear layers are cut, as Krizhevsky did."""
    data = baselines.data_parallel(graph, mesh)
    linear = {place for place, operator in enumerate(graph.operators) if operator.kind == "matmul"}
    theirs = {read.source for place in linear for read in graph.operators[place].reads}
    later = {place for place in range(len(graph)) if place > min(linear, default=0)}

    def allowed(place: int, split: OpSplit) -> bool:
        operator = graph.operators[place]
        if place in linear:
            return all(dim >= 0 and operator.dims[dim].name in ("n", "k") for dim in split)
        if place in later or (place in theirs and operator.kind == PARAMETER):
            return True
        return data(place, split)

    return allowed


def experts(graph: Graph) -> tuple[Mesh, SplitFilter] | None:
    """What an expert does with two devices: Megatron's cuts of a transformer, Krizhevsky's of AlexNet."""
    kinds = {operator.kind for operator in graph.operators}
    if "attention" in kinds:
        mesh = Mesh((1, PROCESSES))
        rule = baselines.expert(graph, mesh)
        return (mesh, rule) if rule else None
    if "conv" in kinds and sum(operator.kind == "matmul" for operator in graph.operators) > 1:
        return FLAT, one_weird_trick(graph, FLAT)
    return None


def chosen(candidate: SolvedConfig) -> ShardingStrategy:
    picked = zip(candidate.tables.splits, candidate.assignment, strict=True)
    return ShardingStrategy(candidate.config.mesh, tuple(own[k] for own, k in picked))


def best(
    graph: Graph, machine: Machine, rule: SplitFilter | None, mesh: Mesh = FLAT
) -> tuple[ShardingStrategy, PlanCost]:
    found = solve_config(ParallelConfig(graph, mesh, 1, TRAINING), machine, math.inf, rule)
    return chosen(found), found.cost


def drawn(graph: Graph, name: str, number: int, share: float) -> SplitFilter:
    """A rule that draws the split of this share of the operators, and leaves the others free."""
    numbers = generator("applied", name, number)
    fixed: dict[int, OpSplit] = {}
    for place, operator in enumerate(graph.operators):
        able = list(splits(operator, FLAT))
        if numbers.random() < share and len(able) > 1:
            fixed[place] = able[int(numbers.integers(len(able)))]
    return lambda place, split: fixed.get(place, split) == split


def named(captured: CapturedModel, machine: Machine, count: int) -> Iterator[Named]:
    """So many different strategies that can be run: the planner's, those of others, and drawn ones."""
    graph = captured.graph
    settled: dict[str, Any] = {"stages": 1, "microbatches": 1, "recompute": False, "compare": False, "mesh": FLAT.sizes}
    planned = plan_captured(captured, machine, devices=PROCESSES, optimizer="sgd", **settled)
    yield Named("plan", planned.strategy, planned.cost)
    yield Named("data parallel", *best(graph, machine, baselines.data_parallel(graph, FLAT)))
    if count <= 2:
        return
    yield Named("fully sharded", *best(graph, machine, baselines.fully_sharded(graph, FLAT)))
    seen, made = {planned.splits}, 3
    if expert := experts(graph):
        yield Named("expert", *best(graph, machine, expert[1], expert[0]))
        made += 1
    for number in range(10 * count):
        if made >= count:
            return
        # One in four is drawn throughout; of the others from a twentieth to two thirds.
        share = 1.0 if number % 4 == 3 else 0.05 + 0.6 * number / count
        strategy, cost = best(graph, machine, drawn(graph, graph.name, number, min(share, 1.0)))
        if strategy.splits not in seen and not unsupported(captured, strategy):
            seen.add(strategy.splits)
            made += 1
            yield Named(f"{'random' if share == 1.0 else 'restricted'} {number}", strategy, cost)


def case(name: str, made: Made, machine: Machine, count: int, claim: bool = False) -> Case:
    torch.manual_seed(0)
    model, batch = made()
    captured = capture(model, batch, name=name)
    found = list(named(captured, machine, count))
    for each in found:
        if wrong := unsupported(captured, each.strategy):
            raise SystemExit(f"{name}, {each.name}: cannot be run: {wrong[0]}")
    return Case(name, model, batch, captured, found, claim)


@contextmanager
def silence() -> Iterator[None]:
    """Collectives that send nothing: what a process has stands for what the others have."""

    def own(collectives: MeshCollectives, kind: Collective, taken: Tensor, given: Tensor, axis: int) -> None:
        part = min(len(taken), len(given))
        if kind is not Collective.ALL_REDUCE:
            taken.view(-1, part).copy_(given.view(-1, part)[: 1 if part < len(given) else None])

    with mock.patch.object(MeshCollectives, "_run", own):
        yield


@dataclass(frozen=True, slots=True)
class Runner:
    """A model under a strategy, with its optimizer."""

    module: ParallelModule
    optimizer: torch.optim.Optimizer
    batch: tuple[Tensor, Tensor]

    def step(self) -> tuple[float, float]:
        """Seconds of a step on this process, begun by all at once, and of those that it waited for a core."""
        dist.barrier()
        waited, began = waiting(), time.perf_counter()
        self.module(self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - began, waiting() - waited


def runner(of: Case, each: Named) -> Runner:
    module = parallelize(of.captured, each.strategy, weights=of.model)
    return Runner(module, torch.optim.SGD(module.parameters(), lr=1e-6), of.batch)


def turns(runners: Sequence[Runner], repeats: int) -> dict[str, list[list[float]]]:
    """Seconds of each runner's steps, all taking one in turn, and now and then of one that sends nothing: of the slower
    process. What both waited for cores, besides."""
    found: dict[str, list[list[float]]] = {"steps": [], "waited": [], "computing": [], "idle": []}
    for turn in range(repeats + 1):
        taken = torch.zeros(2, 2, len(runners), dtype=torch.float64)
        silent = turn % 3 == 0
        for number in generator("turn", turn).permutation(len(runners)).tolist():
            taken[0, :, number] = torch.tensor(runners[number].step())
            if silent:
                with silence():
                    taken[1, :, number] = torch.tensor(runners[number].step())
        gc.collect()
        total = taken.clone()
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        dist.all_reduce(total)
        if turn:  # the first one warms up
            found["steps"].append(taken[0, 0].tolist())
            found["waited"].append(total[0, 1].tolist())
        if turn and silent:
            found["computing"].append(taken[1, 0].tolist())
            found["idle"].append(total[1, 1].tolist())
    return {key: [list(own) for own in zip(*rows, strict=True)] for key, rows in found.items()}


def undisturbed(taken: Sequence[float], waited: Sequence[float]) -> list[float]:
    """The half of the steps that waited for cores the least."""
    most = statistics.median(waited)
    return [seconds for seconds, own in zip(taken, waited, strict=True) if own <= most]


def keep_memory() -> None:
    """Memory that is freed stays with the process, as on a GPU: to get it anew, page by page, takes longer than to send
    it. Where the C library is not glibc, nothing changes."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("libc.so.6")
        library.mallopt(-4, 0)  # M_MMAP_MAX: no block of its own for a large tensor
        library.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def member(rank: int, folder: str, cases: Sequence[Case], repeats: int) -> None:
    """One of the processes: runs every case, and the first writes what was measured."""
    torch.set_num_threads(1)
    keep_memory()
    if (cores := sorted(os.sched_getaffinity(0)))[PROCESSES - 1 :]:
        os.sched_setaffinity(0, {cores[rank]})
    patience = timedelta(seconds=300)
    dist.init_process_group("gloo", f"file://{folder}/store", patience, world_size=PROCESSES, rank=rank)
    gc.disable()
    found = []
    for of in cases:
        with torch.no_grad():
            expected = float(of.model(*of.batch))
        runners = [runner(of, each) for each in of.named]
        for each, one in zip(of.named, runners, strict=True):
            with torch.no_grad():
                loss = float(one.module(of.batch))
            if not math.isclose(loss, expected, rel_tol=1e-4):
                raise SystemExit(f"{of.name}, {each.name}: a loss of {loss}, not {expected}")
        found.append(turns(runners, repeats))
        del runners
        gc.collect()
        if rank == 0:
            print(f"measured {len(of.named)} strategies of {of.name}", flush=True)
            Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def rows(of: Case, found: dict[str, list[list[float]]]) -> Iterator[dict[str, Any]]:
    for number, each in enumerate(of.named):
        steps = undisturbed(found["steps"][number], found["waited"][number])
        step = statistics.median(steps)
        compute = statistics.median(undisturbed(found["computing"][number], found["idle"][number]))
        yield {
            "model": of.name,
            "strategy": each.name,
            "mesh": str(each.strategy.mesh),
            "predicted_ms": each.cost.step_time * 1e3,
            "measured_ms": step * 1e3,
            "error": each.cost.step_time / step - 1,
            "least_ms": min(steps) * 1e3,
            "all_ms": statistics.median(found["steps"][number]) * 1e3,
            "waited_ms": statistics.median(found["waited"][number]) * 1e3,
            "predicted_compute_ms": each.cost.compute * 1e3,
            "measured_compute_ms": compute * 1e3,
            "predicted_communication_ms": each.cost.communication * 1e3,
            "measured_communication_ms": (step - compute) * 1e3,
        }


def ranked(own: Sequence[dict[str, Any]], found: dict[str, list[list[float]]]) -> dict[str, float]:
    """How well the predictions of one model rank its steps, their least, and the two parts; and the median error."""

    def tau(part: str, other: str) -> float:
        return kendall_tau([row[part] for row in own], [row[other] for row in own])

    return {
        "step": tau("predicted_ms", "measured_ms"),
        "least": tau("predicted_ms", "least_ms"),
        "compute": tau("predicted_compute_ms", "measured_compute_ms"),
        "communication": tau("predicted_communication_ms", "measured_communication_ms"),
        "again": kendall_tau(*([statistics.median(taken[half::2]) for taken in found["steps"]] for half in (0, 1))),
        "median_error": statistics.median(row["error"] for row in own),
        "compute_over_measured": statistics.median(r["predicted_compute_ms"] / r["measured_compute_ms"] for r in own),
        "communication_over_measured": sum(r["predicted_communication_ms"] for r in own)
        / sum(r["measured_communication_ms"] for r in own),
    }


def claim(of: Case, found: dict[str, list[list[float]]]) -> dict[str, Any]:
    planned, data = (undisturbed(*both) for both in zip(found["steps"], found["waited"], strict=True))
    ratios = [b / a for a, b in zip(*found["steps"], strict=True)]
    return {
        "model": of.name,
        "parameters": sum(parameter.numel() for parameter in of.model.parameters()),
        "batch": len(of.batch[0]),
        "predicted": of.named[1].cost.step_time / of.named[0].cost.step_time,
        "measured": statistics.median(data) / statistics.median(planned),
        "quartiles": statistics.quantiles(ratios, n=4),
        "plan_ms": statistics.median(planned) * 1e3,
        "data_parallel_ms": statistics.median(data) * 1e3,
        "paper": PAPER[of.name],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models, few strategies")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), metavar="NAME")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    began = time.perf_counter()
    torch.set_num_threads(PROCESSES)
    machine = calibrate("cpu", devices=PROCESSES, quick=options.quick)
    torch.set_num_threads(1)
    print(f"calibrated in {time.perf_counter() - began:.0f} s: {machine.to_json()}")
    wanted = options.models or list(MODELS)
    made, count, repeats = (SMALL, 8, 4) if options.quick else (MODELS, 32, 15)
    cases = [case(name, made[name], machine, count) for name in made if name in wanted]
    claimed = SMALL if options.quick else CLAIMED
    cases += [case(name, claimed[name], machine, 2, claim=True) for name in PAPER if name in wanted]
    print(f"planned after {time.perf_counter() - began:.0f} s")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(member, (folder, cases, repeats), nprocs=PROCESSES, start_method="fork")
        found = json.loads(Path(folder, "found.json").read_text())
    every: list[dict[str, Any]] = []
    taus, claims = {}, []
    columns = ("predicted_ms", "measured_ms", "error", "predicted_compute_ms", "measured_compute_ms")
    print(f"{'model':12} {'strategy':14} {'mesh':5}" + "".join(f"{c.removesuffix('_ms'):>18}" for c in columns))
    for of, taken in zip(cases, found, strict=True):
        if of.claim:
            claims.append(claim(of, taken))
            continue
        own = list(rows(of, taken))
        every += own
        taus[of.name] = ranked(own, taken)
        for row in own:
            told = "".join(f"{row[column]:18.2f}" for column in columns)
            print(f"{row['model']:12} {row['strategy']:14} {row['mesh']:5}{told}")
        print(", ".join(f"{key} {value:.2f}" for key, value in taus[of.name].items()))
    for row in claims:
        low, _, high = row["quartiles"]
        print(
            f"{row['model']}: data parallel / plan: {row['measured']:.2f} measured ({low:.2f} to {high:.2f}: "
            f"{row['data_parallel_ms']:.0f} ms / {row['plan_ms']:.0f} ms), {row['predicted']:.2f} predicted; "
            "the paper, 4 GPUs: " + ", ".join(f"{value:.2f} ({gpu})" for gpu, value in row["paper"].items())
        )
    load, seconds = os.getloadavg()[1], time.perf_counter() - began
    print(f"{seconds:.0f} s, with a load of {load:.1f} on {os.cpu_count()} cores")
    write(options.json, seconds=seconds, load=load, calibrated=machine.to_json(), tau=taus, claims=claims, rows=every)


if __name__ == "__main__":
    main()
