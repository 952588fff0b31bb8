"""What a supernet learns from: sources of samples, loaders of batches, and data sets that are embedded or on disk."""

from weft.data.augment import Augment, Compose, Draws, Normalise, ShiftFlip
from weft.data.builtin import digits, text
from weft.data.dataset import Data, split
from weft.data.loader import Loader
from weft.data.open import load, open_data
from weft.data.photographs import super_resolution
from weft.data.source import Batch, Promise, Source, Subset, Tensors, Text
from weft.data.torch_adapters import IterableLoader, adapt, as_data

__all__ = [
    "Augment",
    "Batch",
    "Compose",
    "Data",
    "Draws",
    "IterableLoader",
    "Loader",
    "Normalise",
    "Promise",
    "ShiftFlip",
    "Source",
    "Subset",
    "Tensors",
    "Text",
    "adapt",
    "as_data",
    "digits",
    "load",
    "open_data",
    "split",
    "super_resolution",
    "text",
]
