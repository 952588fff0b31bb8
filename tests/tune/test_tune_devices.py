"""The devices of a study: how they are written, how processes share them, and how memory is reserved."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from weft.errors import TuneError
from weft.tune import Device
from weft.tune.devices import (
    PIPE,
    VARIABLES,
    expandable,
    is_on,
    parse_devices,
    processors,
    share_gpus,
    use_expandable_segments,
)


def test_devices_are_written_by_name_and_memory() -> None:
    assert parse_devices(["cpu=2KiB", "cpu"]) == [Device("cpu", 2048), Device("cpu", None)]
    assert parse_devices({"cpu": "1KiB"}) == [Device("cpu", 1024)]
    with pytest.raises(TuneError, match="'gpu' is no device"):
        parse_devices("gpu")
    with pytest.raises(TuneError, match="is not a size"):
        parse_devices("cpu=lots")


def test_processors_are_on_no_more_cores_than_there_are() -> None:
    threads, cores = processors()
    assert threads == len(os.sched_getaffinity(0))
    assert 1 <= cores <= threads


# -- MPS is taken where it can be, and never required; a small control program stands in for NVIDIA's


@pytest.fixture
def control(tmp_path: Path) -> Path:
    """Does what the real one does to its pipe directory, and writes down how it was called."""
    program = tmp_path / "control"
    program.write_text(
        '#!/bin/sh\nif [ "$1" = -d ]; then touch "$CUDA_MPS_PIPE_DIRECTORY/control"; '
        f"echo started >> {tmp_path}/calls\n"
        f"else read word rest; echo $word >> {tmp_path}/calls; fi\n"
    )
    program.chmod(0o755)
    return program


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PIPE, str(tmp_path / "none"))


def test_a_service_that_was_started_ends_with_the_block(control: Path, tmp_path: Path) -> None:
    before = os.environ[PIPE]
    with share_gpus("auto", str(control)) as on:
        assert on
        assert is_on()
        assert os.environ[PIPE] != before
    assert (tmp_path / "calls").read_text().split() == ["started", "quit"]
    assert os.environ[PIPE] == before


def test_a_service_of_another_is_used_and_left_alone_and_off_hides_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "control").touch()
    monkeypatch.setenv(PIPE, str(tmp_path))
    with share_gpus("on", "no-such-program") as on:  # which is not called
        assert on
    with share_gpus("off") as on:
        assert not on
        assert not is_on()
    assert is_on()


def test_without_a_control_program_that_works_auto_does_without_and_on_says_so(control: Path) -> None:
    control.write_text("#!/bin/sh\necho 'not permitted' >&2; exit 1\n")
    for program, said in (("no-such-program", "there is no no-such-program"), (str(control), "not permitted")):
        with share_gpus("auto", program) as on:
            assert not on
        with pytest.raises(TuneError, match=said), share_gpus("on", program):
            pass
    with pytest.raises(TuneError, match="auto, on or off"), share_gpus("yes"):
        pass


# -- by what a trial's process reserves the memory of a GPU


@pytest.mark.skipif(sys.platform != "linux", reason="pages come and go on Linux alone")
def test_trials_reserve_by_pages_unless_a_variable_of_pytorch_says_otherwise() -> None:
    assert expandable({})
    assert expandable({VARIABLES[0]: "garbage_collection_threshold:0.8", VARIABLES[1]: "expandable_segments:True"})
    for name in VARIABLES:
        assert not expandable({name: "max_split_size_mb:64, expandable_segments: False"})
        assert not expandable({name: "backend:cudaMallocAsync"})


@pytest.mark.skipif(sys.platform != "linux", reason="pages come and go on Linux alone")
def test_pytorch_still_takes_the_setting_by_the_private_name_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no public one for a process that has imported torch already."""
    told: list[str] = []
    assert callable(torch._C._accelerator_setAllocatorSettings)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    use_expandable_segments()
    monkeypatch.setenv(VARIABLES[1], "expandable_segments:False")
    use_expandable_segments()
    assert told == ["expandable_segments:True"]
