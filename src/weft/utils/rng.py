"""Randomness without a global generator: every draw is named by the things that it depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

Part = str | int


def key(*parts: Part) -> int:
    """A 63-bit number that depends on every part and on their order, the same on every machine.

    >>> key(0, "init", "stem") == key(0, "init", "stem") != key(0, "stem", "init")
    True
    """
    text = "\x1f".join(f"{type(part).__name__[0]}{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(*parts: Part) -> np.random.Generator:
    """A NumPy generator of its own for these parts."""
    return np.random.Generator(np.random.PCG64(key(*parts)))


@contextmanager
def torch_seeded(*parts: Part) -> Iterator[None]:
    """Within the block, torch's default CPU generator is seeded by the parts; afterwards it is as it was."""
    import torch

    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(key(*parts))
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
