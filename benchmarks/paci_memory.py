"""Part `memory` of `paci.py`: micro-batches in flight, copies of the weights, and resident memory of the stages."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from paci_task import RANKS, Task
from paci_time import most_resident, pinned
from paci_weft import WeftPeer
from torch import Tensor, nn

from weft.distributed.launcher import launch
from weft.distributed.remote_call import Call
from weft.engine.rng import deterministic
from weft.pipeline.stage import Stage

KINDS = ("flush", "bounded")


class Copies:
    """Counts the storages that hold the matrices of a stage: in graphs, as parameters, and as older versions.

    Graphs are looked into through the hooks of saved tensors. A saved tensor is taken for a matrix of the stage by its
    shape, so no activation may have one of these shapes.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.own = [m.weight for w in stage.weights.values() for m in w.module.modules() if isinstance(m, nn.Linear)]
        self.shapes = {tuple(sorted(weight.shape)) for weight in self.own}
        self.bytes = sum(weight.nbytes for weight in self.own)
        self.graphs: Counter[tuple[int, int]] = Counter()
        self.saved = self.all = 0.0

    def pack(self, tensor: Tensor) -> Tensor | _Held:
        if tuple(sorted(tensor.shape)) not in self.shapes:
            return tensor
        held = _Held(tensor, self.graphs)
        self.saved = max(self.saved, self._copies(self.graphs))
        return held

    def unpack(self, saved: Tensor | _Held) -> Tensor:
        return saved.tensor if isinstance(saved, _Held) else saved

    def look(self) -> None:
        """After an operation: the most copies of everything so far."""
        layers = self.stage.weights.values()
        held = [tensor for weights in layers for old in weights.kept.values() for tensor in old]
        # Where a forward reads an older version in the place of the newest, that lies aside.
        held += [tensor for weights in layers for tensor in getattr(weights.inplace, "_backup", None) or ()]
        matrices = (tensor for tensor in held if tuple(sorted(tensor.shape)) in self.shapes)
        self.all = max(self.all, self._copies([*self.graphs, *map(_storage, self.own), *map(_storage, matrices)]))

    def _copies(self, storages: Iterable[tuple[int, int]]) -> float:
        return sum(size for _, size in set(storages)) / self.bytes


class _Held:
    """A matrix in a graph, which is counted as long as the graph holds it."""

    def __init__(self, tensor: Tensor, graphs: Counter[tuple[int, int]]) -> None:
        self.tensor, self.graphs, self.storage = tensor, graphs, _storage(tensor)
        graphs[self.storage] += 1

    def __del__(self) -> None:
        self.graphs[self.storage] -= 1
        if not self.graphs[self.storage]:
            del self.graphs[self.storage]


def _storage(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def member(task: Task, kind: str, k: int, precision: str, counts: bool, folder: str) -> None:
    """One stage of a run, which counts copies, or leaves everything as it is and looks at its memory."""
    rank, world, store = pinned()
    with deterministic(torch.device("cpu")):
        peer = WeftPeer(task, k, kind, rank, world, store, precision=precision)
        before = resident()
        worker, loop = peer.prepare(task.microbatches // k)
        dist.barrier()
        told: dict[str, Any] = {}
        if counts:
            copies = Copies(worker.stage)
            with torch.autograd.graph.saved_tensors_hooks(copies.pack, copies.unpack):
                for _ in loop.drive(worker, lambda: False):
                    copies.look()
            told = {"saved_copies": copies.saved, "weight_copies": copies.all}
        else:
            for _ in loop.drive(worker, lambda: False):
                pass
        worker.finish()
        told |= {"peak": worker.peak, "resident": most_resident(), "before": before}
    peer.close()
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def resident() -> float:
    """What this process has in memory now, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def look(task: Task, kind: str, k: int, precision: str, counts: bool) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        launch(RANKS, Call(member, (task, kind, k, precision, counts, folder)), restarts=0, threads=1)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]


def rows(task: Task, k: int, repeats: int, precisions: Sequence[str] = ("fp32", "bf16")) -> Iterator[dict[str, Any]]:
    """By precision, kind and stage; memory is the median over repeats that take turns."""
    for precision in precisions:
        counted = {kind: look(task, kind, k, precision, True) for kind in KINDS}
        turns = [{kind: look(task, kind, k, precision, False) for kind in KINDS} for _ in range(repeats)]
        flush: list[float] = []
        for kind in KINDS:
            most = [statistics.median(turn[kind][rank]["resident"] for turn in turns) for rank in range(RANKS)]
            flush = flush or most
            for rank, one in enumerate(counted[kind]):
                yield {
                    "precision": precision,
                    "method": f"weft-{kind}",
                    "k": k,
                    "stage": rank,
                    "in_flight": one["peak"],
                    "weight_copies": one["weight_copies"],
                    "saved_copies": one["saved_copies"],
                    "resident_mib": most[rank],
                    "before_mib": statistics.median(turn[kind][rank]["before"] for turn in turns),
                    "ratio_to_flush": most[rank] / flush[rank],
                }
