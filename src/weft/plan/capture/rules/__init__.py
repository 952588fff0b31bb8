"""Rules: what each family of operators computes over, and how a split of that cuts its tensors.

Each rule is a pure function of a call. That it tells the truth is tested by doing it: every operator of real models is
cut along every dimension that a rule offers, run in parts, and put together again.
"""

from weft.plan.capture.rules import along, elementwise, indexing, matmul, norm, spatial, view

__all__ = ["along", "elementwise", "indexing", "matmul", "norm", "spatial", "view"]
