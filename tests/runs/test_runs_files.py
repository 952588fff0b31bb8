from __future__ import annotations

import hashlib
import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import RunError
from weft.utils.files import read_json, replacing, replacing_files, sha256_file, to_json, write_atomic, write_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_atomic(tmp_path / "x", b"\x00\xff")
    assert sha256_file(tmp_path / "x") == hashlib.sha256(b"\x00\xff").hexdigest()
    write_atomic(str(tmp_path / "x"), "über\n")
    with pytest.raises(KeyError), replacing(tmp_path / "x", 3) as file:  # noqa: PT012
        file.write(b"new")
        raise KeyError
    assert (tmp_path / "x").read_bytes() == "über\n".encode()
    with pytest.raises(RunError, match="cannot write object"):
        write_json(tmp_path / "y.json", {"a": object()})
    with pytest.raises(RunError, match=r"cannot write .*none/x\.json': No such file"):
        write_json(tmp_path / "none" / "x.json", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("text", ["", '{"a": 1', "\xff", "[" * 100_000, None])
def test_json_that_cannot_be_read_is_an_error_that_names_the_file(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "x.json").write_bytes(text.encode("latin1"))
    with pytest.raises(RunError, match=r"x\.json': No such file" if text is None else r"x\.json' is not valid JSON"):
        read_json(tmp_path / "x.json")


@settings(max_examples=30, deadline=None)
@given(VALUES)
def test_what_is_written_as_json_is_read_back(value: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / "x.json", value)
        assert read_json(Path(folder) / "x.json") == value
        assert (Path(folder) / "x.json").read_text() == json.dumps(value, sort_keys=True, indent=2) + "\n"


def test_values_of_numpy_torch_and_dataclasses_become_plain() -> None:
    @dataclass(frozen=True, slots=True)
    class Point:
        x: float
        where: Path

    for value, wanted in (
        (Point(-math.inf, Path("a/b")), {"x": "-inf", "where": "a/b"}),
        ([np.float32(0.5), np.arange(3), torch.tensor([[1, 2]])], [0.5, [0, 1, 2], [[1, 2]]]),
        ({"nan": torch.tensor(math.nan), "set": {3, 1}}, {"nan": "nan", "set": [1, 3]}),
        ({7: (True, None)}, {"7": [True, None]}),
    ):
        assert to_json(value) == wanted


def test_files_of_a_folder_are_replaced_together_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    for folder in (tmp_path, tmp_path / "new"):
        with pytest.raises(KeyError), replacing_files(folder) as temp:  # noqa: PT012
            (temp / "a").write_text("torn")
            raise KeyError
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]
    with replacing_files(tmp_path, last=("a",)) as temp:
        for name in "ab":
            (temp / name).write_text("new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "new", "b": "new"}
