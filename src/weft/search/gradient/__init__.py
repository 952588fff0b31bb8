"""Gradient search: methods that learn a mixture, methods that train by samples, and the run that uses them."""

from weft.search.gradient.api import GradientSearchConfig, GradientSearchResult, search_gradient
from weft.search.gradient.methods import GRADIENT_METHODS, GradientMethod, SampledMethod, make_gradient_method

__all__ = [
    "GRADIENT_METHODS",
    "GradientMethod",
    "GradientSearchConfig",
    "GradientSearchResult",
    "SampledMethod",
    "make_gradient_method",
    "search_gradient",
]
