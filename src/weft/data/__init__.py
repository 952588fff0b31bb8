"""Training data: sources of samples, loaders of batches, and data sets from Python packages or from disk."""

from weft.data.augment import Augment, Compose, Draws, Normalise, ShiftFlip
from weft.data.dataset import Data, split
from weft.data.loader import Loader, MicroBatches
from weft.data.open import digits, load, open_data, text
from weft.data.source import Batch, Source, Subset, Tensors, Text
from weft.data.torch_adapters import IterableLoader, adapt, as_data

__all__ = [
    "Augment",
    "Batch",
    "Compose",
    "Data",
    "Draws",
    "IterableLoader",
    "Loader",
    "MicroBatches",
    "Normalise",
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
    "text",
]
