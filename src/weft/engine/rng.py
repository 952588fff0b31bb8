"""Randomness inside a training forward: torch's default generators, set anew for every (seed, step, micro-batch,
layer)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from weft.keys import key

_MASK = (1 << 64) - 1


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
        return _mix(_mix(base + step) + microbatch) >> 1

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """The default generators are afterwards as they were before: a user's own draws go on undisturbed."""
        states = [generator.get_state() for generator in self._generators]
        try:
            yield
        finally:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)


def _mix(x: int) -> int:
    # splitmix64: every bit of the result depends on every bit of x.
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
