"""Packing simulated with the packer that studies use: time against what no packing can beat, and against static ways.

    python benchmarks/packing.py [--quick] [--json FILE]

Trials are drawn, not recorded: 70 % small, 25 % medium, 5 % large, in one random order, seed 0.

            memory of a device   seconds alone (log-normal)          use of a device's time     devices
    small   0.5 - 2 GiB          median 120, spread 0.5              0.05 - 0.35                1
    medium  2 - 30 GiB           median 500, spread 0.5              0.3 - 0.9                  1
    large   60 - 130 GiB         median 1200, spread 0.4, <= 2400    0.85 - 1                   1, 2, 4 or 8

Devices have 141 GB (H200), eight a node, 0.5 GiB of which every process takes for itself. A device gives its trials
what they ask for, or each as much less; a split trial goes at the pace of its slowest device. `loss` is what every
trial beyond the first takes of the speed of all (0, or 0.02 for processes that share by turns).

rows        `over_bound` is the makespan over the largest of: all work / devices, all bytes x seconds / memory, the
            longest trial. `speedup` is the makespan of one trial a device over that of the way. Ways:
  weft      memory and seconds of each trial are known beforehand, and the packer is told rates while trials run; all
            wait from the start
  memory    only memory is known, and trials report nothing
  window N  as `weft`, with a study's window of N trials: trial i waits for the results of those before i - N
  one       one trial a device, in order, a later one that fits before an earlier one that does not (Ray's way)
  1/K       the same with K equal slots a device; what needs more memory than a slot gets a device to itself
  degree D  every trial split over D devices, as a run with one fixed degree is: the part of its time in which it keeps
            a device busy shrinks by D, less what `communication` says of D, the rest does not
`communication`  see below
`scheduler` seconds that the packer itself takes for 10,000 trials, over the makespan

ScaMP says 29 % less time: 1.29 times as fast, or 1.41 times (1 / (1 - 0.29)).

Communication. 400 transformers of a search (width 1024 - 4096, 12 - 36 layers, 4 - 16 sequences of 1024 tokens, half
precision) on 32 V100 of 32 GiB, eight a node, by the planner's machine and its costs of collectives: each layer sums
its activations four times a step over the devices that share it (operator split), and nothing overlaps. A candidate
needs 18 bytes a weight and 34 + 5 heads length / width bytes an activation. `fixed` is the least degree that all of
them fit, `chosen` for each its own, `micro` for each its own with the largest micro-batch that fits, down to one
sequence, before it is split any further: weft's order. ScaMP says 28 % of the time before, 15 % after.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from machine import write
from packing_simulator import Recorded, lower_bound, simulate

from weft.hardware.collectives import all_reduce
from weft.hardware.presets import preset
from weft.tune.packing.packer import Packer, Placement
from weft.tune.packing.pool import DeviceCapacity, JobSpec
from weft.utils.rng import generator

GIB = 2**30
MEMORY, RESERVE, NODE = int(141e9), GIB // 2, 8
FRACTIONS = (2, 4, 8, 16)
DEGREES = (1, 2, 4, 8)


def trials(count: int, seed: int = 0) -> list[Recorded]:
    found = []
    for number in range(count):
        draw = generator(seed, "packing", number)
        kind = draw.random()
        degree = 1
        if kind < 0.70:
            memory, seconds, demand = draw.uniform(0.5, 2), draw.lognormal(0, 0.5) * 120, draw.uniform(0.05, 0.35)
        elif kind < 0.95:
            memory, seconds, demand = draw.uniform(2, 30), draw.lognormal(0, 0.5) * 500, draw.uniform(0.3, 0.9)
        else:
            memory, demand = draw.uniform(60, 130), draw.uniform(0.85, 1)
            seconds = min(draw.lognormal(0, 0.4) * 1200, 2400)
            degree = int(draw.choice([1, 1, 1, 2, 2, 4, 8]))
        load = JobSpec(f"t{number}", int(memory * GIB), degree, seconds, kind=f"k{number}")
        found.append(Recorded(load, seconds, demand))
    return found


def untimed(all_: Sequence[Recorded]) -> list[Recorded]:
    """The same trials, of which nobody knows how long they take."""
    return [replace(one, load=replace(one.load, seconds=None)) for one in all_]


def split(all_: Sequence[Recorded], degree: int, share_of: dict[int, float]) -> list[Recorded]:
    """Every trial over so many devices; none over fewer than it needs."""
    found = []
    for one in all_:
        over = max(degree, one.load.degree)
        slower = (1 - share_of[one.load.degree]) / (1 - share_of[over])
        seconds = one.seconds * (1 - one.demand + one.demand * one.load.degree / over * slower)
        memory = (one.load.memory or 0) * one.load.degree // over
        load = replace(one.load, degree=over, memory=memory, seconds=seconds, exclusive=True)
        found.append(Recorded(load, seconds, one.demand))
    return found


class Static:
    """In order, first fit: every device has equal slots, a trial takes one, or the whole device if it is too large."""

    def __init__(self, devices: Sequence[DeviceCapacity], slots: int) -> None:
        self.devices, self.slots = tuple(devices), slots
        self._free = [slots] * len(devices)
        self._running: dict[str, tuple[tuple[int, ...], int]] = {}
        self._nodes: dict[str, list[int]] = {}
        for place, device in enumerate(devices):
            self._nodes.setdefault(device.node, []).append(place)

    def admit(self, waiting: Iterable[JobSpec], now: float = 0.0) -> list[Placement]:
        started: list[Placement] = []
        refused: set[tuple[int, int]] = set()
        for load in waiting:
            slot = (self.devices[0].memory or 0) // self.slots
            takes = 1 if (load.memory or 0) + self.devices[0].reserve <= slot and load.degree == 1 else self.slots
            if (takes, load.degree) in refused:
                continue
            for node in self._nodes.values():
                places = [place for place in node if self._free[place] >= takes][: load.degree]
                if len(places) == load.degree:
                    break
            else:
                refused.add((takes, load.degree))
                if (1, 1) in refused:
                    break
                continue
            for place in places:
                self._free[place] -= takes
            self._running[load.id] = (tuple(places), takes)
            started.append((load.id, tuple(places)))
        return started

    def ended(self, id: str) -> None:
        places, takes = self._running.pop(id)
        for place in places:
            self._free[place] += takes

    def measured(self, id: str, rate: float) -> None:
        pass


class Timed(Packer):
    """Counts the seconds that its own decisions take."""

    spent = 0.0

    def admit(self, waiting: Iterable[JobSpec], now: float = 0.0) -> list[Placement]:
        began = time.perf_counter()
        try:
            return super().admit(waiting, now)
        finally:
            self.spent += time.perf_counter() - began

    def ended(self, id: str) -> None:
        began = time.perf_counter()
        super().ended(id)
        self.spent += time.perf_counter() - began


def devices(count: int) -> list[DeviceCapacity]:
    return [DeviceCapacity(MEMORY, f"node{place // NODE}", RESERVE) for place in range(count)]


def makespans(count: int, places: int, loss: float, share_of: dict[int, float], quick: bool) -> list[dict[str, Any]]:
    all_, floor = trials(count), devices(places)
    bound = lower_bound(all_, floor)
    windows = [] if quick else [8 * places, 32 * places]
    ways: list[tuple[str, Sequence[Recorded], Any, dict[str, Any]]] = [
        ("one", all_, Static(floor, 1), {}),
        ("weft", all_, Packer(floor), {"measure": True}),
        ("memory", untimed(all_), Packer(floor), {}),
        *((f"window {w}", all_, Packer(floor), {"measure": True, "window": w}) for w in windows if w < count),
        *((f"1/{slots}", all_, Static(floor, slots), {}) for slots in FRACTIONS),
        *((f"degree {d}", split(all_, d, share_of), Static(floor, 1), {}) for d in DEGREES[1:]),
    ]
    if places > 32:  # the static ways take minutes there, and their order is that of 32
        ways = [way for way in ways if way[0] in ("one", "weft", "memory", "1/4")]
    rows: list[dict[str, Any]] = []
    for way, given, packer, more in ways:
        packed = simulate(given, packer, loss=loss, **more)
        rows.append(
            {
                "devices": places,
                "trials": count,
                "loss": loss,
                "way": way,
                "makespan_s": round(packed.makespan, 1),
                "bound_s": round(bound, 1),
                "over_bound": round(packed.makespan / bound, 4),
                "speedup": round(rows[0]["makespan_s"] / packed.makespan, 4) if rows else 1.0,
                "mean_memory": round(packed.mean_memory, 4),
                "most_on_a_device": packed.most,
            }
        )
        print(rows[-1], flush=True)
    return rows


def scheduler(count: int, places: int) -> dict[str, Any]:
    packer = Timed(devices(places))
    packed = simulate(trials(count), packer, measure=True)
    share = packer.spent / packed.makespan
    row = {"devices": places, "trials": count, "spent_s": round(packer.spent, 2), "share_of_makespan": round(share, 6)}
    print(row, flush=True)
    return row


def communication(count: int) -> dict[str, Any]:
    """The share of the time, over all candidates, at each fixed degree and at each candidate's own."""
    machine, length, head = preset("V100"), 1024, 64
    candidates: list[tuple[int, int, int]] = []
    for number in range(count):
        draw = generator(0, "communication", number)
        width = int(draw.choice([1024, 1536, 2048, 3072, 4096]))
        candidates.append((width, int(draw.choice([12, 24, 36])), int(draw.choice([4, 8, 16]))))

    def fits(width: int, layers: int, batch: int, degree: int) -> bool:
        activations = length * batch * width * layers * (34 + 5 * (width / head) * length / width)
        return (18 * 12 * layers * width**2 + activations) / degree + RESERVE <= machine.device.capacity

    def step(one: tuple[int, int, int], degree: int, micro: int) -> tuple[float, float]:
        moved, whole = _step(machine, one[0], one[1], micro, length, degree)
        return moved * one[2] / micro, whole * one[2] / micro

    whole = [one for one in candidates if fits(*one, DEGREES[-1])]
    least = {one: min(d for d in DEGREES if fits(*one, d)) for one in whole}
    fixed = max(least.values())
    cut: dict[tuple[int, int, int], tuple[int, int]] = {}
    for one in whole:
        sizes = [2**k for k in range(5) if 2**k <= one[2]]
        degree = min(d for d in DEGREES if fits(one[0], one[1], 1, d))
        cut[one] = degree, max(micro for micro in sizes if fits(one[0], one[1], micro, degree))

    def share(picks: list[tuple[tuple[int, int, int], int, int]]) -> tuple[float, float]:
        """Of the device-seconds that go into sums; and all of them."""
        times = [(step(one, degree, micro), degree) for one, degree, micro in picks]
        total = sum(all_ * degree for (_, all_), degree in times)
        return sum(moved * degree for (moved, _), degree in times) / total, total

    at_fixed = share([(one, fixed, one[2]) for one in whole])
    at_chosen = share([(one, least[one], one[2]) for one in whole])
    at_micro = share([(one, *cut[one]) for one in whole])
    return {
        "candidates": len(whole),
        "refused": count - len(whole),
        "fixed_degree": fixed,
        "fixed_share": round(at_fixed[0], 4),
        "chosen_share": round(at_chosen[0], 4),
        "micro_share": round(at_micro[0], 4),
        "chosen_degrees": {str(d): sum(least[one] == d for one in whole) for d in DEGREES},
        "micro_degrees": {str(d): sum(cut[one][0] == d for one in whole) for d in DEGREES},
        "share_by_degree": {str(d): round(share([(one, d, one[2]) for one in whole])[0], 4) for d in DEGREES},
        "device_seconds_fixed_over_chosen": round(at_fixed[1] / at_chosen[1], 4),
        "device_seconds_fixed_over_micro": round(at_fixed[1] / at_micro[1], 4),
        "scamp": {"before": 0.28, "after": 0.15},
    }


