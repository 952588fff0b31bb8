"""The devices of a study: those that there are, those that a user names, and what candidates may count on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.errors import TuneError
from weft.plan.memory.kernels import KERNELS
from weft.tune.job import Device
from weft.units import size_of

GPU = "h200"
"""The kind that a GPU without constants of its own is taken for."""


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
        found.append(_device(name.strip(), int(size_of(memory, TuneError)) if memory else None))
    if not found:
        raise TuneError("a study needs a device: leave devices out for all that there are, or name some")
    return found


def nominal(memory: int | None, devices: Sequence[Device]) -> int | None:
    """The memory that candidates are fitted to: the study's, or the smallest device's; None: it is not counted."""
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

    from weft.plan.memory.kernels import KERNELS

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
