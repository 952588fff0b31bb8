"""Gradient search: methods that learn a mixture, methods that train by samples, and the run that uses them."""

from weft.search.gradient.entry import Found, gradient_search
from weft.search.gradient.method import (
    GRADIENT_METHODS,
    GradientMethod,
    Learner,
    SampledMethod,
    make_gradient_method,
)

__all__ = [
    "GRADIENT_METHODS",
    "Found",
    "GradientMethod",
    "Learner",
    "SampledMethod",
    "gradient_search",
    "make_gradient_method",
]