def _step(machine: Any, width: int, layers: int, batch: int, length: int, degree: int) -> tuple[float, float]:
    """Seconds of a training step: in sums over devices, and in all."""
    tokens = batch * length
    bandwidth, latency = machine.axis_link((32 // degree, degree), 1)
    moved = 4 * float(all_reduce(2 * tokens * width, degree, bandwidth, latency)) if degree > 1 else 0.0
    # Four products of weights and two of attention, forward, and twice that backward; each device has a part of all.
    products = [(2 * tokens * width * n * width / degree, 1) for n in (3, 1, 4, 4)]
    products += [(2 * tokens * length * width / degree, 2)]
    work = 0.0
    for flops, times in products:
        kernel = float(machine.compute_seconds(flops, 2 * math.sqrt(flops) * 3, "float16"))
        work += 3 * times * kernel
    return layers * moved, layers * (moved + work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    talk = communication(40 if args.quick else 400)
    print(talk, flush=True)
    share_of = {int(d): share for d, share in talk["share_by_degree"].items()}
    rows, costs = [], []
    for count, places, loss in (
        [(300, 32, 0.0)] if args.quick else [(2000, 32, 0.0), (20000, 1024, 0.0), (2000, 32, 0.02)]
    ):
        rows += makespans(count, places, loss, share_of, args.quick)
        write(args.json, rows=rows, communication=talk, scheduler=costs)
    for places in (32,) if args.quick else (1024, 32):
        costs.append(scheduler(300 if args.quick else 10000, places))
        write(args.json, rows=rows, communication=talk, scheduler=costs)


if __name__ == "__main__":
    main()
