"""MPS is taken where it can be, and never required; a small control program stands in for NVIDIA's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weft.errors import TuneError
from weft.tune.devices import PIPE, is_on, share_gpus


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


def test_a_service_of_another_is_used_and_left_alone(
    control: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "control").touch()
    monkeypatch.setenv(PIPE, str(tmp_path))
    with share_gpus("on", str(control)) as on:
        assert on
    assert not (tmp_path / "calls").exists()


def test_without_the_control_program_auto_does_without_and_on_says_so() -> None:
    with share_gpus("auto", "no-such-program") as on:
        assert not on
    with pytest.raises(TuneError, match="there is no no-such-program"), share_gpus("on", "no-such-program"):
        pass


def test_a_control_program_that_fails_is_no_reason_to_stop(control: Path) -> None:
    control.write_text("#!/bin/sh\necho 'not permitted' >&2; exit 1\n")
    with share_gpus("auto", str(control)) as on:
        assert not on
    with pytest.raises(TuneError, match="not permitted"), share_gpus("on", str(control)):
        pass


def test_off_hides_a_service_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "control").touch()
    monkeypatch.setenv(PIPE, str(tmp_path))
    with share_gpus("off") as on:
        assert not on
        assert not is_on()
    assert is_on()


def test_a_word_that_is_none_of_the_three_is_refused() -> None:
    with pytest.raises(TuneError, match="auto, on or off"), share_gpus("yes"):
        pass
