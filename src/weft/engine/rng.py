"""Randomness inside a training forward: torch's default generators, set anew for every (seed, step, micro-batch,
layer)."""

from __future__ import annotations

import os
import random
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from weft.utils.rng import GOLDEN, MASK, Part, key, splitmix64


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
        """From here on the default generators draw what belongs to this layer in this micro-batch."""
        number = self.number(step, microbatch, layer)
        for generator in self._generators:
            generator.manual_seed(number)

    def number(self, step: int, microbatch: int, layer: str) -> int:
        """What generators are seeded with there."""
        base = self._layers.get(layer)
        if base is None:
            base = self._layers[layer] = key(self._seed, "layer", layer)
        return _next(_next(base + step) + microbatch) >> 1

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """The default generators are afterwards as they were before: a user's own draws go on undisturbed."""
        states = [generator.get_state() for generator in self._generators]
        try:
            yield
        finally:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)


def _next(state: int) -> int:
    return splitmix64((state + GOLDEN) & MASK)


# What a recipe's model draws from the global generators: Python's and NumPy's are seeded as torch's are.


class HostSeeder(Seeder):
    """Sets Python's and NumPy's generators too, by the same key: a model that draws on the host draws the same
    whatever its process did before."""

    def set(self, step: int, microbatch: int, layer: str) -> None:
        super().set(step, microbatch, layer)
        seed(self.number(step, microbatch, layer))

    @contextmanager
    def preserved(self) -> Iterator[None]:
        with super().preserved(), restored(get_rng_state()):
            yield


def seed(number: int) -> None:
    """From here on Python's and NumPy's global generators draw what belongs to this number; it takes 6 us."""
    random.seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002


def get_rng_state() -> Hashable:
    """Where Python's and NumPy's global generators stand: another after anything was drawn."""
    state: Any = np.random.get_state()  # noqa: NPY002
    return random.getstate(), (state[0], state[1].tobytes(), *state[2:])


def host() -> dict[str, Hashable]:
    """The same by name, for who compares what a forward may change."""
    return {"a generator of the host": get_rng_state()}


@contextmanager
def restored(stand: Any) -> Iterator[None]:
    """Within the block nothing is changed; afterwards the generators stand here."""
    try:
        yield
    finally:
        set_rng_state(stand)


@contextmanager
def fork_rng(*parts: Part) -> Iterator[None]:
    """Within the block, both draw what belongs to the parts; afterwards they are as they were."""
    with restored(get_rng_state()):
        seed(key(*parts))
        yield


def set_rng_state(stand: Any) -> None:
    """Puts the generators back to where they stood."""
    python, (name, words, *rest) = stand
    random.setstate(python)
    np.random.set_state((name, np.frombuffer(words, np.uint32), *rest))  # noqa: NPY002


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Within the block, equal inputs give equal bits; an operator without a deterministic kernel raises and names
    itself."""
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
