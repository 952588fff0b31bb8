"""NASPipe's NLP spaces as supernets with weights: 48 blocks, each with 23 to 96 candidates of width d = 1024; and a
wide one of 12 blocks, d = 4096, whose layers take long to copy and little to launch.

Candidates, with their parameters in units of d * d: convolutions over 1, 3, 5 tokens (1, 3, 5), separable ones over 3
to 11 (1 each, and a little), lightweight ones over 3, 5, 7, 15 with 1, 4, 16 heads (next to none), attention with 4, 8,
16 heads (4 each), a gated linear unit (2); in the second half of the chain also attention with 8 heads in place of the
cross-attention of a decoder (4). That is 28 d * d in the first 24 blocks and 32 in the others; the larger spaces have
every candidate two to four times. Each adds to what came in, after a norm without weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.space import Space
from weft.supernet import Chain, Choice, initialise


class Size(NamedTuple):
    copies: int
    d: int = 1024
    blocks: int = 48

    @property
    def parameters(self) -> int:
        """But for those that are next to none."""
        return self.copies * self.blocks // 2 * (28 + 32) * self.d**2


SPACES = {"NLP.c3": Size(1), "NLP.c2": Size(2), "NLP.c1": Size(3), "NLP.c0": Size(4), "wide": Size(1, 4096, 12)}


def _filled(*shape: int, scale: float) -> nn.Parameter:
    """Weights that cost a copy: to draw billions of numbers would take longer than the rest."""
    return nn.Parameter(_drawn(torch.Size(shape).numel(), scale).view(shape).clone())


@cache
def _drawn(count: int, scale: float) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0)) * scale


class Candidate(nn.Module):
    """x + f(norm(x)) on (sentences, tokens, d)."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * self.change(F.layer_norm(x, x.shape[-1:]))

    def change(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Convolution(Candidate):
    def __init__(self, d: int, size: int) -> None:
        super().__init__()
        self.weight = _filled(size * d, d, scale=(size * d) ** -0.5)
        self.size = size

    def change(self, x: Tensor) -> Tensor:
        around = F.pad(x, (0, 0, self.size // 2, self.size // 2))
        windows = torch.cat([around[:, k : k + x.shape[1]] for k in range(self.size)], -1)
        return windows @ self.weight


class Separable(Candidate):
    def __init__(self, d: int, size: int) -> None:
        super().__init__()
        self.depth = _filled(size, d, scale=size**-0.5)
        self.point = _filled(d, d, scale=d**-0.5)

    def change(self, x: Tensor) -> Tensor:
        return _over_tokens(x, self.depth) @ self.point


class Lightweight(Candidate):
    def __init__(self, d: int, size: int, heads: int) -> None:
        super().__init__()
        self.weight = _filled(size, heads, scale=1.0)

    def change(self, x: Tensor) -> Tensor:
        shares = self.weight.softmax(0)
        size, heads = shares.shape
        return _over_tokens(x, shares.unsqueeze(-1).expand(size, heads, x.shape[-1] // heads).reshape(size, -1))


class Attention(Candidate):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.inward = _filled(d, 3 * d, scale=d**-0.5)
        self.out = _filled(d, d, scale=d**-0.5)
        self.heads = heads

    def change(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in (x @ self.inward).chunk(3, -1))
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(x.shape) @ self.out


class Gated(Candidate):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = _filled(d, 2 * d, scale=d**-0.5)

    def change(self, x: Tensor) -> Tensor:
        return F.glu(x @ self.weight, -1)


def _over_tokens(x: Tensor, weight: Tensor) -> Tensor:
    """A convolution over tokens of every feature by itself, with weights of (size, d)."""
    kernel = weight.t().unsqueeze(1)
    return F.conv1d(x.transpose(1, 2), kernel, padding=weight.shape[0] // 2, groups=len(kernel)).transpose(1, 2)


def candidates(d: int, decoder: bool, copies: int) -> dict[str, Callable[[], nn.Module]]:
    one: dict[str, Callable[[], nn.Module]] = {}
    one |= {f"conv{k}": partial(Convolution, d, k) for k in (1, 3, 5)}
    one |= {f"separable{k}": partial(Separable, d, k) for k in (3, 5, 7, 9, 11)}
    one |= {f"light{k}x{h}": partial(Lightweight, d, k, h) for k in (3, 5, 7, 15) for h in (1, 4, 16)}
    one |= {f"attention{h}": partial(Attention, d, h) for h in (4, 8, 16)}
    one |= {"gated": partial(Gated, d)}
    if decoder:
        one["cross8"] = partial(Attention, d, 8)
    return {f"{name}_{copy}": make for copy in range(copies) for name, make in one.items()}


def build(size: Size) -> Chain:
    """The supernet of a space, on the host."""
    space = Space()
    copies, d, blocks = size
    return initialise(
        Chain(
            *[
                Choice(space, f"block{k}", candidates(d, 2 * k >= blocks, copies), consistency="exact")
                for k in range(blocks)
            ]
        )
    )
