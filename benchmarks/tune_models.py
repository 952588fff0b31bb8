"""Candidates for studies: transformers, convolutional nets with and without batch norms and MLPs, small and large, all
of one task, so that one study can hold them all; and a language model with its text.

`build(params)` and `pictures` make a recipe (`recipe()`), whose space is `space()`; `candidates(64)` is a mixed list
that is the same every time, to be enqueued.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from weft.data import Data, Tensors, text
from weft.space import Space, Value
from weft.tune.recipe import Recipe
from weft.utils.rng import generator

CLASSES, SIDE, PATCH = 10, 32, 4
WIDTHS = (32, 64, 128, 256, 512, 768, 1024)
DEPTHS = (1, 2, 4, 6, 8, 12, 16)


def pictures(count: int = 4096, held: int = 512) -> Data:
    """Synthetic pictures of 3 x 32 x 32 in ten classes: waves of a class's own frequency and colour, in much noise."""
    drawn = generator(0, "pictures")
    label = drawn.integers(0, CLASSES, count + held)
    waves, colours = drawn.uniform(0.5, 4.0, (CLASSES, 2)), drawn.normal(size=(CLASSES, 3))
    phase = drawn.uniform(0, 6.3, count + held)
    at = torch.linspace(0, 6.3, SIDE)
    where = torch.from_numpy(waves[label]).float()
    grid = where[:, :1, None] * at[None, :, None] + where[:, 1:, None] * at[None, None, :]
    wave = torch.sin(grid + torch.from_numpy(phase).float()[:, None, None])
    image = wave[:, None] * torch.from_numpy(colours[label]).float()[:, :, None, None]
    image = image + torch.from_numpy(drawn.normal(size=tuple(image.shape)).astype("float32"))
    label = torch.from_numpy(label)
    train, validation = (Tensors(image=image[p], label=label[p]) for p in (slice(count), slice(count, None)))
    return Data("pictures", train, validation, None, {"shape": (3, SIDE, SIDE), "classes": CLASSES})


def build(params: Mapping[str, Value]) -> nn.Module:
    """The candidate that `family`, `width` and `depth` name."""
    width, depth = int(params["width"]), int(params["depth"])
    return FAMILIES[str(params["family"])](width, depth)


def mlp(width: int, depth: int) -> nn.Module:
    sizes = [3 * SIDE * SIDE, *[width] * depth]
    rows = [nn.Sequential(nn.Linear(one, two), nn.GELU(), nn.Dropout(0.0)) for one, two in pairwise(sizes)]
    return nn.Sequential(nn.Flatten(), *rows, nn.Linear(width, CLASSES))


