"""From a model to a graph: capture by torch.export, and a rule for each family of operators."""

from weft.plan.capture.batch import Batch
from weft.plan.capture.call import tensors
from weft.plan.capture.captured import Captured, capture
from weft.plan.capture.local import bias_operand, draws, local_shape, localise, summed

__all__ = ["Batch", "Captured", "bias_operand", "capture", "draws", "local_shape", "localise", "summed", "tensors"]
