"""From a model to a graph: capture by torch.export, and a rule for each family of operators."""

from weft.plan.capture.batch import Batch
from weft.plan.capture.call import tensors
from weft.plan.capture.captured import CapturedModel, capture

__all__ = ["Batch", "CapturedModel", "capture", "tensors"]
