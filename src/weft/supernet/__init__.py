"""The supernet: chains of blocks, their layers, and extraction and export of subnets as plain modules."""

from weft.supernet.blocks import Choice, Elastic, Optional, Shared
from weft.supernet.chain import Chain, Factory, build_on_meta, initialise
from weft.supernet.export import export
from weft.supernet.extract import extract
from weft.supernet.layer import (
    Activations,
    Layer,
    LazyLayer,
    as_activations,
    extra_inputs,
    failure,
    run_layer,
)
from weft.supernet.tied_weights import Tie

__all__ = [
    "Activations",
    "Chain",
    "Choice",
    "Elastic",
    "Factory",
    "Layer",
    "LazyLayer",
    "Optional",
    "Shared",
    "Tie",
    "as_activations",
    "build_on_meta",
    "export",
    "extra_inputs",
    "extract",
    "failure",
    "initialise",
    "run_layer",
]
