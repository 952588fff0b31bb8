"""NumPy archives: arrays by the usual names, or images packed as JPEG files end to end."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.data.dataset import PARTS, Data, evenly_spaced
from weft.data.images import Array, Pixels, Size, channels_first, decode, image_data
from weft.data.source import Source, Tensors
from weft.errors import DataError

_INPUTS = ("x", "image", "images", "data")
_OUTPUTS = ("y", "label", "labels", "target", "targets")


def read(path: Path, *, limit: int | None = None, size: Size | None = None, channels: int = 3) -> Data:
    """An .npz file in one of two layouts.

    Plain: `x`, `y` or `x_train`, `y_train`, `x_val`, ... (also images/labels, and the part first). Inputs of bytes in 3
    or 4 dimensions are images ("image", "label"); others stay "x", "y". Packed: `jpeg` (bytes end to end), `offsets`
    (n + 1), `labels`, and if there are any `is_test` and `class_names`; `size` and `channels` are for these.
    `limit` takes so many samples of each part, evenly spread, and decodes no others.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not hasattr(archive, "files"):
                raise DataError(f"{path} holds one array and not an archive: save it with numpy.savez")
            arrays: dict[str, Array] = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"cannot read {path} as an .npz archive of plain arrays: {error}") from error
    if "jpeg" in arrays:
        return _read_packed(path, arrays, limit, size, channels)
    return _plain(path, arrays, limit)


def _read_packed(path: Path, arrays: dict[str, Array], limit: int | None, size: Size | None, channels: int) -> Data:
    absent = {"offsets", "labels"} - set(arrays)
    if absent:
        raise DataError(f"{path} has packed images but no '{min(absent)}'; it has {sorted(arrays)}")
    packed, offsets, labels = arrays["jpeg"], arrays["offsets"], arrays["labels"]
    if packed.dtype != np.uint8 or packed.ndim != 1 or offsets.dtype.kind not in "iu" or offsets.ndim != 1:
        raise DataError(f"{path}: 'jpeg' must be a row of bytes and 'offsets' a row of whole numbers")
    if len(offsets) != len(labels) + 1:
        raise DataError(
            f"{path} has {len(labels)} labels, so 'offsets' needs {len(labels) + 1} numbers; it has {len(offsets)}"
        )
    bounds = offsets.astype(np.int64)
    if bounds[0] != 0 or bounds[-1] != len(packed) or (np.diff(bounds) <= 0).any():
        raise DataError(f"{path}: 'offsets' must rise from 0 to the {len(packed)} bytes of 'jpeg'")
    is_test = arrays.get("is_test", np.zeros(len(labels), dtype=bool)).astype(bool)
    if is_test.shape != labels.shape:
        raise DataError(f"{path} has {len(labels)} labels, but 'is_test' has the shape {is_test.shape}")
    parts: dict[str, tuple[Pixels, Array]] = {}
    for part, members in (("train", np.flatnonzero(~is_test)), ("test", np.flatnonzero(is_test))):
        if len(members) or part == "train":
            chosen = members[evenly_spaced(len(members), limit)]
            files = [packed[bounds[at] : bounds[at + 1]].tobytes() for at in chosen]
            names = [f"image {at} of {path.name}" for at in chosen]
            parts[part] = (decode(files, names, size, channels), labels[chosen])
    class_names = arrays["class_names"].astype(str).tolist() if "class_names" in arrays else None
    return image_data(path.stem, parts, class_names)


def _plain(path: Path, arrays: dict[str, Array], limit: int | None) -> Data:
    arrays_by_part: dict[tuple[str, str], Array] = {}
    for name, value in arrays.items():
        words = name.lower().split("_")
        parts = [PARTS[word] for word in words if word in PARTS] or ["train"]
        kinds = ["x" if word in _INPUTS else "y" for word in words if word in _INPUTS + _OUTPUTS]
        if len(words) <= 2 and len(parts) == len(kinds) == 1:
            if (parts[0], kinds[0]) in arrays_by_part:
                raise DataError(f"{path} has two arrays for {kinds[0]} of the {parts[0]} part; it has {sorted(arrays)}")
            arrays_by_part[parts[0], kinds[0]] = value
    if ("train", "x") not in arrays_by_part:
        raise DataError(
            f"{path} has the arrays {sorted(arrays)}; expected x and y, x_train, y_train, x_test, y_test, or packed "
            "images (jpeg, offsets, labels)"
        )
    pairs: dict[str, tuple[Array, Array]] = {}
    for part in ("train", "validation", "test"):
        x, y = arrays_by_part.get((part, "x")), arrays_by_part.get((part, "y"))
        if x is None and y is None:
            continue
        if x is None or y is None:
            raise DataError(f"{path} has only one of x and y for the {part} part; it has {sorted(arrays)}")
        if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
            raise DataError(
                f"{path}: the {part} part has x of shape {x.shape} and y of shape {y.shape}: as many are needed"
            )
        chosen = evenly_spaced(len(x), limit)
        pairs[part] = (x[chosen], y[chosen][:, 0] if y.ndim == 2 and y.shape[1] == 1 else y[chosen])
    if all(
        x.dtype == np.uint8 and x.ndim in (3, 4) and y.dtype.kind in "iu" and y.ndim == 1 for x, y in pairs.values()
    ):
        images = {part: (channels_first(x, f"x of {path}"), y) for part, (x, y) in pairs.items()}
        return image_data(path.stem, images)
    sources: dict[str, Source] = {
        part: Tensors(x=_tensor(x, path), y=_tensor(y, path)) for part, (x, y) in pairs.items()
    }
    x, y = pairs["train"]
    info: dict[str, Any] = {"shape": x.shape[1:]}
    if y.ndim == 1 and y.dtype.kind in "iub":
        info["classes"] = max(int(targets.max()) for _, targets in pairs.values()) + 1
    return Data(path.stem, **sources, info=info)


def _tensor(values: Array, path: Path) -> torch.Tensor:
    if len(values) == 0 or values.dtype.kind not in "iubf":
        raise DataError(
            f"{path} has an array of {values.dtype} with {len(values)} rows; only numbers can be learned from"
        )
    return torch.from_numpy(values.astype(np.float32 if values.dtype.kind == "f" else np.int64))
