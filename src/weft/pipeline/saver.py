"""Checkpoints of a pipeline: every stage has a shard, which its rank writes in the background; rank 0 publishes the
whole."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from weft.pipeline.accord import Accord
from weft.pipeline.layers import Snapshot
from weft.pipeline.placement import Placement
from weft.runs import Checkpoints
from weft.runs.files import plain
from weft.runs.shards import ShardEntry

Meta = Mapping[str, Any]


class Saver:
    """Takes snapshots of a rank's stages as they become whole; at most one waits while another is being written."""

    def __init__(self, checkpoints: Checkpoints, accord: Accord, placement: Placement) -> None:
        self.published: list[tuple[int, float]] = []
        """On rank 0: (step, seconds) of what was published; whoever logs them takes them out."""
        self._checkpoints = checkpoints
        self._stages = placement.stages
        self._own = placement.stages_of(accord.rank)
        self._written: dict[int, dict[int, Any]] = {}
        self._meta: dict[int, Meta] = {}
        self._accord = accord.clone()
        self._queue: queue.Queue[tuple[int, int, Snapshot, Meta] | None] = queue.Queue(maxsize=1)
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="weft-saver", daemon=True)
        self._thread.start()

    def put(self, stage: int, step: int, snapshot: Snapshot, meta: Meta) -> None:
        """Writes a snapshot; ``meta`` is what stage 0 knows of the run at that step. Raises what an earlier one met."""
        self.check()
        self._queue.put((stage, step, snapshot, meta))

    def check(self) -> None:
        """Raises what has gone wrong in the background, such as a full disk."""
        if self._problem is not None:
            raise self._problem

    def close(self) -> None:
        """Waits until everything is written and, on rank 0, published."""
        self._queue.put(None)
        self._thread.join()
        self.check()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._problem is not None:
                continue  # what is left goes nowhere, and nobody waits for room
            try:
                self._save(*item)
            except Exception as problem:
                self._problem = problem

    def _save(self, stage: int, step: int, snapshot: Snapshot, meta: Meta) -> None:
        began = time.perf_counter()
        tensors: dict[str, Tensor] = {name: tensor.cpu() for name, tensor in snapshot.tensors.items()}
        entry = self._checkpoints.write_shard(step, f"stage{stage}", tensors)
        shard = {"entry": plain(entry), "layers": snapshot.layers}
        if self._own[0] > 0:
            self._accord.tell(f"shard/{step}/{stage}", shard)
            return
        written = self._written.setdefault(step, {})
        written[stage] = shard
        if stage == 0:
            self._meta[step] = meta
        if len(written) == len(self._own):  # only now, since the others of this rank come through this thread too
            self._publish(step)
            self.published.append((step, time.perf_counter() - began))

    def _publish(self, step: int) -> None:
        own, meta = self._written.pop(step), self._meta.pop(step)
        shards = [own.get(stage) or self._accord.hear(f"shard/{step}/{stage}") for stage in range(self._stages)]
        layers: dict[str, Any] = {}
        for part in shards:
            layers |= part["layers"]
        self._checkpoints.publish(step, [_entry(part["entry"]) for part in shards], {**meta, "layers": layers})


def _entry(told: Mapping[str, Any]) -> ShardEntry:
    layers = {name: tuple(names) for name, names in told["layers"].items()}
    return ShardEntry(told["file"], told["bytes"], told["sha256"], layers)
