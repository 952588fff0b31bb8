"""One-device training by weft against a plain hand-written PyTorch loop over the same subnets and batches.

    python benchmarks/overhead.py [--quick] [--device cpu|cuda] [--json FILE]

Both train their own copy of the same supernet in one process, in alternating segments; the ratio is the median over
segments. To reach: at most 1.05 on a CPU, at most 0.7 on a GPU, where small subnets are bound by kernel launches. On a
GPU it also says whether CUDA graphs keep the fingerprint, and whether anything makes the host wait for the device.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from machine import write
from torch import Tensor, nn

import weft
from weft.data import Augment, Data, ShiftFlip, Tensors, digits
from weft.distributed.store import ControlStore
from weft.engine.rng import deterministic
from weft.trainer.config import Execution, RunConfig, TrainConfig, prefers_channels_last, resolve
from weft.trainer.manifest import describe_run, open_run
from weft.trainer.metrics_log import StepRecord
from weft.trainer.trainer import DeviceEngine, Engine, Trainer
from weft.utils.malloc import keep_freed_memory
from weft.zoo import digits_conv, digits_mlp, nas_bench_macro


class PlainLoop:
    """What a practitioner writes by hand: one optimizer over everything, gradients set to None, `backward`, `step`."""

    def __init__(
        self,
        build: Callable[[], weft.Chain],
        stream: weft.Stream,
        data: Data,
        steps: int,
        batch: int,
        device: str,
        last: bool,
    ) -> None:
        self.chain = weft.initialise(build, 0, device).train()
        if last:
            self.chain = self.chain.to(memory_format=torch.channels_last)
        self.stream, self.steps, self.batch = stream, steps, batch
        self.x, self.y = (data.train.column(name).to(device) for name in ("image", "label"))
        self.optimizer = torch.optim.SGD(self.chain.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        self.total = torch.zeros((), device=device)
        self.orders = weft.Loader(data.train, batch, 0)

    def step(self, i: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.05 * 0.5 * (1 + math.cos(math.pi * i / self.steps))
        place = i % self.orders.per_epoch
        if place == 0:  # the order of an epoch goes to the device once
            samples = [self.orders.samples(i + k) for k in range(self.orders.per_epoch)]
            self.order = torch.from_numpy(np.concatenate(samples)).to(self.x.device)
        where = self.order[place * self.batch : (place + 1) * self.batch]
        x, y = self.x[where], self.y[where]
        for layer in self.chain.route(self.stream[i][0]):
            x = self.chain.get_submodule(layer.name)(x)
        loss = F.cross_entropy(x, y)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.total += loss.detach()


class WeftLoop:
    """A run by weft on data that is kept on the device, a segment of steps at a time, with its log."""

    def __init__(
        self,
        folder: str,
        build: Callable[[], weft.Chain],
        data: Data,
        batch: int,
        device: str,
        steps: int,
        last: bool | None,
        augment: Augment | None = None,
    ) -> None:
        config = TrainConfig(steps=steps, batch_size=batch, stream="spaced", augment=augment)
        execution = Execution(device=device, channels_last=last)
        self.device, self.chain = torch.device(device), weft.initialise(build, 0, device)
        self.config = resolve(config, self.chain)
        execution.lay_out(self.chain)
        self.engine = self.make_engine(data.to(device), execution)
        self.trainer = Trainer(self.chain, data, self.config, self.engine, ControlStore.alone(), {})
        described = describe_run(self.chain, data, self.config, execution, None)
        self.trainer.open(open_run(RunConfig(name="run", folder=folder), described, self.device, False))
        if self.device.type == "cpu":
            keep_freed_memory()
        self.engine.begin(0)
        self.engine.layers.train_mode()

    def make_engine(self, data: Data, execution: Execution) -> Engine:
        return DeviceEngine(self.chain, data, self.config, execution)

    def train(self, stop: int) -> None:
        """The steps before ``stop`` that are not done yet."""
        for item in self.engine.train(stop, self.config.steps, lambda: False):
            if isinstance(item, StepRecord):
                self.trainer.emit("step", **item.fields(self.config))

    def close(self) -> None:
        self.engine.close()
        self.trainer.run.events.close()
        self.engine.layers.eval_mode()


def compare(
    name: str,
    build: Callable[[], weft.Chain],
    data: Data,
    batch: int,
    device: str,
    segments: int,
    length: int,
    last: bool | None = False,
    plain_last: bool | None = None,
) -> dict[str, Any]:
    """One row. ``last`` is weft's channels_last, None for its default; the plain loop has the same layout if not
    told."""
    steps = segments * length
    with tempfile.TemporaryDirectory() as folder:
        run = WeftLoop(folder, build, data, batch, device, steps, last)
        last = prefers_channels_last(run.chain, device) if last is None else last
        plain_last = last if plain_last is None else plain_last
        plain = PlainLoop(build, run.config.stream, data, steps, batch, device, plain_last)
        times: dict[str, list[float]] = {"plain": [], "weft": []}

        def timed(who: str, work: Callable[[], None]) -> None:
            began = time.perf_counter()
            work()
            if device == "cuda":
                torch.cuda.synchronize()
            times[who].append((time.perf_counter() - began) / length * 1e3)

        def by_weft(start: int) -> None:
            run.train(start + length)

        def by_hand(start: int) -> None:
            for i in range(start, start + length):
                plain.step(i)

        for segment in range(segments):
            turns = [("plain", by_hand, nullcontext()), ("weft", by_weft, deterministic(run.device))]
            for who, work, setting in turns if segment % 2 else reversed(turns):
                with setting:
                    timed(who, lambda work=work, segment=segment: work(segment * length))
        run.close()
        ours, theirs = run.chain.state_dict(), plain.chain.state_dict()
        equal = all(torch.equal(ours[key], theirs[key]) for key, _ in plain.chain.named_parameters())
    warm = segments // 4  # the first segments capture graphs and fill caches
    ratios = [w / p for w, p in zip(times["weft"][warm:], times["plain"][warm:], strict=True)]
    return {
        "space": name,
        "device": device,
        "plain_ms": statistics.median(times["plain"][warm:]),
        "weft_ms": statistics.median(times["weft"][warm:]),
        "ratio": statistics.median(ratios),
        "layout": "channels last" if last else "channels first",
        "plain_layout": "channels last" if plain_last else "channels first",
        "batch": batch,
        "steps": steps,
        "weights_bit_equal": equal if last == plain_last else None,
    }


def graphs_keep_the_fingerprint(
    build: Callable[[], weft.Chain], data: Data, steps: int, last: bool = False, **options: Any
) -> bool:
    """Whether training on the GPU with captured candidates ends with the same bits as without."""
    found = set()
    for graphs in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            trained = weft.train(
                build,
                data,
                steps=steps,
                batch_size=64,
                device="cuda",
                folder=folder,
                cuda_graphs=graphs,
                channels_last=last,
                **options,
            )
            found.add(trained.fingerprint)
    return len(found) == 1


def waits(
    build: Callable[[], weft.Chain], data: Data, batch: int, last: bool | None = None, augment: Augment | None = None
) -> str:
    """What makes the host wait for the GPU in 100 steps, after 80 that capture the candidates: "none", or what torch
    says and where."""
    with tempfile.TemporaryDirectory() as folder:
        run = WeftLoop(folder, build, data, batch, "cuda", 200, last, augment)
        try:
            with deterministic(run.device):
                run.train(80)
                torch.cuda.set_sync_debug_mode("error")
                run.train(180)
            return "none"
        except (RuntimeError, weft.WeftError) as problem:
            origin = problem.__cause__ or problem
            place = traceback.extract_tb(origin.__traceback__)[-1]
            return f"{origin} ({Path(place.filename).name}, line {place.lineno})"
        finally:
            torch.cuda.set_sync_debug_mode("default")
            run.close()


def noisy(width: int = 8) -> weft.Chain:
    """Dropout inside and between convolutions: what a replay draws must be what the layer would have drawn."""
    space = weft.Space()

    def candidate(kernel: int) -> nn.Module:
        convolution = nn.Conv2d(width, width, kernel, padding=kernel // 2)
        return nn.Sequential(convolution, nn.Dropout(0.2), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout2d(0.1))

    def head() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64 * width, 10))

    candidates = {f"conv{kernel}": partial(candidate, kernel) for kernel in (1, 3, 5)}
    return weft.Chain(
        weft.Shared(partial(nn.Conv2d, 1, width, 3, padding=1), "stem"),
        *[weft.Choice(space, f"block{index}", candidates) for index in range(4)],
        weft.Shared(head, "head"),
    )


class Awkward(nn.Module):
    """A layer that is hard to capture in one way, and whose input and weight are both used twice."""

    seen: Tensor

    def __init__(self, way: str, width: int) -> None:
        super().__init__()
        self.way = way
        self.own, self.other, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)
        self.register_buffer("table", torch.linspace(0, 1, width), persistent=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "in place":
            x = x.relu_()
        y: Tensor = self.own(x) + self.other(x) * self.table
        if self.way == "waits" and y.mean().item() > 0:
            y = y * 0.5
        if self.way == "draws" and torch.rand(()) < 0.5:  # on the host
            y = y * 0.5
        if self.way == "counts":
            self.seen = self.seen + 1
            y = y / (1 + self.seen)
        return F.dropout(self.norm(self.own(y)), 0.1, self.training)


def awkward(width: int = 64) -> weft.Chain:
    """What a graph cannot hold, or holds otherwise than the layer by itself, must end with the same bits too."""
    space = weft.Space()
    ways = {
        way.replace(" ", "_"): partial(Awkward, way, width) for way in ("no", "waits", "draws", "counts", "in place")
    }
    return weft.Chain(
        weft.Shared(nn.Flatten, "stem"),
        *[weft.Choice(space, f"block{index}", ways) for index in range(4)],
        weft.Shared(partial(nn.Linear, width, 10), "head"),
    )


def images(count: int, seed: int = 0) -> Data:
    """Random images in the shape of CIFAR-10: the time of a step does not depend on what they show."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 3, 32, 32, generator=draw)
    return Data("random-32x32", Tensors(image=x, label=torch.randint(0, 10, (count,), generator=draw)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    gpu = options.device == "cuda"
    segments, length = (8, 10) if options.quick else (40, 25)
    macro_segments, macro_length = (4, 3) if options.quick else (24, 5)
    rows = [
        compare("digits-conv", digits_conv, digits(), 64, options.device, segments, length),
        compare("digits-mlp", digits_mlp, digits(), 64, options.device, segments, length),
    ]
    extra: dict[str, Any] = {}
    if gpu:
        macro = partial(compare, "nas-bench-macro", nas_bench_macro, images(4096), 256, "cuda", segments, length)
        rows += [macro(last=None, plain_last=False), macro(last=True), macro(last=False)]
        extra["graphs_keep_the_fingerprint"] = {
            "digits-conv": graphs_keep_the_fingerprint(digits_conv, digits(), 100),
            "nas-bench-macro": graphs_keep_the_fingerprint(nas_bench_macro, images(1024), 60),
            "nas-bench-macro, channels last": graphs_keep_the_fingerprint(nas_bench_macro, images(1024), 60, last=True),
            "nas-bench-macro, channels last, bf16": graphs_keep_the_fingerprint(
                nas_bench_macro, images(1024), 60, last=True, precision="bf16"
            ),
            "dropout": graphs_keep_the_fingerprint(noisy, digits(), 60),
            "dropout, channels last": graphs_keep_the_fingerprint(noisy, digits(), 60, last=True),
            "dropout, bf16": graphs_keep_the_fingerprint(noisy, digits(), 60, precision="bf16"),
            "dropout, 4 micro-batches": graphs_keep_the_fingerprint(noisy, digits(), 60, microbatches=4),
            "awkward layers": graphs_keep_the_fingerprint(awkward, digits(), 60),
            "awkward layers, bf16": graphs_keep_the_fingerprint(awkward, digits(), 60, precision="bf16"),
        }
        extra["synchronisations"] = {
            "digits-conv": waits(digits_conv, digits(), 64),
            "nas-bench-macro": waits(nas_bench_macro, images(4096), 256, last=True, augment=ShiftFlip()),
        }
    else:
        rows.append(compare("nas-bench-macro", nas_bench_macro, images(512), 32, "cpu", macro_segments, macro_length))
    print(f"{'space':18}{'device':8}{'plain ms':>10}{'weft ms':>10}{'ratio':>8}  layout (of the plain loop)")
    for row in rows:
        print(
            f"{row['space']:18}{row['device']:8}{row['plain_ms']:10.3f}{row['weft_ms']:10.3f}{row['ratio']:8.3f}"
            f"  {row['layout']} ({row['plain_layout']})"
        )
    for name, value in extra.items():
        print(name, value)
    write(options.json, rows=rows, **extra)


if __name__ == "__main__":
    main()
