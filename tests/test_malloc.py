"""What a training step frees on a CPU is kept for the next one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from weft.utils.malloc import keep_freed_memory

PROGRAM = """
import resource
from weft.utils.malloc import keep_freed_memory
keep_freed_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step = [bytearray(2**20) for _ in range(64)]
    del step
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(**variables: str) -> int:
    """Those of the third of three steps that allocate and free 64 MiB each."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**environment, **variables}, capture_output=True, text=True, check=True
    )
    return int(ran.stdout)


@pytest.mark.skipif(not keep_freed_memory(), reason="needs glibc, with its own settings")
def test_a_step_reuses_the_pages_of_the_last_one_unless_the_user_has_set_the_allocator() -> None:
    pages = 64 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    assert page_faults() < pages / 8
    assert page_faults(MALLOC_TRIM_THRESHOLD_="131072") > pages / 2
