"""Running a plan on torch.distributed: a captured model on a mesh of devices, or in stages of such meshes."""

from weft.plan.runtime.apply import capture_microbatch, parallelize, program_of, unsupported
from weft.plan.runtime.module import ParallelModule, StepOptions

__all__ = ["ParallelModule", "StepOptions", "capture_microbatch", "parallelize", "program_of", "unsupported"]
