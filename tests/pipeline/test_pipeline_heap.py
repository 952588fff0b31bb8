"""What a step frees is kept for the next one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from weft.pipeline.heap import _kept, keep_freed

PROGRAM = """
import resource, torch
from weft.pipeline.heap import keep_freed
keep_freed(torch.device("cpu"))
for _ in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step = [torch.zeros(2**18) for _ in range(64)]
    del step
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**variables: str) -> int:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(ran.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux") or not _kept(), reason="needs glibc, with its own settings")
def test_the_next_step_has_the_pages_of_the_last() -> None:
    pages = 64 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    assert faults() < pages / 100
    assert faults(MALLOC_TRIM_THRESHOLD_="131072") > pages / 2  # the user's word counts


def test_other_devices_are_none_of_its_business() -> None:
    _kept.cache_clear()
    keep_freed(torch.device("meta"))
    assert _kept.cache_info().misses == 0
