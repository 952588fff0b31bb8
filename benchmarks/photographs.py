"""Real photographs that scikit-image and scikit-learn ship, in pairs of small and large for super-resolution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.data.dataset import Data
from weft.data.source import Batch, Tensors
from weft.errors import DataError, nearest

TRAIN = ("astronaut", "china", "motorcycle", "rocket")
VALIDATION = ("chelsea", "coffee", "flower")
PHOTOGRAPHS = (*TRAIN, *VALIDATION)
"""All colour photographs that are in the wheels themselves: nothing is downloaded."""


def photograph(name: str) -> Tensor:
    """A photograph, (3, height, width) in [0, 1]."""
    if name not in PHOTOGRAPHS:
        raise DataError(f"no photograph '{name}'{nearest(name, PHOTOGRAPHS)}")
    try:
        if name in ("china", "flower"):
            from sklearn.datasets import load_sample_image

            pixels = load_sample_image(f"{name}.jpg")
        else:
            from skimage import data

            pixels = data.stereo_motorcycle()[0] if name == "motorcycle" else getattr(data, name)()
    except ImportError as error:
        raise DataError(
            f"photograph '{name}' needs scikit-image and scikit-learn: pip install -e '.[demo,images]' scikit-image"
        ) from error
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))).float() / 255.0


def super_resolution(
    scale: int = 2,
    patch: int = 24,
    stride: int | None = None,
    train: Sequence[str] = TRAIN,
    validation: Sequence[str] = VALIDATION,
) -> Data:
    """Patches of photographs, ``image`` of ``patch`` pixels a side and ``targets`` ``scale`` times as large, split by
    photograph.

    A photograph is made smaller as a whole, then cut: training patches ``stride`` pixels apart, by default end to end,
    those of validation always end to end.
    """
    if scale < 2 or patch < 4 or (stride is not None and stride < 1):
        raise DataError(f"need scale >= 2, patch >= 4 and stride >= 1; got {scale}, {patch}, {stride}")
    if both := sorted(set(train) & set(validation)):
        raise DataError(f"photograph '{both[0]}' is in training and in validation: leave it out of one of them")
    parts = [_patches(names, scale, patch, step) for names, step in ((train, stride or patch), (validation, patch))]
    info = {"shape": (3, patch, patch), "scale": scale, "photographs": {"train": train, "validation": validation}}
    return Data("photographs", parts[0], parts[1], None, info)


def pair(name: str, scale: int) -> tuple[Tensor, Tensor]:
    """A whole photograph made smaller, and as it is, cut to a whole number of small pixels; both of one image."""
    large = photograph(name)
    height, width = (length - length % scale for length in large.shape[1:])
    large = large[None, :, :height, :width]
    return reduced(large, scale), large


def reduced(images: Tensor, scale: int) -> Tensor:
    """Images made smaller: bicubic with antialiasing, and rounded to 8 bits as stored pictures are."""
    size = [length // scale for length in images.shape[-2:]]
    small = F.interpolate(images, size, mode="bicubic", antialias=True)
    return (small.clamp(0.0, 1.0) * 255.0).round() / 255.0


def bicubic(images: Tensor, scale: int) -> Tensor:
    """Images made larger without learning: the baseline."""
    return F.interpolate(images, scale_factor=scale, mode="bicubic").clamp(0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Psnr:
    """A metric: peak signal-to-noise ratio in dB, per image, on luma (Y of BT.601) without a border of some pixels, as
    papers on super-resolution have it."""

    border: int = 2

    def __call__(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, float]:
        error = self._luma(outputs.float().clamp(0.0, 1.0)) - self._luma(batch["targets"])
        mean = error.square().mean((-2, -1)).clamp(min=1e-10)
        return (-10.0 * mean.log10()).sum(), len(outputs)

    def _luma(self, images: Tensor) -> Tensor:
        weights = (65.481 / 255, 128.553 / 255, 24.966 / 255)  # Y has 219 steps in 8 bits
        luma = sum(weight * images[:, channel] for channel, weight in enumerate(weights))
        assert isinstance(luma, Tensor)
        end = -self.border or None
        return luma[:, self.border : end, self.border : end]


def _patches(names: Sequence[str], scale: int, patch: int, stride: int) -> Tensors:
    pairs = [pair(name, scale) for name in names]
    small = [_cut(low, patch, stride) for low, _ in pairs]
    large = [_cut(high, patch * scale, stride * scale) for _, high in pairs]
    if not small or any(len(cut) == 0 for cut in small):
        raise DataError(f"photographs {', '.join(names) or '(none)'} hold no patches of {patch} pixels at 1/{scale}")
    return Tensors(image=torch.cat(small), targets=torch.cat(large))


def _cut(image: Tensor, patch: int, stride: int) -> Tensor:
    """All whole patches, row by row."""
    if min(image.shape[-2:]) < patch:
        return image.new_empty(0, 3, patch, patch)
    windows = image[0].unfold(1, patch, stride).unfold(2, patch, stride)  # channels, down, across, patch, patch
    return windows.permute(1, 2, 0, 3, 4).reshape(-1, 3, patch, patch).contiguous()
