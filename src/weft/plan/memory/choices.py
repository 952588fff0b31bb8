"""What cuDNN does with a convolution, as decision trees that were fitted to what it did on a device.

cuDNN keeps its rules to itself, but follows them: of thousands of random convolutions, the kernels and the workspaces
were recorded (`benchmarks/convolutions.py`, which also writes the file that is read here). A tree asks for one
property of a convolution after the other, as `Shape.properties` names them, and ends with a kind of kernel, or with
the number of partial sums that a gradient of weights is cut into.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

PASSES = ("forward", "images", "weights")
"""The three convolutions of a training step: the forward, the gradient of the images, that of the weights."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A convolution; ``seen`` and ``made`` are the pixels of an image and of a result, ``taps`` those of a filter, and
    ``steps`` the pixels that a stride goes over."""

    samples: int
    channels: int
    seen: int
    filters: int
    made: int
    taps: int
    steps: int
    element: int
    """Bytes of a number."""

    def properties(self) -> dict[str, int]:
        """What a tree may ask for."""
        n, c, o = self.samples, self.channels, self.filters
        return {
            "samples": n, "channels": c, "filters": o, "seen": self.seen, "made": self.made, "taps": self.taps,
            "steps": self.steps, "rows": n * self.made, "columns": c * self.taps, "weights": o * c * self.taps,
            "image": n * c * self.seen, "result": n * o * self.made, "work": n * self.made * o * c * self.taps,
            "channels % 8": c % 8, "channels % 32": c % 32, "filters % 8": o % 8, "filters % 32": o % 32,
            "narrow": min(c, o), "wide": max(c, o), "tiles": -(-o // 128) * -(-c * self.taps // 128),
        }  # fmt: skip


def kind(shape: Shape, which: str) -> str:
    """The kind of kernel of one of the `PASSES`, as `convolutions.workspace` knows them.

    >>> kind(Shape(64, 32, 1024, 32, 1024, 9, 1, 4), "weights")
    'fourier'
    """
    return str(_leaf(_trees()["kinds"][which][str(shape.element)], shape))


def pieces(shape: Shape) -> float:
    """How many partial sums, of the size of the weights in float32, a gradient of weights takes."""
    return float(_leaf(_trees()["pieces"][str(shape.element)], shape))


def _leaf(tree: Any, shape: Shape) -> Any:
    known = shape.properties()
    while isinstance(tree, list):
        name, limit, below, above = tree
        tree = below if known[name] <= limit else above
    return tree


@cache
def _trees() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files(__package__).joinpath("choices.json").read_text())
    return found
