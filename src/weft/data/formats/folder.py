"""Image folders: one sub-folder a class, under the root or under train, val and test."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from weft.data.dataset import Data, spread
from weft.data.formats.labelled import Array, image_data
from weft.data.formats.npz import PARTS
from weft.data.images import Pixels, Size, decode
from weft.errors import DataError

SUFFIXES = (".png", ".jpg", ".jpeg")


def read(
    path: Path,
    *,
    validation: float = 0.1,
    seed: int = 0,
    limit: int | None = None,
    size: Size | None = None,
    channels: int = 3,
    cache: str | os.PathLike[str] | None = None,
) -> Data:
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
        chosen = [listed[at] for at in spread(len(listed), limit)]
        files = [_read(file) for file, _ in chosen]
        pixels = decode(files, [str(file) for file, _ in chosen], size=size, channels=channels, cache=cache)
        parts[part] = (pixels, np.array([number[name] for _, name in chosen]))
    return image_data(path.name, parts, class_names=class_names, validation=validation, seed=seed)


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
