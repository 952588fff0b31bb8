"""Data by name or by path: digits and text that need no download, and files whose kind follows from their content."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.data import huggingface, images, npz
from weft.data.dataset import Data, split
from weft.data.source import Tensors, Text
from weft.errors import DataError, install_extra, nearest


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
    if kind == "text":
        return _call(kind, text, {"path": place, **options})
    validation, seed = options.pop("validation", 0.1), options.pop("seed", 0)
    data = _call(kind, KINDS[kind], {"path": place, **options}, ("validation", "seed"))
    if data.validation is not None or validation == 0:
        return data
    if not 0 < validation < 1:
        raise DataError(f"validation is a fraction of the training part, from 0 to below 1; got {validation}")
    keys = data.train.take(np.zeros(1, dtype=np.int64)) if "classes" in data.info else {}
    labels = next((name for name in ("label", "y") if name in keys), None)
    train, held = split(data.train, (1 - validation, validation), seed, labels)
    return replace(data, train=train, validation=held)


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


def _call(name: str, make: Callable[..., Data], options: Mapping[str, Any], others: Sequence[str] = ()) -> Data:
    names = inspect.signature(make).parameters
    for option in options:
        if option not in names:
            raise DataError(f"unknown option '{option}' for {name}{nearest(option, (*names, *others))}")
    return make(**options)


# What needs no download.


def digits(seed: int = 0) -> Data:
    """scikit-learn's 1,797 handwritten digits of 8 by 8 pixels, in [0, 1], split 60/20/20 by the seed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(f"the digits come with scikit-learn: {install_extra('demo')}") from error
    bunch = load_digits()
    image = torch.from_numpy((bunch.images / 16).astype(np.float32)).unsqueeze(1)
    label = torch.from_numpy(bunch.target.astype(np.int64))
    train, validation, test = split(Tensors(image=image, label=label), (0.6, 0.2, 0.2), seed, stratify="label")
    info = {"shape": (1, 8, 8), "classes": 10, "class_names": tuple(str(digit) for digit in range(10))}
    return Data("digits", train, validation, test, info)


def text(
    context: int = 64,
    path: str | os.PathLike[str] | None = None,
    stride: int | None = None,
    *,
    tokens: str = "characters",
    split: Sequence[float] = (0.8, 0.1, 0.1),
    validation_stride: int | None = None,
) -> Data:
    """Characters of a UTF-8 file, or of Python's help topics (PSF licence; they differ between versions of Python).

    ``split`` gives the fractions of the text that train, validate and, last, test; a part of 0 is left out. The
    vocabulary is that of all the text; with ``tokens="bytes"`` it is the 256 bytes, and any file will do. Windows are
    ``stride`` apart, by default end to end; those of validation and test ``validation_stride``, by default alike, so
    that training may see every window of a text that is scored once.
    """
    if tokens not in TOKENS:
        raise DataError(f"unknown tokens '{tokens}'{nearest(str(tokens), TOKENS)}")
    name, content = _content(path)
    if not content:
        raise DataError(f"the text in {path} is empty")
    vocabulary, numbers = _characters(content, path) if tokens == "characters" else _bytes(content)
    parts: dict[str, Text] = {}
    for part, row in _cut(numbers, split).items():
        if len(row) <= context:
            raise DataError(
                f"a text of {len(numbers)} {tokens} leaves {len(row)} for {part}; a context of {context} needs "
                f"{context + 1}: use a longer text or a shorter context"
            )
        step = stride if part == "training" or validation_stride is None else validation_stride
        parts[part] = Text(row, context, step)
    info = {"vocabulary": vocabulary, "size": len(vocabulary), "shape": (context,)}
    return Data(name, parts["training"], parts.get("validation"), parts.get("test"), info)


TOKENS = ("characters", "bytes")


def _content(path: str | os.PathLike[str] | None) -> tuple[str, bytes]:
    """A name and what it stands for, as bytes of UTF-8 if it is a text."""
    if path is None:
        from pydoc_data.topics import topics

        return "text", "\n\n".join(topics[topic] for topic in sorted(topics)).encode()
    try:
        return Path(path).stem, Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _characters(content: bytes, path: str | os.PathLike[str] | None) -> tuple[tuple[str, ...], torch.Tensor]:
    """The vocabulary, and the text as numbers in it."""
    try:
        # As text files are read: without a mark of their encoding, and with one kind of line ends.
        text = content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f'{path} is not UTF-8 text: byte {error.start} is not valid; tokens = "bytes" takes any file'
        ) from error
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    characters, numbers = np.unique(points, return_inverse=True)
    small = torch.uint8 if len(characters) <= 256 else torch.int32
    return tuple(map(chr, characters.tolist())), torch.from_numpy(numbers.astype(np.int64)).to(small)


def _bytes(content: bytes) -> tuple[tuple[bytes, ...], torch.Tensor]:
    """As ``_characters``, with the value of each byte as its number."""
    return tuple(bytes([byte]) for byte in range(256)), torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())


def _cut(numbers: torch.Tensor, fractions: Sequence[float]) -> dict[str, torch.Tensor]:
    """The parts of a text by name, in its order, without those whose fraction is 0."""
    parts = list(fractions)
    if (
        len(parts) not in (2, 3)
        or not all(isinstance(part, (int, float)) and part >= 0 for part in parts)
        or not (parts[0] > 0 and abs(sum(parts) - 1) < 1e-6)
    ):
        raise DataError(
            "split takes the fractions that train, validate and, if one is to, test: not below 0, the first above it, "
            f"and 1 together; got {parts}"
        )
    shares = [Fraction(str(part)) for part in parts]  # as they are written, so that .8 and .1 make .9
    ends = [int(len(numbers) * sum(shares[:count]) / sum(shares)) for count in range(len(shares) + 1)]
    return {
        name: numbers[ends[index] : ends[index + 1]].clone()
        for index, name in enumerate(("training", "validation", "test")[: len(shares)])
        if shares[index]
    }


EMBEDDED: Mapping[str, Callable[..., Data]] = {"digits": digits, "text": text}
KINDS: Mapping[str, Callable[..., Data]] = {
    "idx": images.read_idx,
    "npz": npz.read,
    "folder": images.read_folder,
    "text": text,
    "huggingface": huggingface.read,
}
