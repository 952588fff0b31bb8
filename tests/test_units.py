"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import ConfigError
from weft.utils.units import format_bytes, parse_bytes


def test_sizes_are_read_as_people_write_them() -> None:
    assert [parse_bytes(text) for text in ("80GiB", "1.5 gb", "1024", 7)] == [80 * 2**30, 1.5e9, 1024, 7]


@pytest.mark.parametrize("wrong", ["", "GiB", "12 apples", "-3", "0", "1e999", "1.2.3", "nan", "inf"])
def test_what_is_no_size_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_bytes(wrong, ConfigError)


@given(st.integers(1, 2**50))
def test_a_size_that_is_shown_is_read_back_within_its_digits(number: int) -> None:
    assert parse_bytes(format_bytes(number)) == pytest.approx(number, rel=0.06)
