"""From a model to a graph: capture by torch.export, and a rule for each family of operators."""

from weft.plan.capture.capture import CapturedModel, capture
from weft.plan.capture.export import Batch
from weft.plan.capture.op_call import tensors

__all__ = ["Batch", "CapturedModel", "capture", "tensors"]
