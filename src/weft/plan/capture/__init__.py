"""From a model to a graph: capture by torch.export, and a rule for each family of operators."""

from weft.plan.capture.batch import Batch
from weft.plan.capture.call import tensors
from weft.plan.capture.captured import Captured, capture

__all__ = ["Batch", "Captured", "capture", "tensors"]
