"""Elastic layers: one weight that holds every size of a layer, used by a slice (a subnet) or by its expectation (a
mixture)."""

from weft.supernet.elastic.leaf import Leaf, Module, call
from weft.supernet.elastic.linear import Linear
from weft.supernet.elastic.mixture import Mixture, Pick
from weft.supernet.elastic.sizes import Condition, Dim, Sizes

__all__ = ["Condition", "Dim", "Leaf", "Linear", "Mixture", "Module", "Pick", "Sizes", "call"]
