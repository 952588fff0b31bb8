"""The devices of a study: which there are, their memory, and how processes share them."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from weft.distributed.env import environment_variables
from weft.errors import TuneError
from weft.hardware.gpus import KERNELS
from weft.tune.jobs import Device
from weft.utils.units import parse_bytes

GPU = "h200"
"""Whose constants are taken for a GPU that has none of its own: the largest workspaces that are known."""


def local_devices() -> list[Device]:
    """The GPUs of this machine with the memory that each has, or its CPU, whose memory is not counted."""
    import torch

    if torch.cuda.is_available():
        return [
            Device(f"cuda:{index}", torch.cuda.get_device_properties(index).total_memory)
            for index in range(torch.cuda.device_count())
        ]
    return [Device("cpu", None)]


def parse_devices(devices: Sequence[str | Device] | Mapping[str, Any] | str | None) -> list[Device] | None:
    """Devices from names, each perhaps with its memory: ``["cuda:0", "cuda:1=40GiB"]`` or ``{"cpu": "2GiB"}``."""
    if devices is None:
        return None
    if isinstance(devices, str):
        devices = [devices]
    if not isinstance(devices, Mapping | Sequence):
        raise TuneError(f"devices are names such as 'cpu' or 'cuda:0', not {devices!r}")
    given = [f"{name}={memory}" for name, memory in devices.items()] if isinstance(devices, Mapping) else devices
    found = []
    for one in given:
        if isinstance(one, Device):
            _kind(one.name)
            found.append(one)
            continue
        name, _, memory = str(one).partition("=")
        found.append(_device(name.strip(), int(parse_bytes(memory, TuneError)) if memory else None))
    if not found:
        raise TuneError("a study needs a device: leave devices out for all that there are, or name some")
    return found


def nominal(memory: int | None, devices: Sequence[Device]) -> int | None:
    """The memory that trials are fitted to: the given one, or the smallest device's; None: it is not counted."""
    if memory is not None:
        return memory
    known = [device.memory for device in devices if device.memory is not None]
    return min(known) if known and len(known) == len(devices) else None


def reserve(device: Device) -> int:
    """Bytes that a process takes of a device beside its tensors."""
    return 0 if device.name == "cpu" else max(kernels.context for kernels in KERNELS.values())


def most_together(devices: Sequence[Device]) -> int:
    """The number of devices of the machine that has most."""
    counts: dict[str, int] = {}
    for device in devices:
        counts[device.node] = counts.get(device.node, 0) + 1
    return max(counts.values(), default=1)


def kind(devices: Sequence[Device]) -> str:
    """Of which kind they are, for estimates: ``cpu``, or the name of a GPU whose constants are known."""
    import torch

    if any(device.name == "cpu" for device in devices):
        return "cpu"
    named = torch.cuda.get_device_name(0).lower() if torch.cuda.is_available() else ""
    return next((name for name in KERNELS if name in named), GPU)


def processors() -> tuple[int, int]:
    """How many processors this process may use, and on how many cores they are, as far as the machine says."""
    if not hasattr(os, "sched_getaffinity"):
        return (os.cpu_count() or 1,) * 2
    mine, cores = os.sched_getaffinity(0), set()
    for number in mine:
        place = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
        try:
            cores.add(place.read_text())
        except OSError:
            cores.add(str(number))
    return len(mine), len(cores)


def _kind(name: str) -> Any:
    """As torch knows it; TuneError for one that trials do not run on."""
    import torch

    try:
        kind = torch.device(name)
    except RuntimeError:
        raise TuneError(f"'{name}' is no device: use cpu, or cuda:0 and so on") from None
    if kind.type not in ("cpu", "cuda"):
        raise TuneError(f"trials do not run on '{name}': use cpu, or cuda:0 and so on")
    return kind


def _device(name: str, memory: int | None) -> Device:
    import torch

    kind = _kind(name)
    if kind.type == "cuda":
        count = torch.cuda.device_count()
        if (kind.index or 0) >= count:
            raise TuneError(f"device '{name}': torch sees {count} CUDA devices here")
        total = int(torch.cuda.get_device_properties(kind).total_memory)
        return Device(f"cuda:{kind.index or 0}", total if memory is None else min(memory, total))
    return Device("cpu", memory)


# NVIDIA's multi-process service (MPS), by which several processes use a GPU at once instead of in turns.

CONTROL = "nvidia-cuda-mps-control"
PIPE, LOG = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_log = logging.getLogger("weft.tune")


def is_on() -> bool:
    """Whether a control process listens where the environment says."""
    return Path(os.environ.get(PIPE, "/tmp/nvidia-mps"), "control").exists()


@contextmanager
def share_gpus(wanted: str = "auto", control: str = CONTROL) -> Iterator[bool]:
    """Within the block, processes that are started share GPUs by MPS, if that can be; yields whether.

    ``"auto"`` takes a service that is there, starts one where the control program is installed and may be, and does
    without one otherwise, ``"on"`` raises TuneError then, and ``"off"`` hides one that is there. A service that was
    started here ends with the block.
    """
    if wanted not in ("auto", "on", "off"):
        raise TuneError(f"mps is auto, on or off, not '{wanted}'")
    if wanted != "off" and is_on():
        yield True
        return
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-mps-"))
        own = {PIPE: folder, LOG: folder}
        problem = None if wanted == "off" else _start(own, control)
        if problem is None:
            stack.enter_context(environment_variables(own))  # where nothing listens if it is off
            if wanted != "off":
                stack.callback(_stop, control)
        elif wanted == "on":
            raise TuneError(f"MPS cannot be started: {problem}; install {control}, or leave mps on auto")
        else:
            _log.info("GPUs are shared in turns, without MPS: %s", problem)
        yield wanted != "off" and problem is None


def _start(environment: Mapping[str, str], control: str) -> str | None:
    """Start a service; returns why it cannot be started, or None."""
    if shutil.which(control) is None:
        return f"there is no {control}"
    given = {**os.environ, **environment}
    try:
        done = subprocess.run([control, "-d"], env=given, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return str(problem)
    if done.returncode:
        return (done.stderr or done.stdout).decode(errors="replace").strip() or f"it exits with {done.returncode}"
    return None


def _stop(control: str) -> None:
    """End the service that was started here, and what still uses it."""
    try:
        subprocess.run([control], input=b"quit -t 5\n", capture_output=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        _log.warning("the MPS service that was started here does not end")


# How the allocator of a trial's process reserves memory of a GPU: by pages (PyTorch's expandable segments).
#
# With a segment for every size, the reserved memory depends on the order of allocations, and is up to a sixth more
# than the used memory; with pages it follows the used memory, so that it can be estimated, and more trials fit.

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def expandable(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether trials reserve memory by pages: on Linux, unless a variable of PyTorch's says otherwise.

    >>> expandable({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False,max_split_size_mb:64"})
    False
    """
    said = ",".join(environment.get(name, "") for name in VARIABLES).replace(" ", "")
    return sys.platform == "linux" and "expandable_segments:False" not in said and "backend:cudaMalloc" not in said


def use_expandable_segments() -> None:
    """Called before the first tensor on a GPU: this process reserves by pages from now on, where ``expandable``."""
    if not expandable():
        return
    import torch

    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
