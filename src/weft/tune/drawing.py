"""What a recipe's model draws from the global generators: Python's and NumPy's are seeded as torch's are."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from weft.keys import Part, key
from weft.pipeline.seeding import Seeder


class Drawing(Seeder):
    """Sets Python's and NumPy's generators too, by the same key: a model that draws on the host draws the same
    whatever its process did before."""

    def set(self, step: int, microbatch: int, layer: str) -> None:
        super().set(step, microbatch, layer)
        seed(self.number(step, microbatch, layer))

    @contextmanager
    def preserved(self) -> Iterator[None]:
        with super().preserved(), restored(standing()):
            yield


def seed(number: int) -> None:
    """From here on Python's and NumPy's global generators draw what belongs to this number; it takes 6 us."""
    random.seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002


def standing() -> Hashable:
    """Where Python's and NumPy's global generators stand: another after anything was drawn."""
    state: Any = np.random.get_state()  # noqa: NPY002
    return random.getstate(), (state[0], state[1].tobytes(), *state[2:])


@contextmanager
def restored(stand: Any) -> Iterator[None]:
    """Within the block nothing is changed; afterwards the generators stand here."""
    try:
        yield
    finally:
        stand_at(stand)


@contextmanager
def seeded(*parts: Part) -> Iterator[None]:
    """Within the block, both draw what belongs to the parts; afterwards they are as they were."""
    with restored(standing()):
        seed(key(*parts))
        yield


def stand_at(stand: Any) -> None:
    """Puts the generators back to where they stood."""
    python, (name, words, *rest) = stand
    random.setstate(python)
    np.random.set_state((name, np.frombuffer(words, np.uint32), *rest))  # noqa: NPY002
