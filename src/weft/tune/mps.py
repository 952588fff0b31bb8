"""NVIDIA's multi-process service: where it may be used, several processes share a GPU at once instead of in turns."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from weft.errors import TuneError

CONTROL = "nvidia-cuda-mps-control"
PIPE, LOG = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_log = logging.getLogger("weft.tune")


def is_on(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a control process listens where this environment says."""
    return Path(environment.get(PIPE, "/tmp/nvidia-mps"), "control").exists()


@contextmanager
def shared(wanted: str = "auto", control: str = CONTROL) -> Iterator[bool]:
    """Within the block, processes that are started share GPUs by MPS, if that can be; yields whether.

    ``"auto"`` takes a service that is there, starts one where the control program is installed and may be, and does
    without one otherwise, ``"on"`` raises TuneError then, and ``"off"`` hides one that is there. A service that was
    started here ends with the block.
    """
    if wanted not in ("auto", "on", "off"):
        raise TuneError(f"mps is auto, on or off, not '{wanted}'")
    before = {name: os.environ.get(name) for name in (PIPE, LOG)}
    started = None
    with tempfile.TemporaryDirectory(prefix="weft-mps-") as folder:
        try:
            if wanted == "off":
                os.environ[PIPE] = os.environ[LOG] = folder  # nothing listens there
                yield False
            elif is_on():
                yield True
            else:
                started = _start(folder, control)
                if started is not None and wanted == "on":
                    raise TuneError(f"MPS cannot be started: {started}; install {control}, or leave mps on auto")
                if started is not None:
                    _log.info("GPUs are shared in turns, without MPS: %s", started)
                yield started is None
        finally:
            if wanted != "off" and os.environ.get(PIPE) == folder:
                _stop(control)
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def _start(folder: str, control: str) -> str | None:
    """Starts a service of our own; why it could not be, or None."""
    if shutil.which(control) is None:
        return f"there is no {control}"
    environment = {PIPE: folder, LOG: folder}
    try:
        done = subprocess.run(
            [control, "-d"], env={**os.environ, **environment}, capture_output=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return str(problem)
    if done.returncode:
        return (done.stderr or done.stdout).decode(errors="replace").strip() or f"it exits with {done.returncode}"
    os.environ.update(environment)
    return None


def _stop(control: str) -> None:
    """Ends the service of our own, and what still uses it."""
    try:
        subprocess.run([control], input=b"quit -t 5\n", capture_output=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        _log.warning("the MPS service that was started here does not end")
