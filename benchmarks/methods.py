"""Search methods at equal time, against true accuracies that others measured; what `search_quality.py --methods` runs.

Every method has the same seconds on the same device, training and searching taken together, and ends with one pick.
`regret` is the true accuracy that the pick misses of the best, in percent; `tau` ranks what a method can rank:
probabilities of subnets for those that learn a mixture (over the whole table), inherited losses for those that train
by samples (over the subnets that evolution scored). `random` draws one subnet and knows nothing, and `table-evolution`
is regularized evolution that reads the true accuracies of as many subnets as `QUERIES` says, which no real search can.
With `--picks`, `picks` of those that learn a mixture has what every way of `picks.py` chooses with the same weights,
and the seconds that it takes, which those of the row do not include.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import picks
import torch
import torch.multiprocessing as mp
from ranks import kendall_tau

import weft
from weft.data import Data, Tensors, load
from weft.engine.rng import deterministic
from weft.errors import SearchError
from weft.search import Objective, run_search
from weft.search.gradient import GradientMethod, GradientSearchResult, make_gradient_method, search_gradient
from weft.space import Subnet
from weft.supernet import Chain
from weft.zoo import macro_key, nas_bench_201, nas_bench_macro, nas_bench_macro_entangled, nb201_key

QUERIES = 50
LEARNED = ("darts", "darts2", "drnas", "gdas")
SAMPLED = ("spos", "fairnas", "sandwich")
BASELINES = ("random", "table-evolution")


@dataclass(frozen=True)
class Bench:
    """A space with a table of true accuracies."""

    build: Callable[[], Chain]
    key: Callable[[Subnet], str]
    table: str
    batch: int
    rate: float

    def truth(self, folder: Path) -> dict[str, float]:
        if self.table == "macro":
            text = (folder / "nas-bench-macro" / "nas-bench-macro_cifar10.json").read_text()
            return {key: entry["mean_acc"] for key, entry in json.loads(text).items()}
        packed = (folder / "nas-bench-201" / "nasbench201.csv.gz").read_bytes()
        rows = csv.DictReader(io.StringIO(gzip.decompress(packed).decode()))
        seeds = [f"cifar10_val_acc_s{seed}" for seed in range(3)]
        return {row["arch"]: float(np.mean([float(row[s]) for s in seeds if row[s]])) for row in rows}


BENCHES = {
    "nas-bench-macro": Bench(nas_bench_macro, macro_key, "macro", 128, 0.1),
    "nas-bench-macro-entangled": Bench(nas_bench_macro_entangled, macro_key, "macro", 128, 0.1),
    "nas-bench-201": Bench(partial(nas_bench_201, cells=1), nb201_key, "201", 128, 0.05),
    "nas-bench-201-entangled": Bench(partial(nas_bench_201, cells=1, entangled=True), nb201_key, "201", 128, 0.05),
}


@dataclass(frozen=True)
class Job:
    space: str
    method: str
    seed: int
    seconds: float
    warm: float | None = None  # the part of the steps in which the weights learn alone; None: as the product has it
    picks: bool = False  # whether other ways to choose a subnet are tried too

    @property
    def id(self) -> tuple[str, str, int, float, float | None]:
        return self.space, self.method, self.seed, self.seconds, self.warm


def options_of(bench: Bench, device: str, steps: int, seed: int, folder: str) -> dict[str, Any]:
    return {
        "batch_size": bench.batch,
        "optimizer": weft.Optimizer(
            "sgd", lr=bench.rate, momentum=0.9, weight_decay=5e-4, warmup_steps=min(50, steps // 10)
        ),
        "augment": weft.ShiftFlip("image", padding=4),
        "metrics": {"accuracy": weft.accuracy},
        "seed": seed,
        "device": device,
        "channels_last": False,  # what mixtures do with filters is for the usual layout
        "folder": folder,
        "checkpoint_every": steps,
        "keep_checkpoints": 1,
    }


_PACES: dict[tuple[str, str], float] = {}


def pace(space: str, method: str, data: Data, device: str) -> float:
    """Seconds that a step of the method takes on this machine, what happens once left out; measured once."""
    if (space, method) in _PACES:
        return _PACES[space, method]
    arrived: dict[int, float] = {}

    def mark(event: Mapping[str, Any]) -> None:
        if event["event"] == "step":
            arrived[event["step"]] = time.perf_counter()

    # On a GPU losses arrive 32 at a time, when the next 32 are sent: equally late, so differences tell.
    with tempfile.TemporaryDirectory() as folder:
        _train(BENCHES[space], data, Job(space, method, 0, 0.0, warm=0.0), device, 192, folder, [mark])
    _PACES[space, method] = (arrived[127] - arrived[31]) / 96
    return _PACES[space, method]


def _train(bench: Bench, data: Data, job: Job, device: str, steps: int, folder: str, callbacks: list[Any]) -> Any:
    options = {**options_of(bench, device, steps, job.seed, folder), "callbacks": callbacks}
    method = make_gradient_method(job.method)
    if isinstance(method, GradientMethod):
        if job.warm is not None:
            options["architecture"] = weft.Optimizer("adam", lr=1e-2, betas=(0.5, 0.999), weight_decay=1e-3)
            options["weight_warmup_steps"] = int(steps * job.warm) // 2 * 2
        return search_gradient(bench.build, data, method=method, steps=steps, **options)
    if method.microbatches:
        options |= {"microbatches": method.microbatches, "distill": method.distils}
    return weft.train(bench.build, data, steps=steps, stream=method.stream, **options)


def measure(job: Job, data: Data, truth: Mapping[str, float], device: str) -> dict[str, Any]:
    """One row."""
    bench = BENCHES[job.space]
    space = bench.build().space
    extra: dict[str, Any] = {}
    choosing = 0.0
    began = time.perf_counter()
    if job.method == "random":
        pick, tau = space.sample(np.random.default_rng(job.seed)), math.nan
    elif job.method == "table-evolution":
        found = run_search(
            space,
            lambda subnet: {"accuracy": truth[bench.key(subnet)]},
            "evolution",
            [Objective("accuracy", maximize=True)],
            budget=QUERIES,
            seed=job.seed,
        )
        pick, tau = max(found.scored, key=lambda s: s.scores["accuracy"]).subnet, math.nan
    else:
        a_step = pace(job.space, job.method, data, device)
        learned = job.method in LEARNED
        steps = max(int((job.seconds if learned else 0.75 * job.seconds) / a_step), 20)
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            if learned:
                result = _train(bench, data, job, device, steps, folder, [])
                pick, mixture = result.subnet, {n: result.mixture[n].log().tolist() for n in space.choices}
                options = {n: space.choices[n].options for n in space.choices}
                likely = {
                    bench.key(s): sum(mixture[n][options[n].index(v)] for n, v in s.values.items())
                    for s in space.enumerate()
                }
                tau = kendall_tau(list(likely.values()), [truth[key] for key in likely])
                extra["mixture"] = {n: [round(math.exp(p), 4) for p in row] for n, row in mixture.items()}
                if job.picks:
                    aside = time.perf_counter()
                    extra["picks"] = _picks(result, bench, truth)
                    choosing = time.perf_counter() - aside
            else:
                trained = _train(bench, data, job, device, steps, folder, [])
                pick, tau, extra["scored"] = _evolve(trained, bench, truth, job, began)
        extra |= {"steps": steps, "seconds_a_step": a_step}
    took = time.perf_counter() - began - choosing
    told = _told(bench, truth, pick)
    return {
        "space": job.space,
        "method": job.method,
        "seed": job.seed,
        "budget_seconds": job.seconds,
        "warm": job.warm,
        "seconds": took,
        "tau": tau,
        **told,
        "top1pct": told["rank"] - 1 < 0.01 * len(truth),
        "pick_true_accuracy": truth[told["pick"]],
        **extra,
    }


def _told(bench: Bench, truth: Mapping[str, float], pick: Subnet) -> dict[str, Any]:
    own = truth[bench.key(pick)]
    rank = 1 + sum(value > own for value in truth.values())
    return {"pick": bench.key(pick), "rank": rank, "regret": max(truth.values()) - own}


def _picks(found: GradientSearchResult, bench: Bench, truth: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """What every way chooses."""
    trained, told = found.trained, {}
    assert found.mixture is not None
    with deterministic(trained.device):
        for name, way in picks.ways(trained, found.mixture).items():
            began = time.perf_counter()
            told[name] = {**_told(bench, truth, way()), "seconds": time.perf_counter() - began}
    return told


def _evolve(
    trained: weft.TrainedRun, bench: Bench, truth: Mapping[str, float], job: Job, began: float
) -> tuple[Subnet, float, int]:
    """Evolution for the least inherited loss until the time is up."""

    class TimeUp(SearchError):
        pass

    seen: dict[Subnet, float] = {}

    def stop(scored: Any, cached: bool) -> None:
        seen[scored.subnet] = scored.scores["loss"]
        if time.perf_counter() - began > job.seconds and len(seen) >= 10:
            raise TimeUp

    with contextlib.suppress(TimeUp):
        weft.search(
            trained,
            minimize="loss",
            budget=2000,
            method="evolution",
            seed=job.seed,
            bn_batches=1,
            batch_size=5000 if trained.device.type == "cuda" else 500,  # small kernels: time is launches
            on_score=stop,
        )
    pick = min(seen, key=lambda subnet: seen[subnet])
    tau = kendall_tau([-loss for loss in seen.values()], [truth[bench.key(subnet)] for subnet in seen])
    return pick, tau, len(seen)


def decoded(folder: Path, to: Path, limit: int | None) -> None:
    """The images as tensors in a file, so that workers need not decode them each."""
    whole = load(
        folder / "cifar10-jpeg" / "cifar10_jpeg_36k.npz", validation=0.5, **({"limit": limit} if limit else {})
    )
    assert whole.validation is not None
    parts = {
        name: source.take(np.arange(len(source))) for name, source in (("t", whole.train), ("v", whole.validation))
    }
    torch.save(parts, to)


def worker(jobs: Any, done: Any, cache: str, folder: str, device: str, threads: int) -> None:
    logging.getLogger("weft").setLevel(logging.ERROR)
    torch.set_num_threads(threads)
    parts = torch.load(cache, weights_only=True, mmap=True)
    data = Data("cifar10", Tensors(**parts["t"]), Tensors(**parts["v"])).to(device)
    truths = {name: bench.truth(Path(folder)) for name, bench in BENCHES.items()}
    while (job := jobs.get()) is not None:
        try:
            done.put(measure(job, data, truths[job.space], device))
        except Exception as problem:  # one job that fails must not end the grid; its row says why
            done.put({"space": job.space, "method": job.method, "seed": job.seed, "failed": repr(problem)})
    done.put(None)


def run(jobs: Iterable[Job], folder: Path, device: str, workers: int, limit: int | None) -> Iterator[dict[str, Any]]:
    """The rows of all jobs as they come, from several processes beside each other."""
    with tempfile.TemporaryDirectory() as temporary:
        cache = Path(temporary) / "images.pt"
        decoded(folder, cache, limit)
        context = mp.get_context("spawn")
        todo, done = context.Queue(), context.Queue()
        for job in jobs:
            todo.put(job)
        threads = max(1, torch.get_num_threads() // workers)
        started = []
        for _ in range(workers):
            todo.put(None)
            arguments = (todo, done, str(cache), str(folder), device, threads)
            started.append(context.Process(target=worker, args=arguments))
            started[-1].start()
        left = workers
        while left:
            row = done.get()
            if row is None:
                left -= 1
            else:
                yield row
        for process in started:
            process.join()
