"""Labelled arrays: the step that every format shares, from arrays to a data set with a validation part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.data.dataset import Data, hold_out
from weft.data.images import Pixels, Scaled
from weft.data.source import Source, Tensors
from weft.errors import DataError

Array = npt.NDArray[Any]


def image_data(
    name: str,
    parts: Mapping[str, tuple[Pixels, Array]],
    *,
    class_names: Sequence[str] | None,
    validation: float,
    seed: int,
) -> Data:
    """A data set of images (n, channels, height, width) and whole-number labels, by part."""
    sources: dict[str, Source] = {}
    highest = 0
    for part, (pixels, labels) in parts.items():
        where = f"the {part} part of {name}"
        if len(pixels) != len(labels):
            raise DataError(f"{where} has {len(pixels)} images and {len(labels)} labels")
        if len(pixels) == 0:
            raise DataError(f"{where} is empty")
        if labels.dtype.kind not in "iu" or labels.ndim != 1 or labels.min() < 0:
            raise DataError(f"labels must be one whole number from 0 for each image; those of {where} are not")
        highest = max(highest, int(labels.max()))
        image, label = torch.from_numpy(np.ascontiguousarray(pixels)), torch.from_numpy(labels.astype(np.int64))
        sources[part] = Scaled(Tensors(image=image, label=label))
    if class_names is not None and highest >= len(class_names):
        raise DataError(f"{name} has the label {highest}, but only {len(class_names)} class names")
    shapes = {part: pixels.shape[1:] for part, (pixels, _) in parts.items()}
    if len(set(shapes.values())) > 1:
        raise DataError(f"images of one data set must have one shape; those of {name} have {shapes}")
    info: dict[str, Any] = {"shape": shapes["train"], "classes": highest + 1}
    if class_names is not None:
        info |= {"classes": len(class_names), "class_names": tuple(map(str, class_names))}
    return assembled(name, sources, info, validation, seed, "label")


def assembled(
    name: str, sources: Mapping[str, Source], info: Mapping[str, Any], validation: float, seed: int, key: str | None
) -> Data:
    """A data set of parts; without a validation part, a stratified one is taken out of the training part."""
    train, held = sources["train"], sources.get("validation")
    if held is None:
        train, held = hold_out(train, validation, seed, key)
    return Data(name, train, held, sources.get("test"), info)
