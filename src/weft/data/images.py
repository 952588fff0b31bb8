"""Images: stored as bytes, read as numbers from 0 to 1; from folders, which several threads decode, and IDX files."""

from __future__ import annotations

import gzip
import hashlib
import io
import logging
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.data.dataset import PARTS, Data, evenly_spaced
from weft.data.source import Batch, Indices, Source, Tensors, column, device_of, move_source
from weft.errors import DataError, install_extra

log = logging.getLogger("weft.data")

Pixels = npt.NDArray[np.uint8]
Size = int | tuple[int, int]
Array = npt.NDArray[Any]


class Scaled:
    """A source whose `key` is stored as bytes and read as float32 from 0 to 1."""

    def __init__(self, source: Source, key: str = "image") -> None:
        self.source, self.key = source, key

    @property
    def device(self) -> torch.device:
        return device_of(self.source)

    def __len__(self) -> int:
        return len(self.source)

    def take(self, indices: Indices) -> Batch:
        batch = self.source.take(indices)
        return {**batch, self.key: scale_pixels(batch[self.key])}

    def column(self, name: str) -> torch.Tensor:
        values = column(self.source, name)
        return scale_pixels(values) if name == self.key else values

    def to(self, device: torch.device | str) -> Scaled:
        return Scaled(move_source(self.source, device), self.key)

    def fingerprint(self) -> str:
        return hashlib.sha256(f"scaled {self.key} {self.source.fingerprint()}".encode()).hexdigest()


def scale_pixels(pixels: torch.Tensor) -> torch.Tensor:
    return pixels.to(torch.float32).div_(255)


def channels_first(pixels: Pixels, where: str) -> Pixels:
    """Images as (n, channels, height, width), from (n, height, width) or with 1, 3 or 4 channels last or first."""
    if pixels.ndim == 3:
        return pixels[:, None]
    if pixels.ndim == 4 and pixels.shape[3] in (1, 3, 4):
        return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    if pixels.ndim == 4 and pixels.shape[1] in (1, 3, 4):
        return pixels
    raise DataError(
        f"{where} has the shape {pixels.shape}: images are (n, height, width), with 1, 3 or 4 channels if any"
    )


