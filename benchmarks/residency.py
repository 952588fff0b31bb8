"""Supernets larger than a device: step times of layers that live on the host, against those that all stay there.

    python benchmarks/residency.py [--quick] [--json FILE] [--spaces NLP.c3 ...] [--tokens 512 ...] [--precision bf16]

The spaces are NASPipe's NLP ones with weights, and a wide one (``residency_space`` says which), trained with AdamW (12
bytes a parameter), one subnet a step, in sentences of 64 tokens; the stream is ``spaced``. Times are medians of rounds,
in which ways take turns; within a round, from the end of one step to the end of another on the device, after steps to
get into it. Copies for later steps are under way at both ends: a device that is emptied at the end of a round would
count them to its steps, while none were left over from before. Ways:

resident    all layers and their state stay on the device
on-demand   a layer is copied to the device before a step and back after it, and everything waits for that: what
            NASPipe's published code does, but with pinned memory, and with optimizer state
weft        a budget of a quarter of the state; copies run beside the work, both ways at once

`bound_ms` is the larger of the resident step and of the bytes that weft moves over the bandwidth of the bus, measured
with copies both ways at once. `hit_rate` is the share of uses for which the device did not wait. `peak_gib` is the most
that layers took, beside which activations and gradients have theirs. `crossing` says for every space from how many
tokens a step on the work takes longer than the copies, by a line through the rows.

The host memory is pinned once, for the largest space (about 0.6 s a GiB). With --quick everything is small and runs on
the CPU, where memory stands in for a device and copies take the time of the step.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from machine import write
from residency_space import SPACES, Size, build
from torch import Tensor

from weft.engine.consistency import Exact
from weft.engine.optimizer import Optimizer
from weft.engine.reference import SequentialReference
from weft.engine.rng import deterministic
from weft.engine.train_step import TrainStep
from weft.offload.config import OffloadConfig
from weft.offload.copy_engine import CopyEngine, CudaCopy
from weft.offload.host_memory import allocate_host
from weft.offload.setup import attach, detach
from weft.space import Stream, Subnet, make_stream

GIB = 2**30
LENGTH = 64
STEPS = 100_000
ROUNDS, MOST_ROUNDS = 3, 5  # the more where a step is short, since those are bound by a host that is not always as fast
SHORT = 4096  # tokens
WARM = 12  # steps before those that are timed
SMALL = Size(1, 64, 12)
PERIOD, FIRST = 256, 150  # steps after which the stream begins anew, and the first of those that are timed


class Blocking(CudaCopy):
    """Copies that everything waits for."""

    def to_device(self, target: Tensor, source: Tensor, after: Sequence[Any]) -> None:
        torch.cuda.synchronize()
        target.copy_(source)
        torch.cuda.synchronize()

    to_host = to_device

    def record(self) -> None:
        return None


def loss(outputs: Tensor, batch: Any) -> Tensor:
    return outputs.float().square().mean()


class Repeated(Stream):
    """The first steps of a stream, over and over, so that every way can be given the same ones."""

    name = "repeated"
    summary = "steps of another stream, over and over"
    bits = 0.0

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream.space)
        self._steps = [stream[index] for index in range(PERIOD)]

    def _step(self, index: int) -> tuple[Subnet, ...]:
        return self._steps[index % PERIOD]


class Bench:
    """One space on one device; a row for every way and number of tokens."""

    def __init__(self, name: str, arguments: argparse.Namespace, bus: float, given: Tensor | None) -> None:
        self.name, self.arguments, self.bus, self.given = name, arguments, bus, given
        self.device = torch.device("cuda" if torch.cuda.is_available() and not arguments.quick else "cpu")
        size = SMALL if arguments.quick else SPACES[name]
        self.d = size.d
        self.whole = build(size).to(self.device)  # first: the host has no room for both
        self.chain = build(size)
        self.stream = Repeated(make_stream(self.chain.space, "spaced", 0))
        self.choices = 24 * size.copies
        self.parameters = sum(p.numel() for p in self.chain.parameters())
        self.state = 12 * self.parameters
        self.budget = self.state // 4
        self.told: Counter[str] = Counter()

    def config(self) -> TrainStep:
        return TrainStep(
            steps=STEPS,
            stream=self.stream,
            consistency={name: Exact() for name in self.chain.layers},
            loss=loss,
            optimizer=Optimizer("adamw", lr=1e-4, schedule="constant"),
            precision=self.arguments.precision,
        )

    def batch(self, tokens: int) -> dict[str, Tensor]:
        return {"x": torch.randn(max(tokens // LENGTH, 1), LENGTH, self.d, device=self.device)}

    def round(
        self, sequential: SequentialReference, tokens: int, number: int, count: int, empty: bool = False
    ) -> float:
        """Milliseconds a step; every way does the same steps."""
        batch = self.batch(tokens)
        memory: Any = sequential.offload
        first = (number + 2) * PERIOD + FIRST
        began = Moment(self.device)
        for step in range(first - WARM, first + count):
            if step == first:
                self.count(memory, -1)
                began = Moment(self.device)
            sequential.step(step, batch)
            if empty and memory is not None:
                memory.device.evict_all()
        took = began.until(Moment(self.device))
        self.count(memory, 1)
        return took / count

    def count(self, memory: Any, sign: int) -> None:
        if memory is not None:
            told = memory.stats()
            self.told.update({key: sign * told[key] for key in ("uses", "misses", "loaded_bytes", "evicted_bytes")})

    def warm(self, sequential: SequentialReference) -> None:
        """Every layer is used once, so that its optimizer state is there."""
        batch = self.batch(LENGTH)
        for step in range(self.choices + self.choices // 2):
            sequential.step(step, batch)
        synchronize()

    def rows(self) -> list[dict[str, Any]]:
        tokens, count = self.arguments.tokens, 2 if self.arguments.quick else 16
        found: dict[tuple[str, int], dict[str, Any]] = {}
        weft = SequentialReference(self.chain, self.config(), self.device)
        memory = attach(weft, OffloadConfig(self.budget), host_buffer=self.given)
        whole = SequentialReference(self.whole, self.config(), self.device)
        ways = {"weft": weft, "resident": whole}
        for sequential in ways.values():
            sequential.train_mode()
            self.warm(sequential)
        rounds = iter(range(10**6))
        for n in tokens:
            self.told.clear()
            times: dict[str, list[float]] = {way: [] for way in ways}
            many = ROUNDS if n > SHORT or self.arguments.quick else MOST_ROUNDS
            for number in (next(rounds) for _ in range(many)):
                for way, sequential in ways.items():
                    times[way].append(self.round(sequential, n, number, count))
            for way, sequential in ways.items():
                row = self.row(way, n, median(times[way]), sequential.offload, many * count)
                found[way, n] = {**row, "rounds_ms": times[way]}
        memory.device.copy_engine = Blocking(self.device) if self.device.type == "cuda" else CopyEngine()
        memory._config = replace(memory._config, prefetch=0)
        memory.flush()
        for n in tokens:
            self.told.clear()
            took = self.round(weft, n, next(rounds), count, True)
            found["on-demand", n] = self.row("on-demand", n, took, memory, count)
        detach(self.chain)
        return [self.compared(row, found) for row in found.values()]

    def row(self, way: str, tokens: int, step_ms: float, memory: Any, count: int) -> dict[str, Any]:
        row: dict[str, Any] = {
            "space": self.name,
            "params_b": self.parameters / 1e9,
            "state_gib": self.state / GIB,
            "budget_gib": None if way == "resident" else self.budget / GIB,
            "tokens": tokens,
            "way": way,
            "step_ms": step_ms,
        }
        if memory is not None:
            told = memory.stats()
            assert told["peak"] <= self.budget
            row |= {
                "brought_mib": self.told["loaded_bytes"] / count / 2**20,
                "sent_mib": self.told["evicted_bytes"] / count / 2**20,
                "hit_rate": 1 - self.told["misses"] / self.told["uses"] if way == "weft" else 0.0,
                "peak_gib": told["peak"] / GIB,
            }
        return row

    def compared(self, row: dict[str, Any], found: dict[tuple[str, int], dict[str, Any]]) -> dict[str, Any]:
        resident, weft = found["resident", row["tokens"]], found["weft", row["tokens"]]
        copies = max(weft["brought_mib"], weft["sent_mib"]) * 2**20 / self.bus * 1e3
        bound = max(resident["step_ms"], copies)
        return {
            **row,
            "copies_ms": copies,
            "ratio_to_resident": row["step_ms"] / resident["step_ms"],
            "bound_ms": bound,
            "ratio_to_bound": row["step_ms"] / bound,
        }


class Moment:
    """When the device has done all that it was given so far."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()
        self._at = time.perf_counter()

    def until(self, other: Moment) -> float:
        """Milliseconds."""
        if self._event is None:
            return (other._at - self._at) * 1e3
        other._event.synchronize()
        took: float = self._event.elapsed_time(other._event)
        return took


