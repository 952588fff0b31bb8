"""Randomness inside a training forward: torch's default generators are seeded by (seed, step, micro-batch, layer)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from weft.utils.rng import GOLDEN, MASK, get_rng_state, key, restored, seed, splitmix64


class Seeder:
    """Sets the default generators before each layer's forward, so that dropout depends on nothing but its key."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._layers: dict[str, int] = {}
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            index = device.index if device.index is not None else torch.cuda.current_device()
            self._generators.append(torch.cuda.default_generators[index])

    def set(self, step: int, microbatch: int, layer: str) -> None:
        number = self.number(step, microbatch, layer)
        for generator in self._generators:
            generator.manual_seed(number)

    def number(self, step: int, microbatch: int, layer: str) -> int:
        base = self._layers.get(layer)
        if base is None:
            base = self._layers[layer] = key(self._seed, "layer", layer)
        return _next(_next(base + step) + microbatch) >> 1

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """A block after which the default generators are as they were before, for the user's own draws."""
        states = [generator.get_state() for generator in self._generators]
        try:
            yield
        finally:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)


def _next(state: int) -> int:
    return splitmix64((state + GOLDEN) & MASK)


class HostSeeder(Seeder):
    """Seeds Python's and NumPy's generators too, by the same key: what a model draws on the host does not depend on
    what its process did before."""

    def set(self, step: int, microbatch: int, layer: str) -> None:
        super().set(step, microbatch, layer)
        seed(self.number(step, microbatch, layer))

    @contextmanager
    def preserved(self) -> Iterator[None]:
        with super().preserved(), restored(get_rng_state()):
            yield


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """A block in which equal inputs give equal bits; an operator without a deterministic kernel raises its name."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS makes its first handle
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # costs a pass over memory and changes no result
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill
        torch.backends.cudnn.benchmark = benchmark
