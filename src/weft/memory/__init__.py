"""Memory before anything runs: what a training step takes on a device, from shapes alone."""

from weft.hardware.gpus import KERNELS, Kernels
from weft.memory.allocator import AllocatorConfig, CachingAllocator, OutOfMemory
from weft.memory.estimate import Estimate, estimate
from weft.nn.checkpointing import recompute, recomputed_parts

__all__ = [
    "KERNELS",
    "AllocatorConfig",
    "CachingAllocator",
    "Estimate",
    "Kernels",
    "OutOfMemory",
    "estimate",
    "recompute",
    "recomputed_parts",
]
