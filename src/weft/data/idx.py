"""IDX files, the format of MNIST and Fashion-MNIST: pairs of images and labels, plain or gzipped."""

from __future__ import annotations

import gzip
import re
import zlib
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.data.dataset import Data, evenly_spaced
from weft.data.images import image_data
from weft.errors import DataError

NAME = re.compile(r"(train|t10k|test)-(images|labels)[-.]idx[13]-ubyte(\.gz)?")
_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_PARTS = {"train": "train", "t10k": "test", "test": "test"}


def read(path: Path, *, validation: float = 0.1, seed: int = 0, limit: int | None = None) -> Data:
    """A folder with `train-images-idx3-ubyte[.gz]`, `train-labels-...` and `t10k-...`, or any file in it."""
    folder = path if path.is_dir() else path.parent
    files: dict[tuple[str, str], Path] = {}
    for file in sorted(folder.iterdir()):
        if match := NAME.fullmatch(file.name):
            files.setdefault((_PARTS[match[1]], match[2]), file)
    parts: dict[str, Any] = {}
    for part in ("train", "test"):
        pair = [files.get((part, what)) for what in ("images", "labels")]
        if pair == [None, None] and part == "test":
            continue
        if pair[0] is None or pair[1] is None:
            absent = "images" if pair[0] is None else "labels"
            raise DataError(f"{folder} has no {part} {absent}: expected a file like train-{absent}-idx?-ubyte.gz")
        images, labels = array(pair[0]), array(pair[1])
        if images.ndim != 3 or images.dtype != np.uint8:
            raise DataError(f"{pair[0]} must hold bytes in 3 dimensions; it holds {images.dtype} in {images.ndim}")
        if len(images) != len(labels):
            raise DataError(f"{pair[0].name} has {len(images)} images, {pair[1].name} {len(labels)} labels")
        chosen = evenly_spaced(len(images), limit)
        parts[part] = (images[chosen][:, None], labels[chosen])
    return image_data(folder.name, parts, class_names=None, validation=validation, seed=seed)


def array(path: Path) -> npt.NDArray[Any]:
    """The array in one IDX file: two zero bytes, a type, the rank, its lengths (big-endian), the values."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES or content[3] == 0:
        raise DataError(
            f"{path} is not an IDX file: it begins with {content[:4].hex() or 'nothing'}, not 0000 + type + rank"
        )
    dtype, start = np.dtype(_TYPES[content[2]]), 4 + 4 * content[3]
    shape = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4))
    expected = start + prod(shape) * dtype.itemsize
    if len(content) != expected:
        raise DataError(f"{path} announces the shape {shape}, that is {expected} bytes; it has {len(content)}")
    return np.frombuffer(content, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))
