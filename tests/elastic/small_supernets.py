"""Elastic supernets that are small enough to be enumerated, written as a user would write them."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

import weft
from weft import elastic
from weft.elastic import Pick


class Hidden(elastic.Module):
    """A residual block of two linear layers, whose inner size follows from the width."""

    def __init__(self, space: weft.Space, width: object, ratio: object) -> None:
        super().__init__()
        self.up = elastic.Linear(space, width, ratio * width)
        self.down = elastic.Linear(space, ratio * width, width)
        self.act = nn.GELU()

    def forward(self, x: Tensor, pick: Pick) -> Tensor:
        return x + self.down(self.act(self.up(x, pick)), pick)


class Flat(elastic.Module):
    """Images as vectors of the elastic width."""

    def __init__(self, space: weft.Space, inputs: int, width: object) -> None:
        super().__init__()
        self.linear = elastic.Linear(space, inputs, width)

    def forward(self, x: Tensor, pick: Pick) -> Tensor:
        return self.linear(x.flatten(1), pick)


def layered(blocks: int = 3, widths: tuple[int, ...] = (8, 16), ratios: tuple[float, ...] = (2, 3.5)) -> weft.Chain:
    """Width and depth shared by all blocks, a ratio for each."""
    space = weft.Space()
    width = space.integer("width", widths)
    depth = space.integer("depth", 1, blocks)
    chain = [weft.Elastic(space, "stem", partial(Flat, space, 64, width))]
    for i in range(blocks):
        ratio = space.categorical(f"ratio{i}", ratios, when=depth > i)
        chain.append(weft.Elastic(space, f"block{i}", partial(Hidden, space, width, ratio), when=depth > i))
    return weft.Chain(*chain, weft.Elastic(space, "head", partial(elastic.Linear, space, width, 10)))


def blended() -> weft.Chain:
    """Choice, optional, shared and elastic blocks in one chain."""
    space = weft.Space()
    width = space.integer("width", [4, 6])
    return weft.Chain(
        weft.Shared(partial(nn.Linear, 6, 6), "stem"),
        weft.Choice(space, "op", {"wide": partial(nn.Linear, 6, 6), "skip": nn.Identity, "tanh": nn.Tanh}),
        weft.Optional(space, "extra", partial(nn.Linear, 6, 6)),
        weft.Elastic(space, "in", partial(elastic.Linear, space, 6, width)),
        weft.Elastic(space, "out", partial(elastic.Linear, space, width, 3)),
    )