def bandwidth(device: torch.device, given: Tensor | None, size: int = 64 * 2**20) -> float:
    """Bytes a second, each way, with copies both ways at once, from and to all over the host's memory: parts of it may
    be farther from the bus than others."""
    copy_engine: CopyEngine = CudaCopy(device) if device.type == "cuda" else CopyEngine()
    host = given if given is not None else torch.empty(2 * size, dtype=torch.uint8)
    one, other = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    places = [place * (len(host) - 2 * size) // 15 // 512 * 512 for place in range(16)]
    best = 0.0
    for _ in range(3):
        synchronize()
        began = time.perf_counter()
        for place in places:
            copy_engine.to_device(one, host[place : place + size], ())
            copy_engine.to_host(host[place + size : place + 2 * size], other, ())
        synchronize()
        best = max(best, 16 * size / (time.perf_counter() - began))
    return best


def crossing(rows: list[dict[str, Any]], space: str) -> float | None:
    """Tokens a step at which the work of a resident step takes as long as the copies."""
    points = sorted(
        (row["tokens"], row["step_ms"] - row["copies_ms"])
        for row in rows
        if row["space"] == space and row["way"] == "resident"
    )
    for (a, low), (b, high) in pairwise(points):
        if low <= 0 < high:
            return a + (b - a) * -low / (high - low)
    return None


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_bytes(space: str) -> int:
    """What the host must hold of a space: 12 bytes a parameter, and the gaps between tensors."""
    return int(12 * SPACES[space].parameters * 1.03) + 256 * 2**20


def measured(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    cuda = torch.cuda.is_available() and not arguments.quick
    device = torch.device("cuda" if cuda else "cpu")
    began = time.perf_counter()
    given = allocate_host(max(host_bytes(space) for space in arguments.spaces), pin=True) if cuda else None
    more: dict[str, Any] = {"pinning_s": time.perf_counter() - began}
    bus = bandwidth(device, given)
    more["bus_gb_s"] = bus / 1e9
    rows: list[dict[str, Any]] = []
    for space in arguments.spaces:
        bench = Bench(space, arguments, bus, given)
        rows += bench.rows()
        del bench
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        for row in rows[-3 * len(arguments.tokens) :]:
            shown = {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in row.items()}
            print("  ".join(f"{key} {value}" for key, value in shown.items()), flush=True)
        write(arguments.json, rows=rows, **more)
    more["crossing"] = {space: crossing(rows, space) for space in arguments.spaces}
    return rows, more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--spaces", nargs="+", default=list(SPACES), choices=list(SPACES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.spaces, arguments.tokens = ["NLP.c3"], [64, 512]
    with deterministic(torch.device("cuda" if torch.cuda.is_available() else "cpu")):
        rows, more = measured(arguments)
    print(more)
    write(arguments.json, rows=rows, **more)


if __name__ == "__main__":
    main()
