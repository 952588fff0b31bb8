"""Memory before anything runs: what a training step takes on a device, from shapes alone."""

from weft.hardware.gpus import KERNELS
from weft.memory.estimate import Estimate, estimate
from weft.nn.checkpointing import recompute

__all__ = ["KERNELS", "Estimate", "estimate", "recompute"]
