"""Real data that needs no download: handwritten digits and the text of Python's own help."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from weft.data.dataset import Data, split
from weft.data.source import Tensors, Text
from weft.errors import DataError


def digits(seed: int = 0) -> Data:
    """scikit-learn's 1,797 handwritten digits of 8 by 8 pixels, in [0, 1], split 60/20/20 by the seed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("the digits come with scikit-learn: pip install weft[demo]") from error
    bunch = load_digits()
    image = torch.from_numpy((bunch.images / 16).astype(np.float32)).unsqueeze(1)
    label = torch.from_numpy(bunch.target.astype(np.int64))
    train, validation, test = split(Tensors(image=image, label=label), (0.6, 0.2, 0.2), seed, stratify="label")
    info = {"shape": (1, 8, 8), "classes": 10, "class_names": tuple(str(digit) for digit in range(10))}
    return Data("digits", train, validation, test, info)


def text(context: int = 64, path: str | os.PathLike[str] | None = None, stride: int | None = None) -> Data:
    """Characters of a UTF-8 file, or of Python's help topics (PSF licence; they differ between versions of Python).

    The first 80 % train, the next 10 % validate, the last 10 % test; the vocabulary is that of the whole text.
    """
    if path is None:
        from pydoc_data.topics import topics

        name, content = "text", "\n\n".join(topics[topic] for topic in sorted(topics))
    else:
        name, content = Path(path).stem, _read(Path(path))
    if not content:
        raise DataError(f"the text in {path} is empty")
    points = np.frombuffer(content.encode("utf-32-le"), dtype=np.uint32)
    characters, numbers = np.unique(points, return_inverse=True)
    small = torch.uint8 if len(characters) <= 256 else torch.int32
    tokens = torch.from_numpy(numbers.astype(np.int64)).to(small)
    first, second = len(tokens) * 8 // 10, len(tokens) * 9 // 10
    rows = (tokens[:first].clone(), tokens[first:second].clone(), tokens[second:].clone())
    shortest = min(map(len, rows))
    if shortest <= context:
        raise DataError(
            f"a text of {len(tokens)} characters leaves {shortest} for validation; a context of {context} needs "
            f"{context + 1}: use a longer text or a shorter context"
        )
    vocabulary = tuple(map(chr, characters.tolist()))
    info = {"vocabulary": vocabulary, "size": len(vocabulary), "shape": (context,)}
    train, validation, test = (Text(row, context, stride) for row in rows)
    return Data(name, train, validation, test, info)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: byte {error.start} is not valid") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
