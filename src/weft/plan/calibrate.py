"""A machine measured where it stands: matrix products, copies, launches, and messages between processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.errors import PlanError
from weft.hardware.machine import DeviceSpec, Link, Machine

_ROW = 100  # operators in a row, so that what starts and ends it counts little
_COPIED = 1 << 26  # bytes, far more than caches hold
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Work = Callable[[], object]


def calibrate(device: str = "cpu", devices: int = 1, quick: bool = False) -> Machine:
    """The machine as measured now; for good figures nothing else runs. At most 20 s on a CPU, 10 s if quick.

    Peaks are the best rate that a matrix product reached, so that the efficiency curve ends at 1. With several devices,
    as many processes on this host (gloo on CPUs, NCCL on GPUs; CPUs share the threads) measure at the same time, since
    they will compute at the same time, and the slowest counts. What they send each other is sent as a plan that runs
    sends it. With one device, a level is filled in with the memory's bandwidth, and says so by its name.
    """
    if device not in ("cpu", "cuda"):
        raise PlanError(f"cannot calibrate '{device}': the device is cpu or cuda")
    there = torch.cuda.device_count() if device == "cuda" else None
    if there == 0:
        raise PlanError("no CUDA device is here to calibrate; use the device cpu")
    if devices < 1 or (there is not None and devices > there):
        raise PlanError(f"cannot calibrate {devices} devices: at least 1" + (f", at most {there}" if there else ""))
    if devices == 1:
        found = _figures(Stopwatch(device, quick))
        level = Link("memory (not measured between devices)", 1, found["bandwidth"] / 2, 0.0)
    else:
        found = _processes(device, devices, quick)
        level = Link("loopback", devices, *fit(found.pop("messages")))
    curve = tuple((float(flops), float(fraction)) for flops, fraction in found.pop("efficiency"))
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    if device == "cuda":
        capacity = float(torch.cuda.mem_get_info()[1])
    else:
        capacity = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / devices
    made = DeviceSpec(efficiency=curve, capacity=capacity, **found)
    return Machine(f"{name} x{devices}, measured", made, (level,))


def fit(rows: Sequence[tuple[str, int, float, float]]) -> tuple[float, float]:
    """(bytes a second, seconds of latency) that best explain rows of (collective, devices, bytes, seconds).

    Collectives go round a ring: seconds = messages * latency + share * bytes / bandwidth, the bytes being those of
    `weft.hardware.collectives`. Least squares of relative errors, so that short messages count as much as long ones;
    neither comes out negative.
    """
    steps = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
    design = np.array([(steps[kind] * (q - 1), steps[kind] * (q - 1) / q * size) for kind, q, size, _ in rows])
    taken = np.array([row[3] for row in rows])
    scaled = design / taken[:, None]
    latency, slowness = np.linalg.lstsq(scaled, np.ones(len(rows)), rcond=None)[0]
    if latency < 0 or slowness <= 0:  # bandwidth alone, by least squares of one unknown
        latency, slowness = 0.0, scaled[:, 1].sum() / (scaled[:, 1] @ scaled[:, 1])
    return 1 / float(slowness), float(latency)


def undisturbed(taken: Sequence[float]) -> float:
    """The first quartile: whatever else ran made some longer, and the shortest may be chance.

    >>> undisturbed([1.0, 1.1, 1.2, 1.3, 9.0])
    1.1
    """
    return sorted(taken)[len(taken) // 4]


class Stopwatch:
    """Times work that all processes do at once; ``slowest`` gives the greatest of their numbers to each of them."""

    def __init__(self, device: str, quick: bool, slowest: Callable[[float], float] = float) -> None:
        self.device, self.quick, self.slowest = device, quick, slowest
        self.seconds = 0.02 if quick else 0.05

    def __call__(self, work: Work) -> float:
        """Seconds of one call, from many batches, each long enough for the clock."""
        work()
        calls = max(1, int(self.seconds / 20 / self.slowest(self._batch(work, 1))))
        taken: list[float] = []
        end = time.perf_counter() + self.seconds
        while len(taken) < 4 or time.perf_counter() < end:  # as long as the others compute
            taken.append(self._batch(work, calls))
        return self.slowest(undisturbed(taken))

    def _batch(self, work: Work, calls: int) -> float:
        self.wait()
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        self.wait()
        return max(time.perf_counter() - begin, 1e-7) / calls

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def _figures(watch: Stopwatch) -> dict[str, Any]:
    """The fields of a device that are measured."""
    overhead, launch = _starting(watch)
    curve, peak = _products(watch, overhead)
    source = torch.ones(_COPIED, dtype=torch.uint8, device=watch.device)
    target = torch.empty_like(source)
    bandwidth = 2 * _COPIED / watch(lambda: target.copy_(source))  # read and written
    return {"peak": peak, "efficiency": curve, "bandwidth": bandwidth, "overhead": overhead, "launch": launch}


def _products(watch: Stopwatch, overhead: float) -> tuple[list[tuple[float, float]], dict[str, float]]:
    """The efficiency curve of float32, and the peak by dtype. What each call takes beside its work is left out."""
    cuda, quick = watch.device == "cuda", watch.quick
    largest = (4096 if quick else 8192) if cuda else (512 if quick else 1024)
    sizes = [2**power for power in range(5, largest.bit_length())]
    found: dict[str, list[tuple[int, float]]] = {}
    exact = torch.backends.cuda.matmul.allow_tf32
    try:
        for name, dtype in DTYPES.items():
            torch.backends.cuda.matmul.allow_tf32 = False
            found[name] = rates(watch, dtype, sizes, overhead)
        torch.backends.cuda.matmul.allow_tf32 = cuda
        found["tf32"] = rates(watch, torch.float32, sizes[-1:], overhead) if cuda else found["float32"]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = exact
    best = max(rate for _, rate in found["float32"])
    # A larger product is never assumed to be less efficient: what falls off at the end is noise or a small cache.
    rising = np.maximum.accumulate([rate for _, rate in found["float32"]])
    curve = [(2.0 * size**3, float(rate / best)) for (size, _), rate in zip(found["float32"], rising, strict=True)]
    return curve, {name: max(rate for _, rate in reached) for name, reached in found.items()}


def rates(watch: Stopwatch, dtype: torch.dtype, sizes: Sequence[int], overhead: float) -> list[tuple[int, float]]:
    """(size, FLOP/s) of square products, from the smallest on that shows beside the overhead; the rest are left out
    once the next would take too long."""
    found = []
    beside = overhead
    if watch.device == "cpu":  # the overhead of training is another one
        beside = watch(_product(4, dtype, watch.device))
    for size in sizes:
        taken = watch(_product(size, dtype, watch.device))
        if taken > 1.5 * beside or size == sizes[-1]:
            found.append((size, 2.0 * size**3 / max(taken - beside, taken / 10)))
        if 8 * taken > 4 * watch.seconds and found:  # what the next one would take
            break
    return found


def _product(size: int, dtype: torch.dtype, device: str) -> Work:
    a = torch.ones(size, size, dtype=dtype, device=device)
    return lambda: torch.mm(a, a)


def _starting(watch: Stopwatch) -> tuple[float, float]:
    """(seconds of a kernel that does next to nothing, seconds that the host needs to start one), in training: forward
    and backward of a row of them. On a CPU the host is the device, and both are one."""
    x = torch.ones(1, device=watch.device, requires_grad=True)

    def work() -> None:
        y = x
        for _ in range(_ROW):
            y = y * 1.5
        y.backward()  # type: ignore[no-untyped-call]

    host = watch(work) / (2 * _ROW)
    if watch.device == "cpu":
        return host, 0.0
    out, graph = torch.ones(1, device=watch.device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_ROW):
            out.mul_(1.0)
    return watch(graph.replay) / _ROW, host


def _processes(device: str, devices: int, quick: bool) -> dict[str, Any]:
    """What so many processes of this host measure: their figures, and the ``messages`` between them as rows to fit."""
    program = "import sys; from weft.plan.calibrate import _member; _member(*sys.argv[1:])"
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    threads = str(max(1, torch.get_num_threads() // devices) if device == "cpu" else torch.get_num_threads())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": threads}
    with tempfile.TemporaryDirectory() as folder:
        members = [
            subprocess.Popen(
                [sys.executable, "-c", program, device, str(rank), str(devices), folder, "quick" if quick else "full"],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            for rank in range(devices)
        ]
        try:
            for rank, member in enumerate(members):
                _, complaint = member.communicate(timeout=180)
                if member.returncode:
                    last = (complaint.decode(errors="replace").strip().splitlines() or ["nothing said"])[-1]
                    raise PlanError(f"process {rank} of {devices} failed while measuring: {last}")
        except subprocess.TimeoutExpired as error:
            raise PlanError(f"{devices} processes did not finish measuring in 180 s; try fewer") from error
        finally:
            for member in members:
                member.kill()
                member.wait()
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
        return found


def _member(device: str, rank: str, devices: str, folder: str, pace: str) -> None:
    """One of the processes: measures with the others, and the first writes what was found."""
    from torch import distributed

    here, count = int(rank), int(devices)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if device == "cuda":
        torch.cuda.set_device(here)
    distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=here,
        world_size=count,
        timeout=timedelta(seconds=60),
    )

    def slowest(seconds: float) -> float:
        greatest = torch.tensor(seconds, dtype=torch.float64, device=device)
        distributed.all_reduce(greatest, distributed.ReduceOp.MAX)
        return float(greatest)

    watch = Stopwatch(device, pace == "quick", slowest)
    found = {**_figures(watch), "messages": list(_messages(watch, count))}
    if here == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def _messages(watch: Stopwatch, count: int) -> Iterator[tuple[str, int, float, float]]:
    """Rows to fit: every collective, in its turn, of tensors that are cut along their first or second axis."""
    from torch.distributed.device_mesh import init_device_mesh

    from weft.plan.runtime.redistribute import Collective, CollectiveStep, MeshCollectives
    from weft.plan.sharding import PARTIAL, REPLICATED

    collectives = MeshCollectives(init_device_mesh(watch.device, (count,)))
    steps = [CollectiveStep(Collective.ALL_REDUCE, 0, PARTIAL, REPLICATED)]
    for axis in (0, 1):
        steps.append(CollectiveStep(Collective.REDUCE_SCATTER, 0, PARTIAL, axis))
        steps.append(CollectiveStep(Collective.ALL_GATHER, 0, axis, REPLICATED))
        steps.append(CollectiveStep(Collective.ALL_TO_ALL, 0, axis, 1 - axis))
    for power in range(10, 25 if watch.device == "cpu" else 27, 4 if watch.quick else 2):
        side = max(1, round((2**power / 4) ** 0.5 / count)) * count
        times: list[list[float]] = [[] for _ in steps]
        for _ in range(4 if power > 20 else 12):
            for step, taken in zip(steps, times, strict=True):
                part = 1 if step.kind is not Collective.ALL_GATHER else count
                shape = (side // part, side) if step.old == 0 else (side, side // part)
                tensor = torch.ones(shape, device=watch.device)
                watch.slowest(0.0)  # all are here
                watch.wait()
                begin = time.perf_counter()
                collectives.move(tensor, (step,))
                watch.wait()
                taken.append(time.perf_counter() - begin)
        for step, taken in zip(steps, times, strict=True):
            yield str(step.kind), count, 4.0 * side * side, undisturbed(taken[1:])  # the first one connects
