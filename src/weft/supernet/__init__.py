"""What holds the space: chains of blocks, their layers, and the plain module that comes out."""

from weft.supernet.block import Block, Choice, Optional, Shared
from weft.supernet.chain import Chain, Factory, as_carry, initialise
from weft.supernet.export import export
from weft.supernet.extract import extract
from weft.supernet.layer import Carry, Layer, Unbuilt, build_layer, side_inputs

__all__ = [
    "Block",
    "Carry",
    "Chain",
    "Choice",
    "Factory",
    "Layer",
    "Optional",
    "Shared",
    "Unbuilt",
    "as_carry",
    "build_layer",
    "export",
    "extract",
    "initialise",
    "side_inputs",
]
