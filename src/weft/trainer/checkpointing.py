"""Checkpoints of a run: written whole or by stages in the background; and weights that a run begins with."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from weft.distributed.store import ControlStore
from weft.engine.layer_state import CheckpointPart
from weft.engine.weight_versions import MARKS
from weft.errors import CheckpointError
from weft.runs import Checkpoints, Run
from weft.runs.shards import ShardEntry
from weft.supernet import Chain
from weft.utils.files import to_json

Meta = Mapping[str, Any]


class CheckpointWriter:
    """Takes snapshots as they become whole. With several ranks each writes its shard in the background, at most one
    waits while another is being written, and rank 0 publishes the whole; a single process writes at once."""

    def __init__(self, checkpoints: Checkpoints, store: ControlStore) -> None:
        self.published: list[tuple[int, float]] = []
        """On rank 0: (step, seconds) of what was published; whoever logs them takes them out."""
        self._checkpoints = checkpoints
        self.problem: Exception | None = None
        """What has gone wrong in the background, such as a full disk."""
        self._store = store
        self._queue: queue.Queue[tuple[int, CheckpointPart, Meta] | None] = queue.Queue(maxsize=1)
        self._thread: threading.Thread | None = None
        if store.world > 1:
            self._store = store.clone()
            self._thread = threading.Thread(target=self._run, name="weft-checkpoints", daemon=True)
            self._thread.start()

    def put(self, step: int, snapshot: CheckpointPart, meta: Meta) -> None:
        """Writes a snapshot; ``meta`` is what rank 0 knows of the run at that step. Raises what an earlier one met."""
        if self.problem is not None:
            raise self.problem
        if self._thread is not None:
            self._queue.put((step, snapshot, meta))
            return
        began = time.perf_counter()
        self._checkpoints.save(step, snapshot.tensors, {**meta, "layers": snapshot.layers})
        self.published.append((step, time.perf_counter() - began))

    def close(self) -> None:
        """Waits until everything is written and, on rank 0, published."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
        if self.problem is not None:
            raise self.problem

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self.problem is not None:
                continue  # what is left goes nowhere, and nobody waits for room
            try:
                self._save(*item)
            except Exception as problem:
                self.problem = problem

    def _save(self, step: int, snapshot: CheckpointPart, meta: Meta) -> None:
        began = time.perf_counter()
        tensors: dict[str, Tensor] = {name: tensor.cpu() for name, tensor in snapshot.tensors.items()}
        entry = self._checkpoints.write_shard(step, f"stage{self._store.rank}", tensors)
        self._store.set(f"shard/{step}/{self._store.rank}", {"entry": to_json(entry), "layers": snapshot.layers})
        if self._store.rank > 0:
            return
        shards = [self._store.get(f"shard/{step}/{rank}") for rank in range(self._store.world)]
        layers = {name: numbers for shard in shards for name, numbers in shard["layers"].items()}
        entries = [ShardEntry.from_json(shard["entry"]) for shard in shards]
        self._checkpoints.publish(step, entries, {**meta, "layers": layers})
        self.published.append((step, time.perf_counter() - began))


# Weights that a run begins with, by global name.

log = logging.getLogger("weft.pipeline")


def load_initial(chain: Chain, source: Any, partial: bool = False) -> None:
    """Copies weights from a state dict, a safetensors file, a run (or its directory) or a Chain into the chain, in
    place.

    Names that the chain does not have are left out and counted in the log; a shape that differs, or nothing that fits,
    is a CheckpointError. Of a chain that is built in ``partial``, as on a stage, it may be that nothing fits.
    """
    if source is None:
        return
    weights = dict(initial_weights(source))
    for tie in chain.ties:  # one value for both, also where only one of them is given or lies on this stage
        value = weights.get(str(tie.first), weights.get(str(tie.second)))
        if value is not None:
            weights |= {str(place): value for place in tie}
    state = chain.state_dict()
    common = [name for name in state if name in weights]
    if not common and not partial:
        raise CheckpointError(
            f"none of the {len(weights)} weights fits the supernet: it has names such as '{next(iter(state), '')}'"
        )
    for name in common:
        if state[name].shape != weights[name].shape:
            raise CheckpointError(
                f"'{name}' has shape {tuple(weights[name].shape)}, but the supernet has {tuple(state[name].shape)}"
            )
    with torch.no_grad():
        for name in common:
            state[name].copy_(weights[name])
    log.info(
        "initialised %d of %d tensors; %d others were given and not used",
        len(common),
        len(state),
        len(weights) - len(common),
    )


def initial_weights(source: Any) -> Mapping[str, Tensor]:
    """The weights in any of the sources of ``load_initial``."""
    if isinstance(source, Chain):
        return source.state_dict()
    if isinstance(source, Mapping):
        return source
    if isinstance(source, Run):
        return run_weights(source.checkpoints)
    path = Path(source)
    if path.is_dir():
        return run_weights(Run.open(path).checkpoints)
    if not path.is_file():
        raise CheckpointError(f"init_from: '{path}' is neither a run nor a safetensors file")
    try:
        return load_file(str(path))
    except Exception as problem:
        raise CheckpointError(f"init_from: '{path}' cannot be read as safetensors: {problem}") from problem


def run_weights(checkpoints: Checkpoints, step: int | None = None) -> dict[str, Tensor]:
    """The newest weights and buffers in a checkpoint, without optimizer state, older versions or gradients."""
    loaded = checkpoints.load(step, only=lambda name: not set(MARKS) & set(name))
    return dict(loaded.tensors)
