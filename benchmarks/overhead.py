"""One-device training by weft against a plain hand-written PyTorch loop over the same subnets and batches.

    python benchmarks/overhead.py [--quick] [--device cpu|cuda] [--json FILE]

Both train their own copy of the same supernet in one process, in alternating segments; the ratio is the median over
segments. To reach: at most 1.05 on a CPU, at most 0.7 on a GPU, where small subnets are bound by kernel launches.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from machine import write

import weft
from weft.data import Data, Tensors, digits
from weft.pipeline.determinism import deterministic
from weft.pipeline.session import Session
from weft.pipeline.settings import make_settings
from weft.pipeline.train import lay_out, open_run
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


def compare(
    name: str,
    build: Callable[[], weft.Chain],
    data: Data,
    batch: int,
    device: str,
    segments: int,
    length: int,
    last: bool = False,
) -> dict[str, Any]:
    steps = segments * length
    on_device = data.to(device)
    with tempfile.TemporaryDirectory() as folder:
        chain = weft.initialise(build, 0, device)
        settings = make_settings(
            chain, steps=steps, batch_size=batch, device=device, stream="spaced", channels_last=last
        )
        chain = lay_out(chain, settings)
        run = open_run(folder, name, False, settings.law(chain, data), None, settings.device, 1)
        session = Session(chain, on_device, settings)
        session.open(run)
        plain = PlainLoop(build, settings.stream, data, steps, batch, device, last)
        session.sequential.train_mode()
        batches = session.loader.iterate(0)
        times: dict[str, list[float]] = {"plain": [], "weft": []}

        def timed(who: str, work: Callable[[], None]) -> None:
            began = time.perf_counter()
            work()
            if device == "cuda":
                torch.cuda.synchronize()
            times[who].append((time.perf_counter() - began) / length * 1e3)

        def by_weft(start: int) -> None:
            for i in range(start, start + length):
                session.step(i, next(batches))

        def by_hand(start: int) -> None:
            for i in range(start, start + length):
                plain.step(i)

        for segment in range(segments):
            turns = [("plain", by_hand, nullcontext()), ("weft", by_weft, deterministic(settings.device))]
            for who, work, setting in turns if segment % 2 else reversed(turns):
                with setting:
                    timed(who, lambda work=work, segment=segment: work(segment * length))
        batches.close()
        run.events.close()
        session.sequential.eval_mode()
        ours, theirs = session.chain.state_dict(), plain.chain.state_dict()
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
        "batch": batch,
        "steps": steps,
        "weights_bit_equal": equal,
    }


def graphs_keep_the_fingerprint(build: Callable[[], weft.Chain], data: Data, steps: int, last: bool = False) -> bool:
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
                runs=folder,
                cuda_graphs=graphs,
                channels_last=last,
            )
            found.add(trained.fingerprint)
    return len(found) == 1


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
        compare(
            "nas-bench-macro",
            nas_bench_macro,
            images(4096 if gpu else 512),
            256 if gpu else 32,
            options.device,
            segments if gpu else macro_segments,
            length if gpu else macro_length,
        ),
    ]
    if gpu:
        rows.append(compare("nas-bench-macro", nas_bench_macro, images(4096), 256, "cuda", segments, length, last=True))
    extra: dict[str, Any] = {}
    if gpu:
        extra["graphs_keep_the_fingerprint"] = {
            "digits-conv": graphs_keep_the_fingerprint(digits_conv, digits(), 100),
            "nas-bench-macro": graphs_keep_the_fingerprint(nas_bench_macro, images(1024), 60),
            "nas-bench-macro, channels last": graphs_keep_the_fingerprint(nas_bench_macro, images(1024), 60, last=True),
        }
    print(f"{'space':18}{'device':8}{'plain ms':>10}{'weft ms':>10}{'ratio':>8}  layout")
    for row in rows:
        print(
            f"{row['space']:18}{row['device']:8}{row['plain_ms']:10.3f}{row['weft_ms']:10.3f}{row['ratio']:8.3f}"
            f"  {row['layout']}"
        )
    for name, value in extra.items():
        print(name, value)
    write(options.json, rows=rows, **extra)


if __name__ == "__main__":
    main()
