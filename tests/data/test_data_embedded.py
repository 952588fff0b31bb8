"""Embedded data: the real digits, the real text."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from weft.data import Subset, Text, digits, load, open_data, text
from weft.data.open import _cut
from weft.errors import DataError


def test_digits_are_scikit_learns_split_60_20_20_by_label() -> None:
    data, bunch = digits(), load_digits()
    assert data.info == {"shape": (1, 8, 8), "classes": 10, "class_names": tuple("0123456789")}
    everything = []
    for part, fraction in ((data.train, 0.6), (data.validation, 0.2), (data.test, 0.2)):
        assert isinstance(part, Subset)
        batch = part.take(np.arange(len(part)))
        assert batch["image"].shape == (len(part), 1, 8, 8)
        assert batch["image"].dtype == torch.float32
        assert batch["label"].dtype == torch.int64
        assert np.array_equal(batch["image"][:, 0].numpy() * 16, bunch.images[part.indices].astype(np.float32))
        assert np.array_equal(batch["label"].numpy(), bunch.target[part.indices])
        counts, wanted = np.bincount(batch["label"], minlength=10), fraction * np.bincount(bunch.target)
        assert (abs(counts - wanted) < 1).all()
        everything += part.indices.tolist()
    assert sorted(everything) == list(range(1797))
    assert digits(3).fingerprint() == open_data("digits", seed=3).fingerprint() != digits(4).fingerprint()


def test_text_without_a_path_is_pythons_help_cut_80_10_10() -> None:
    data = text(context=16)
    whole = "\n\n".join(topics[name] for name in sorted(topics))
    vocabulary = data.info["vocabulary"]
    assert list(vocabulary) == sorted(set(whole))
    assert data.info["size"] == len(vocabulary)
    rows = []
    for part in (data.train, data.validation, data.test):
        assert isinstance(part, Text)
        rows.append("".join(vocabulary[token] for token in part.tokens.tolist()))
    assert "".join(rows) == whole
    assert abs(len(rows[0]) / len(whole) - 0.8) < 1e-3
    assert abs(len(rows[1]) / len(whole) - 0.1) < 1e-3
    batch = data.train.take(np.array([2]))
    assert "".join(vocabulary[token] for token in batch["tokens"][0]) == whole[32:48]
    assert "".join(vocabulary[token] for token in batch["targets"][0]) == whole[33:49]


@pytest.mark.parametrize("ends", ["\r\n", "\r", "\n"])
def test_text_keeps_every_character_with_one_kind_of_line_ends(tmp_path: Path, ends: str) -> None:
    content = "".join(chr(0x4E00 + n) for n in range(400)) + "aé\n😀" * 20
    (tmp_path / "story.txt").write_bytes(b"\xef\xbb\xbf" + content.replace("\n", ends).encode())
    data = text(8, tmp_path / "story.txt")
    assert (data.name, data.info["size"]) == ("story", 404)
    letters = data.info["vocabulary"]
    rows = [part.tokens.tolist() for part in data.parts().values()]
    assert "".join(letters[token] for row in rows for token in row) == content
    assert load(tmp_path / "story.txt", "text", context=8).fingerprint() == data.fingerprint()
    assert open_data(str(tmp_path / "story.txt"), context=8).info["shape"] == (8,)
    with pytest.raises(DataError, match=r"'digit' is neither .*did you mean 'digits'"):
        open_data("digit")
    with pytest.raises(DataError, match="unknown option 'contxt' for text; did you mean 'context'"):
        open_data("text", contxt=8)


def test_text_as_bytes_takes_any_file_byte_by_byte(tmp_path: Path) -> None:
    content = bytes(range(256)) * 3 + b"\xff\xfe\r\n"
    (tmp_path / "any.bin").write_bytes(content)
    data = text(8, tmp_path / "any.bin", tokens="bytes")
    assert data.info["size"] == 256
    rows = [part.tokens.tolist() for part in data.parts().values()]  # type: ignore[attr-defined]
    assert b"".join(data.info["vocabulary"][token] for row in rows for token in row) == content
    assert open_data("text", path=str(tmp_path / "any.bin"), tokens="bytes", context=8).info["size"] == 256


@given(
    length=st.integers(1, 400),
    shares=st.lists(st.integers(0, 20), min_size=2, max_size=3).filter(lambda shares: shares[0] > 0),
)
def test_a_split_cuts_the_whole_text_in_order_at_the_exact_fractions(length: int, shares: list[int]) -> None:
    fractions = [float(Fraction(share, sum(shares))) for share in shares]
    numbers = torch.arange(length)
    parts = _cut(numbers, fractions)
    assert torch.equal(torch.cat(list(parts.values())), numbers)
    names = ("training", "validation", "test")
    assert list(parts) == [name for name, share in zip(names, shares, strict=False) if share]
    for count in range(1, len(shares) + 1):
        reached = sum(len(parts.get(name, ())) for name in names[:count])
        assert abs(reached - length * sum(shares[:count]) / sum(shares)) < 1.001
    tenths = [len(part) for part in _cut(numbers, (0.8, 0.1, 0.1)).values()]
    assert tenths == [length * 8 // 10, length * 9 // 10 - length * 8 // 10, length - length * 9 // 10]


def test_a_part_of_nothing_is_left_out_and_validation_may_have_a_stride_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text("abcdefghij" * 20)
    data = text(4, tmp_path / "story.txt", 1, split=(0.9, 0.1), validation_stride=4)
    assert data.test is None
    assert isinstance(data.train, Text)
    assert isinstance(data.validation, Text)
    assert (len(data.train), len(data.validation)) == (180 - 4, (20 - 1 - 4) // 4 + 1)
    assert (data.train.stride, data.validation.stride) == (1, 4)
    assert (
        data.fingerprint() == text(4, tmp_path / "story.txt", 1, split=[0.9, 0.1, 0], validation_stride=4).fingerprint()
    )
    alone = text(4, tmp_path / "story.txt", split=(1, 0))
    assert (alone.validation, alone.test) == (None, None)
    tested = text(4, tmp_path / "story.txt", split=(0.5, 0, 0.5))
    assert (tested.validation, len(tested.test or ())) == (None, 24)


@pytest.mark.parametrize(
    "split", [(0.9,), (0.9, 0.2), (0, 1), (1.1, -0.1), (0.7, 0.1, 0.1, 0.1), ("a", "b"), (0.9, float("nan"))]
)
def test_a_split_that_is_none_is_refused(split: Any) -> None:
    with pytest.raises(DataError, match="split takes the fractions that train, validate"):
        text(split=split)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"abc\xff", {}, "not UTF-8 text: byte 3"),
        (b"", {}, "is empty"),
        (None, {}, "cannot read"),
        (b"short", {"tokens": "byte"}, r"unknown tokens 'byte'; did you mean 'bytes'\?"),
        (b"short" * 20, {}, "context of 64 needs 65"),
        (b"short" * 40, {"split": (0.9, 0.1)}, "leaves 20 for validation; a context of 64 needs 65"),
        (b"short", {"context": 1, "split": (0.9, 0.001, 0.099)}, "leaves 0 for validation; a context of 1 needs 2"),
        (b"short", {"context": 1, "split": (0.1, 0.9)}, "leaves 0 for training; a context of 1 needs 2"),
    ],
)
def test_text_that_cannot_be_read_is_refused(
    tmp_path: Path, content: bytes | None, options: dict[str, Any], message: str
) -> None:
    if content is not None:
        (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        text(path=tmp_path / "bad.txt", **options)
