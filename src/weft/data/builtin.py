"""Real data that needs no download: handwritten digits and the text of Python's own help."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from weft.data.dataset import Data, split
from weft.data.source import Tensors, Text
from weft.errors import DataError, install_extra, nearest


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
