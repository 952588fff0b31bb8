"""Rotary position embedding: queries and keys turned by an angle that grows with their place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.errors import SupernetError
from weft.supernet.elastic.leaf import Module
from weft.supernet.elastic.mixture import Pick


class Rotary(Module):
    """Turns the pairs of features (i, i + d/2) of heads of d features, as Llama does; ``base`` sets the angles.

    ``frequencies`` are the angles from one place to the next, d/2 of them, if not those of the base; ``gain`` is a
    factor on the result, as some ways to stretch a context want it.
    """

    frequencies: Tensor

    def __init__(
        self, dim: int, base: float = 10_000.0, frequencies: Sequence[float] | None = None, gain: float = 1.0
    ) -> None:
        super().__init__()
        if dim < 2 or dim % 2 or (frequencies is not None and len(frequencies) != dim // 2):
            number = "" if frequencies is None else f" and {len(frequencies)} frequencies"
            raise SupernetError(f"rotary embedding turns pairs of features: an even number of them, not {dim}{number}")
        self.dim = dim
        self._base, self._gain = base, gain
        self._given = None if frequencies is None else tuple(frequencies)
        self.register_buffer("frequencies", torch.empty(dim // 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fills in the frequencies, which are no parameters, after a build on the meta device."""
        if self._given is not None:
            values = torch.tensor(self._given, device="cpu")
        else:
            values = 1.0 / self._base ** (torch.arange(0, self.dim, 2, device="cpu").float() / self.dim)
        if not self.frequencies.is_meta:
            self.frequencies.copy_(values)

    def forward(self, q: Tensor, k: Tensor, pick: Pick) -> tuple[Tensor, Tensor]:
        angles = places(q[0, 0, :, 0])[:, None].to(torch.float32) * self.frequencies
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin()
        if self._gain != 1.0:
            cos, sin = cos * self._gain, sin * self._gain
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        return q * cos + _half_turn(q) * sin, k * cos + _half_turn(k) * sin


def places(row: Tensor) -> Tensor:
    """0, 1, 2, ... for the entries of a vector; ``torch.arange`` of its length could not be traced."""
    return torch.ones_like(row, dtype=torch.int64).cumsum(0) - 1


def _half_turn(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)
