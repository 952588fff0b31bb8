"""What holds the space: chains of blocks, their layers, and the plain module that comes out."""

from weft.supernet.block import Block, Choice, Elastic, Optional, Shared
from weft.supernet.chain import Chain, Factory, initialise
from weft.supernet.export import export
from weft.supernet.extract import extract
from weft.supernet.layer import Carry, Layer, Unbuilt, as_carry, build_layer, failure, run_layer, side_inputs
from weft.supernet.tie import Tie

__all__ = [
    "Block",
    "Carry",
    "Chain",
    "Choice",
    "Elastic",
    "Factory",
    "Layer",
    "Optional",
    "Shared",
    "Tie",
    "Unbuilt",
    "as_carry",
    "build_layer",
    "export",
    "extract",
    "failure",
    "initialise",
    "run_layer",
    "side_inputs",
]
