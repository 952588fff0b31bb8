"""Elastic layers: one weight that holds every size of a layer, used by a slice (a subnet) or by its expectation (a
mixture)."""

from weft.elastic.attention import Attention, Rotary
from weft.elastic.conv import Conv2d, Patches, SqueezeExcite
from weft.elastic.linear import Grid, Linear
from weft.elastic.mixture import Mixture, Pick
from weft.elastic.module import Leaf, Module, call
from weft.elastic.norm import BatchNorm2d, LayerNorm, RMSNorm
from weft.elastic.sizes import Condition, Dim, Sizes
from weft.elastic.switch import Sequential, Switch, Zero
from weft.elastic.transformer import MLP, Embedding, Head, PatchEmbedding, TokenEmbedding, TransformerBlock

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
]
