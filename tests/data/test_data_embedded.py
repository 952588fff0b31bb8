"""Embedded data: the real digits, the real text."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from weft.data import Subset, Text, digits, open_data, text
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


def test_the_seed_fixes_the_digits_split() -> None:
    assert digits(3).fingerprint() == digits(3).fingerprint() != digits(4).fingerprint()


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


def test_text_of_many_characters_keeps_every_one(tmp_path: Path) -> None:
    content = "".join(chr(0x4E00 + n) for n in range(400)) + "aé😀" * 20
    (tmp_path / "story.txt").write_text(content, encoding="utf-8")
    data = text(8, tmp_path / "story.txt")
    assert data.name == "story"
    assert data.info["size"] == 403
    assert isinstance(data.train, Text)
    assert isinstance(data.test, Text)
    letters = data.info["vocabulary"]
    assert "".join(letters[token] for token in data.train.tokens.tolist()) == content[: len(data.train.tokens)]
    assert letters[int(data.test.tokens[-1])] == "😀"


def test_text_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"abc\xff")
    with pytest.raises(DataError, match="not UTF-8 text: byte 3"):
        text(path=bad)
    bad.write_text("")
    with pytest.raises(DataError, match="is empty"):
        text(path=bad)
    bad.write_text("short" * 20)
    with pytest.raises(DataError, match="context of 64 needs 65"):
        text(path=bad)
    with pytest.raises(DataError, match="cannot read"):
        text(path=tmp_path / "absent.txt")


def test_data_opens_by_name_with_its_options() -> None:
    assert open_data("digits", seed=2).fingerprint() == digits(2).fingerprint()
    assert open_data("text", context=8).info["shape"] == (8,)
    with pytest.raises(DataError, match=r"'digit' is neither .*did you mean 'digits'"):
        open_data("digit")
    with pytest.raises(DataError, match="unknown option 'contxt' for text; did you mean 'context'"):
        open_data("text", contxt=8)
