"""Memory before anything runs: what a training step takes on a device, from shapes alone."""

from weft.hardware.gpus import KERNELS, Kernels
from weft.memory.allocator import AllocationFailed, AllocatorConfig, CachingAllocator
from weft.memory.estimate import Estimate, estimate
from weft.nn.checkpointing import recompute, recomputed_parts

__all__ = [
    "KERNELS",
    "AllocationFailed",
    "AllocatorConfig",
    "CachingAllocator",
    "Estimate",
    "Kernels",
    "estimate",
    "recompute",
    "recomputed_parts",
]
