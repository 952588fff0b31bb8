"""Memory before anything runs: what a training step takes on a device, from shapes alone."""

from weft.plan.memory.allocator import CachingAllocator, OutOfMemory, Rules
from weft.plan.memory.estimate import Estimate, estimate
from weft.plan.memory.kernels import KERNELS, Kernels
from weft.plan.memory.recompute import parts, recompute

__all__ = [
    "KERNELS",
    "CachingAllocator",
    "Estimate",
    "Kernels",
    "OutOfMemory",
    "Rules",
    "estimate",
    "parts",
    "recompute",
]
