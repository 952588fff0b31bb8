"""Augmentation whose draws belong to the sample: they do not depend on the batch that it comes in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from weft.data.source import Batch, Indices, to_device
from weft.errors import DataError
from weft.utils.rng import GOLDEN, key, splitmix64


@dataclass(frozen=True, slots=True)
class Draws:
    """Random numbers of some samples in one epoch, each keyed by (seed, sample, epoch, name)."""

    seed: int
    samples: Indices
    epoch: int

    def uniform(self, name: str, shape: tuple[int, ...] = ()) -> npt.NDArray[np.float64]:
        """Numbers in [0, 1), `shape` of them for each sample."""
        return (self._bits(name, shape) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, name: str, low: int, high: int, shape: tuple[int, ...] = ()) -> npt.NDArray[np.int64]:
        """Whole numbers from low to high - 1."""
        if high <= low:
            raise DataError(f"integers are drawn from low to high - 1; got low={low}, high={high}")
        return low + np.floor(self.uniform(name, shape) * (high - low)).astype(np.int64)

    def _bits(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.uint64]:
        base = np.uint64(key(self.seed, "augment", self.epoch, name))
        rows = splitmix64(np.asarray(self.samples).astype(np.uint64) * GOLDEN + base)
        counters = np.arange(1, prod(shape) + 1, dtype=np.uint64) * GOLDEN
        return splitmix64(rows[:, None] + counters).reshape(len(rows), *shape)


Augment = Callable[[Batch, Draws], Batch]


@dataclass(frozen=True, slots=True)
class ShiftFlip:
    """Shifts images (n, channels, height, width) by up to `padding` pixels each way, zeros coming in, and mirrors half.

    Augmentations of one `name` draw the same numbers: an image and its mask move together.
    """

    key: str = "image"
    padding: int = 4
    flip: bool = True
    name: str = "shift-flip"

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        images = _images(batch, self.key)
        count, channels, height, width = images.shape
        shifts = draws.integers(f"{self.name} shift", -self.padding, self.padding + 1, (2,))
        rows = np.arange(height) + shifts[:, :1]
        columns = np.arange(width)[None].repeat(count, axis=0)
        if self.flip:
            mirrored = draws.uniform(f"{self.name} flip") < 0.5
            columns[mirrored] = columns[mirrored, ::-1]
        columns = columns + shifts[:, 1:]
        # One gather from the flat image, in which an extra last pixel holds the zero that comes in from outside. A
        # pixel is outside as soon as its row or its column is, so each is marked by a number that no sum can bring
        # back.
        zero = height * width
        rows = np.where((rows < 0) | (rows >= height), zero, rows * width)
        columns = np.where((columns < 0) | (columns >= width), zero, columns)
        down, across = to_device(rows, images.device), to_device(columns, images.device)
        where = (down[:, :, None] + across[:, None, :]).clamp_(max=zero).view(count, 1, zero)
        padded = torch.nn.functional.pad(images.flatten(2), (0, 1))
        gathered = padded.gather(2, where.expand(count, channels, zero))
        return {**batch, self.key: gathered.view(images.shape)}


@dataclass(frozen=True, slots=True)
class Normalise:
    """(value - mean) / std in each channel (dimension 1); one number stands for all channels."""

    key: str
    mean: float | Sequence[float]
    std: float | Sequence[float]

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        images = _images(batch, self.key)
        if not images.is_floating_point():
            raise DataError(f"'{self.key}' holds {images.dtype}: only floating-point values can be normalised")
        mean, std = (_channels(numbers, images) for numbers in (self.mean, self.std))
        return {**batch, self.key: (images - mean) / std}


@dataclass(frozen=True, slots=True)
class Compose:
    """Augmentations one after the other."""

    parts: Sequence[Augment]

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        for part in self.parts:
            batch = part(batch, draws)
        return batch


def _images(batch: Batch, name: str) -> torch.Tensor:
    if name not in batch:
        raise DataError(f"nothing to augment: samples have no key '{name}'; they have {sorted(batch)}")
    if batch[name].dim() != 4:
        raise DataError(f"'{name}' must be (n, channels, height, width) to be augmented; it is {batch[name].shape}")
    return batch[name]


def _channels(given: float | Sequence[float], images: torch.Tensor) -> torch.Tensor:
    numbers = tuple(given) if isinstance(given, Sequence) else (given,)
    if len(numbers) not in (1, images.shape[1]):
        raise DataError(
            f"{len(numbers)} numbers were given to normalise {images.shape[1]} channels; give one or as many"
        )
    return _column(numbers, images.dtype, images.device)


@lru_cache(maxsize=64)
def _column(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device).view(-1, 1, 1)