class Conv(nn.Module):
    """Residual convolutions at 16 x 16 and 8 x 8."""

    def __init__(self, width: int, depth: int, norms: bool) -> None:
        super().__init__()
        halves = (depth - depth // 2, depth // 2)
        self.stem = nn.Conv2d(3, width, 3, 2, 1)
        self.first = nn.ModuleList(_convolved(width, norms) for _ in range(halves[0]))
        self.down = nn.Conv2d(width, width, 3, 2, 1)
        self.second = nn.ModuleList(_convolved(width, norms) for _ in range(halves[1]))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for part in self.first:
            x = x + part(x)
        x = self.down(x)
        for part in self.second:
            x = x + part(x)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def _convolved(width: int, norms: bool) -> nn.Module:
    norm = nn.BatchNorm2d(width) if norms else nn.GroupNorm(min(8, width), width)
    return nn.Sequential(norm, nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.Dropout(0.0))


class Block(nn.Module):
    """A transformer's layer, with heads of 32."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = max(1, width // 32), causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.0), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = (
            part.reshape(n, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(seen.transpose(1, 2).reshape(n, length, width))
        more: Tensor = self.mlp(self.norm2(x))
        return x + more


class Transformer(nn.Module):
    """A picture read as a row of 64 patches, as GPT reads words; it answers after the last."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, PATCH)
        self.places = nn.Parameter(torch.zeros((SIDE // PATCH) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, causal=True) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x[:, -1]))
        return out


FAMILIES = {
    "mlp": mlp,
    "conv": lambda width, depth: Conv(width, depth, norms=False),
    "conv-norm": lambda width, depth: Conv(width, depth, norms=True),
    "transformer": Transformer,
}


class Language(nn.Module):
    """A small GPT over bytes: `width` and `depth` of the trial, 64 bytes at a time."""

    def __init__(self, params: Mapping[str, Value]) -> None:
        super().__init__()
        width = int(params["width"])
        self.tokens, self.places = nn.Embedding(256, width), nn.Parameter(torch.zeros(64, width))
        self.blocks = nn.ModuleList(Block(width, causal=True) for _ in range(int(params["depth"])))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def words() -> Data:
    """Bytes of Python's own help."""
    return text(64, tokens="bytes")


def recipe(**given: Any) -> Recipe:
    """The recipe of the mixed study; fields can be given."""
    fields: dict[str, Any] = {
        "model": build,
        "data": pictures,
        "metrics": {"accuracy": weft.accuracy},
        "objectives": ("accuracy",),
        "steps": 200,
        "batch_size": 128,
        "optimizer": "adamw",
        "lr_schedule": "cosine",
        "precision": "bf16",
    }
    return Recipe(**{**fields, **given})


def space() -> Space:
    """What the candidates are picked from."""
    found = Space()
    found.categorical("family", list(FAMILIES))
    found.integer("width", WIDTHS)
    found.integer("depth", DEPTHS)
    found.integer("batch_size", [32, 64, 128, 256, 512, 1024, 2048])
    found.integer("steps", 1, 10_000)
    found.real("lr", 1e-4, 1e-2, log=True)
    found.real("weight_decay", 1e-4, 1e-1, log=True)
    return found


SMALL = {"mlp": (128, 2), "conv": (32, 2), "transformer": (64, 2)}
"""Width and depth of the shapes that come again and again: these can be fused."""
STEPS = (600, 200, 30, 8)
"""Of a small, a medium, a large and a huge candidate, so that each takes about as long alone."""


def candidates(
    count: int = 64, scale: float = 1.0, tiny: bool = False, seed: int = 0, huge: bool = False
) -> list[dict[str, Value]]:
    """A mixed list, the same for equal arguments: five eighths small, in three shapes that differ only in learning rate
    and weight decay; a quarter of medium size; an eighth large, which take 10 to 23 GiB of a GPU, or 43 to 77 if they
    are ``huge``. ``scale`` is that of their steps; with ``tiny`` the medium and large ones are no match for a GPU, but
    a CPU can train them."""
    found: list[dict[str, Value]] = []
    for number in range(count):
        drawn = generator(seed, "candidate", number)
        kind = number % 8
        if kind < 5:
            family = _pick(drawn, tuple(SMALL))
            (width, depth), batch, steps = SMALL[family], 128, STEPS[0]
        elif kind < 7:
            family = _pick(drawn, tuple(FAMILIES))
            width, depth, batch = _pick(drawn, (128, 256)), _pick(drawn, (4, 6)), _pick(drawn, (128, 256))
            steps = STEPS[1]
        else:
            family = _pick(drawn, ("transformer", "conv"))
            widths, depths, batch, steps = ((512, 768), (8, 12), 1024, STEPS[2])
            if huge:
                widths, depths, batch, steps = ((768, 1024), (12, 16), 2048, STEPS[3])
            width, depth = _pick(drawn, widths), _pick(drawn, depths)
        if tiny and kind >= 5:
            width, depth, batch = width // 8, depth // 4, 64
        found.append(
            {
                "family": family,
                "width": _nearest(width, WIDTHS),
                "depth": _nearest(depth, DEPTHS),
                "batch_size": batch,
                "steps": max(1, round(steps * scale)),
                "lr": float(10 ** drawn.uniform(-4, -2)),
                "weight_decay": float(10 ** drawn.uniform(-4, -1)),
            }
        )
    return found


def fusable(candidate: Mapping[str, Value]) -> bool:
    """Whether it is one of the shapes that come again and again."""
    return SMALL.get(str(candidate["family"])) == (candidate["width"], candidate["depth"])


def various(count: int = 150, largest: int = 1024) -> list[dict[str, Value]]:
    """Candidates of all sizes up to this width, three steps each."""
    found: list[dict[str, Value]] = []
    for number in range(count):
        drawn = generator(1, "various", number)
        found.append(
            {
                "family": _pick(drawn, tuple(FAMILIES)),
                "width": _pick(drawn, tuple(width for width in WIDTHS if width <= largest)),
                "depth": _pick(drawn, DEPTHS),
                "batch_size": _pick(drawn, (32, 128, 512, 1024, 2048)),
                "steps": 3,
                "lr": 1e-3,
                "weight_decay": 1e-3,
            }
        )
    return found


def _nearest(value: int, options: tuple[int, ...]) -> int:
    return min(options, key=lambda one: abs(one - value))


def _pick(drawn: Any, options: tuple[Any, ...]) -> Any:
    return options[int(drawn.integers(len(options)))]
