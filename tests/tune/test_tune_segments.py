"""By what a trial's process reserves the memory of a GPU."""

from __future__ import annotations

import sys

import pytest

from weft.tune.segments import VARIABLES, expandable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages come and go on Linux alone")


def test_trials_reserve_by_pages_unless_a_variable_of_pytorch_says_otherwise() -> None:
    assert expandable({})
    assert expandable({VARIABLES[0]: "garbage_collection_threshold:0.8", VARIABLES[1]: "expandable_segments:True"})
    for name in VARIABLES:
        assert not expandable({name: "max_split_size_mb:64, expandable_segments: False"})
        assert not expandable({name: "backend:cudaMallocAsync"})