def decode(files: Sequence[bytes], names: Sequence[str], size: Size | None = None, channels: int = 3) -> Pixels:
    """Decodes image files into (n, channels, height, width); without a `size` they must be of one size."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(f"images are decoded by Pillow: {install_extra('images')}") from error
    if channels not in (1, 3):
        raise DataError(f"images have 1 channel (grey) or 3 (colour); got channels={channels}")
    shape = (size, size) if isinstance(size, int) else size

    def pixels(number: int) -> Pixels:
        try:
            with Image.open(io.BytesIO(files[number])) as opened:
                image: Any = opened.convert("L" if channels == 1 else "RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"{names[number]} is not an image that can be read: {error}") from error
        if shape is not None and image.size != (shape[1], shape[0]):
            image = image.resize((shape[1], shape[0]), Image.Resampling.BILINEAR)
        return np.asarray(image, dtype=np.uint8).reshape(image.size[1], image.size[0], channels)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        result: Pixels | None = None
        for number, image in enumerate(pool.map(pixels, range(len(files)))):
            if result is None:
                result = np.empty((len(files), channels, *image.shape[:2]), dtype=np.uint8)
            if image.shape[:2] != result.shape[2:]:
                pool.shutdown(wait=False, cancel_futures=True)
                raise DataError(
                    f"{names[number]} is {image.shape[0]} by {image.shape[1]} pixels, {names[0]} {result.shape[2]} by "
                    f"{result.shape[3]}: give size= to make them one size"
                )
            result[number] = image.transpose(2, 0, 1)
    if result is None:
        raise DataError("there are no images to decode")
    return result


# Image folders: one sub-folder a class, under the root or under train, val and test.

SUFFIXES = (".png", ".jpg", ".jpeg")


def read_folder(path: Path, *, limit: int | None = None, size: Size | None = None, channels: int = 3) -> Data:
    """`root/<class>/*.png|jpg` or `root/{train,val,test}/<class>/...`; classes are numbered by name.

    All images are decoded once and kept in memory as bytes, resized to `size` (a side, or height and width).
    """
    roots = parts_of(path) or {"train": path}
    class_names = [folder.name for folder in _folders(roots["train"]) if _files(folder)]
    if not class_names:
        raise DataError(f"{roots['train']} has no sub-folders of images ({', '.join(SUFFIXES)}), one a class")
    number = {name: at for at, name in enumerate(class_names)}
    parts: dict[str, tuple[Pixels, Array]] = {}
    for part, root in roots.items():
        listed = [(file, folder.name) for folder in _folders(root) for file in _files(folder)]
        unknown = sorted({name for _, name in listed} - set(number))
        if unknown:
            raise DataError(f"{root} has the class '{unknown[0]}', which {roots['train']} has not")
        if not listed:
            raise DataError(f"{root} has no images ({', '.join(SUFFIXES)}) in sub-folders, one a class")
        chosen = [listed[at] for at in evenly_spaced(len(listed), limit)]
        files = [_read(file) for file, _ in chosen]
        pixels = decode(files, [str(file) for file, _ in chosen], size, channels)
        parts[part] = (pixels, np.array([number[name] for _, name in chosen]))
    return image_data(path.name, parts, class_names)


def holds_images(path: Path) -> bool:
    """Whether a folder looks like one that can be read."""
    return bool(parts_of(path)) or any(_files(folder) for folder in _folders(path))


def parts_of(path: Path) -> dict[str, Path]:
    """The folders of the parts, if there is a `train` that holds folders."""
    named = {PARTS[folder.name]: folder for folder in _folders(path) if folder.name in PARTS}
    return named if "train" in named and _folders(named["train"]) else {}


def _folders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _files(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.suffix.lower() in SUFFIXES and entry.name[0] != ".")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


# IDX files, the format of MNIST and Fashion-MNIST: pairs of images and labels, plain or gzipped.

IDX_NAME = re.compile(r"(train|t10k|test)-(images|labels)[-.]idx[13]-ubyte(\.gz)?")
_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_IDX_PARTS = {"train": "train", "t10k": "test", "test": "test"}


def read_idx(path: Path, *, limit: int | None = None) -> Data:
    """A folder with `train-images-idx3-ubyte[.gz]`, `train-labels-...` and `t10k-...`, or any file in it."""
    folder = path if path.is_dir() else path.parent
    files: dict[tuple[str, str], Path] = {}
    for file in sorted(folder.iterdir()):
        if match := IDX_NAME.fullmatch(file.name):
            files.setdefault((_IDX_PARTS[match[1]], match[2]), file)
    parts: dict[str, Any] = {}
    for part in ("train", "test"):
        pair = [files.get((part, what)) for what in ("images", "labels")]
        if pair == [None, None] and part == "test":
            continue
        if pair[0] is None or pair[1] is None:
            absent = "images" if pair[0] is None else "labels"
            raise DataError(f"{folder} has no {part} {absent}: expected a file like train-{absent}-idx?-ubyte.gz")
        images, labels = idx_array(pair[0]), idx_array(pair[1])
        if images.ndim != 3 or images.dtype != np.uint8:
            raise DataError(f"{pair[0]} must hold bytes in 3 dimensions; it holds {images.dtype} in {images.ndim}")
        if len(images) != len(labels):
            raise DataError(f"{pair[0].name} has {len(images)} images, {pair[1].name} {len(labels)} labels")
        chosen = evenly_spaced(len(images), limit)
        parts[part] = (images[chosen][:, None], labels[chosen])
    return image_data(folder.name, parts)


def idx_array(path: Path) -> Array:
    """The array in one IDX file: two zero bytes, a type, the rank, its lengths (big-endian), the values."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_TYPES or content[3] == 0:
        raise DataError(
            f"{path} is not an IDX file: it begins with {content[:4].hex() or 'nothing'}, not 0000 + type + rank"
        )
    dtype, start = np.dtype(_IDX_TYPES[content[2]]), 4 + 4 * content[3]
    shape = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4))
    expected = start + prod(shape) * dtype.itemsize
    if len(content) != expected:
        raise DataError(f"{path} announces the shape {shape}, that is {expected} bytes; it has {len(content)}")
    return np.frombuffer(content, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


# Labelled arrays: the step that every format of images shares.


def image_data(name: str, parts: Mapping[str, tuple[Pixels, Array]], class_names: Sequence[str] | None = None) -> Data:
    """A data set of images (n, channels, height, width) and whole-number labels, by part."""
    sources: dict[str, Source] = {}
    highest = 0
    for part, (pixels, labels) in parts.items():
        where = f"the {part} part of {name}"
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
    return Data(name, **sources, info=info)
