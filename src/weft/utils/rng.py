"""Randomness without a global generator: every draw has a key made of the things that it depends on."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Part = str | int
Bits = TypeVar("Bits", int, npt.NDArray[np.uint64])

GOLDEN = 0x9E3779B97F4A7C15
"""How far the state of splitmix64 goes on from one number to the next."""

MASK = (1 << 64) - 1


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


def splitmix64(state: Bits) -> Bits:
    """The output of splitmix64 for a state of 64 bits: every bit of it changes about half of the bits of the output."""
    bits: Any = state  # NumPy's annotations take the result of these operations for signed
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    result: Bits = bits ^ (bits >> 31)
    return result


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


# Python's and NumPy's global generators, which models may draw from.


def seed(number: int) -> None:
    """Seeds Python's and NumPy's global generators, which takes 6 us."""
    random.seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002


def get_rng_state() -> Hashable:
    """The state of Python's and NumPy's global generators, which every draw changes."""
    state: Any = np.random.get_state()  # noqa: NPY002
    return random.getstate(), (state[0], state[1].tobytes(), *state[2:])


def host() -> dict[str, Hashable]:
    """The same by name, for a comparison of all that a forward may change."""
    return {"a generator of the host": get_rng_state()}


@contextmanager
def restored(state: Any) -> Iterator[None]:
    """A block after which the generators of the host are in this state."""
    try:
        yield
    finally:
        set_rng_state(state)


@contextmanager
def fork_rng(*parts: Part) -> Iterator[None]:
    """A block in which both are seeded by the parts; afterwards they are as they were."""
    with restored(get_rng_state()):
        seed(key(*parts))
        yield


def set_rng_state(state: Any) -> None:
    """Restores the state of Python's and NumPy's global generators."""
    python, (name, words, *rest) = state
    random.setstate(python)
    np.random.set_state((name, np.frombuffer(words, np.uint32), *rest))  # noqa: NPY002
