"""Data by name or by path: the kind of a file or folder follows from its content."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft.data import huggingface, images, npz
from weft.data.builtin import digits, text
from weft.data.dataset import Data
from weft.errors import DataError, nearest


def open_data(spec: str, **options: Any) -> Data:
    """Embedded data by name ("digits", "text"), else the data at a path, with the options of either.

    With the option ``path``, a name is that of one of the KINDS of data at it: ``open_data("text", path="input.txt")``.
    """
    if spec in EMBEDDED:
        return _call(spec, EMBEDDED[spec], options)
    if "path" in options:
        return load(options.pop("path"), spec, **options)
    if Path(spec).expanduser().exists():
        return load(spec, **options)
    raise DataError(f"'{spec}' is neither embedded data nor a path that exists{nearest(spec, EMBEDDED)}")


def load(path: str | os.PathLike[str], kind: str | None = None, **options: Any) -> Data:
    """The data at a path; `kind` is one of KINDS, or guessed.

    Every kind but text takes `validation` (the fraction of the training part that is held out where no validation part
    exists), `seed` (which draws it) and `limit` (samples of each part); see the reader of each format for the rest.
    """
    place = Path(path).expanduser()
    if not place.exists():
        raise DataError(f"there is no file or folder {place}")
    kind = guess(place) if kind is None else kind
    if kind not in KINDS:
        raise DataError(f"unknown kind of data '{kind}'{nearest(kind, KINDS)}")
    return _call(kind, KINDS[kind], {"path": place, **options})


def guess(path: Path) -> str:
    """The kind of data at a path, or a DataError with the list of kinds."""
    if path.is_dir():
        names = {entry.name for entry in path.iterdir()}
        if "dataset_dict.json" in names or {"state.json", "dataset_info.json"} <= names:
            return "huggingface"
        if any(images.IDX_NAME.fullmatch(name) for name in names):
            return "idx"
        if images.holds_images(path):
            return "folder"
    elif images.IDX_NAME.fullmatch(path.name):
        return "idx"
    elif path.suffix.lower() in (".npz", ".txt", ".text", ".md"):
        return "npz" if path.suffix.lower() == ".npz" else "text"
    raise DataError(f"cannot tell what kind of data {path} is; give kind=, one of {', '.join(sorted(KINDS))}")


EMBEDDED: Mapping[str, Callable[..., Data]] = {"digits": digits, "text": text}
KINDS: Mapping[str, Callable[..., Data]] = {
    "idx": images.read_idx,
    "npz": npz.read,
    "folder": images.read_folder,
    "text": text,
    "huggingface": huggingface.read,
}


def _call(name: str, make: Callable[..., Data], options: Mapping[str, Any]) -> Data:
    names = inspect.signature(make).parameters
    for option in options:
        if option not in names:
            raise DataError(f"unknown option '{option}' for {name}{nearest(option, names)}")
    return make(**options)
