"""By what a trial's process reserves the memory of a GPU."""

from __future__ import annotations

import sys

import pytest
import torch

from weft.tune.devices import VARIABLES, expandable, use_expandable_segments

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages come and go on Linux alone")


def test_trials_reserve_by_pages_unless_a_variable_of_pytorch_says_otherwise() -> None:
    assert expandable({})
    assert expandable({VARIABLES[0]: "garbage_collection_threshold:0.8", VARIABLES[1]: "expandable_segments:True"})
    for name in VARIABLES:
        assert not expandable({name: "max_split_size_mb:64, expandable_segments: False"})
        assert not expandable({name: "backend:cudaMallocAsync"})


def test_pytorch_still_takes_the_setting_by_the_private_name_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no public one for a process that has imported torch already."""
    told: list[str] = []
    assert callable(torch._C._accelerator_setAllocatorSettings)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    use_expandable_segments()
    monkeypatch.setenv(VARIABLES[1], "expandable_segments:False")
    use_expandable_segments()
    assert told == ["expandable_segments:True"]
