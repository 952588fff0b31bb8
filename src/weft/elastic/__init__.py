"""Elastic layers: one weight that holds every size of a layer, used by a slice (a subnet) or by its expectation (a
mixture)."""

from weft.callable import make_callable
from weft.supernet.elastic.attention import Attention
from weft.supernet.elastic.batchnorm import BatchNorm2d
from weft.supernet.elastic.conv import Conv2d
from weft.supernet.elastic.embedding import Embedding
from weft.supernet.elastic.ends import Head, PatchEmbedding, TokenEmbedding
from weft.supernet.elastic.excite import SqueezeExcite
from weft.supernet.elastic.grid import Grid
from weft.supernet.elastic.leaf import Leaf, Module, call
from weft.supernet.elastic.linear import Linear
from weft.supernet.elastic.mixture import Mixture, Pick
from weft.supernet.elastic.mlp import MLP
from weft.supernet.elastic.norm import LayerNorm, RMSNorm
from weft.supernet.elastic.patches import Patches
from weft.supernet.elastic.pretrained import elastic
from weft.supernet.elastic.rotary import Rotary
from weft.supernet.elastic.sizes import Condition, Dim, Sizes
from weft.supernet.elastic.switch import Sequential, Switch, Zero
from weft.supernet.elastic.transformer import TransformerBlock

__all__ = [
    "MLP",
    "Attention",
    "BatchNorm2d",
    "Condition",
    "Conv2d",
    "Dim",
    "Embedding",
    "Grid",
    "Head",
    "LayerNorm",
    "Leaf",
    "Linear",
    "Mixture",
    "Module",
    "PatchEmbedding",
    "Patches",
    "Pick",
    "RMSNorm",
    "Rotary",
    "Sequential",
    "Sizes",
    "SqueezeExcite",
    "Switch",
    "TokenEmbedding",
    "TransformerBlock",
    "Zero",
    "call",
    "elastic",
]

make_callable(__name__, elastic)
