"""What a device's libraries take for themselves, by the device's name; each figure says where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import PlanError, nearest

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Kernels:
    """Constants of a kind of device under one version of its libraries."""

    name: str
    processors: int
    """Multiprocessors: reductions over many rows take partial sums for each."""
    threads: int
    """Resident threads of a multiprocessor."""
    blas: int
    """Bytes of cuBLAS's workspace, one for each thread that multiplies: the forward's and the backward's."""
    blas_biased: int
    """Bytes of cuBLASLt's, taken with the first product that adds a bias."""
    context: int
    """Bytes of the CUDA context and the loaded kernels, outside the allocator, once for each process."""
    cudnn_attention: bool
    """Whether attention in 16 bits is cuDNN's, and not the flash kernel."""


CPU = Kernels("cpu", 0, 0, 0, 0, 0, False)
"""A CPU: none of the GPU's kernels, no workspaces, and nothing outside the tensors."""

# H200: torch 2.11.0+cu130, cuDNN 9.19, driver 580.159: `benchmarks/memory.py --part measure`, results/memory.json.
KERNELS = {
    value.name: value
    for value in (
        Kernels("h200", 132, 2048, 32 * MIB, MIB, 770 * MIB, True),
        Kernels("h100", 132, 2048, 32 * MIB, MIB, 770 * MIB, True),
        # Not measured: PyTorch's own default workspace of 4096 KiB x 2 + 16 KiB x 8 before Hopper.
        Kernels("a100", 108, 2048, 8320 * 1024, MIB, 450 * MIB, False),
        Kernels("v100", 80, 2048, 8320 * 1024, MIB, 350 * MIB, False),
    )
}


def kernels(name: str) -> Kernels:
    """The constants of a device; `PlanError` if it is unknown."""
    key = name.lower().replace("nvidia", "").strip(" -_").split(" ")[0].split("-")[0]
    if key not in KERNELS:
        raise PlanError(f"no memory constants for device '{name}'{nearest(key, KERNELS)}")
    return KERNELS[key]
