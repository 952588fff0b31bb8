"""SwinIR: image restoration by transformers that attend within shifted windows; one plain module, sizes as arguments.

Liang et al., "SwinIR: Image Restoration Using Swin Transformer", ICCV workshops 2021; windows and relative positions as
in Liu et al., "Swin Transformer", ICCV 2021. Written from the papers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.errors import SupernetError
from weft.space import Value


def swinir(params: Mapping[str, Value]) -> SwinIR:
    """The network that a trial's values describe: ``scale``, ``embed``, ``groups``, ``depth`` (of each group),
    ``heads``, ``window``, ``ratio`` and ``anchored``, each with a small default.

    >>> sum(p.numel() for p in swinir({"embed": 12, "groups": 2, "heads": 2, "window": 4}).parameters())
    11096
    """
    groups, depth = int(params.get("groups", 2)), int(params.get("depth", 2))
    return SwinIR(
        int(params.get("scale", 2)),
        int(params.get("embed", 32)),
        (depth,) * groups,
        int(params.get("heads", 4)),
        int(params.get("window", 8)),
        float(params.get("ratio", 2.0)),
        anchored=bool(params.get("anchored", False)),
    )


class SwinIR(nn.Module):
    """Shallow features by a convolution, deep ones by groups of transformer layers, both added, then upsampled.

    Takes images (n, channels, height, width) with values around [0, 1], of any size that a window fits into, and gives
    them ``scale`` times as large. The paper's light network is ``SwinIR(scale, 60, (6, 6, 6, 6), 6)``, its large one
    ``SwinIR(scale, 180, (6,) * 6, 6)`` with another end. ``anchored`` adds the input, upsampled bicubically, to the
    output, which the paper does not for this task: the network then begins near the bicubic result.
    """

    def __init__(
        self,
        scale: int = 2,
        embed: int = 60,
        depths: Sequence[int] = (6, 6, 6, 6),
        heads: int = 6,
        window: int = 8,
        ratio: float = 2.0,
        channels: int = 3,
        anchored: bool = False,
    ) -> None:
        super().__init__()
        if min(scale, embed, heads, window, channels, len(depths), *depths) < 1 or ratio <= 0 or embed % heads:
            raise SupernetError(
                "SwinIR has sizes of 1 or more and an embed that its heads divide, not "
                f"scale={scale}, embed={embed}, depths={tuple(depths)}, heads={heads}, window={window}, ratio={ratio}"
            )
        self.scale, self.window, self.anchored = scale, window, anchored
        self.shallow = nn.Conv2d(channels, embed, 3, padding=1)
        self.groups = nn.ModuleList(Group(embed, depth, heads, window, ratio) for depth in depths)
        self.fuse = nn.Conv2d(embed, embed, 3, padding=1)
        self.up = nn.Sequential(nn.Conv2d(embed, channels * scale * scale, 3, padding=1), nn.PixelShuffle(scale))
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=0.02)
                nn.init.zeros_(part.bias)
        if anchored:
            nn.init.zeros_(self.up[0].weight)  # type: ignore[arg-type]
            nn.init.zeros_(self.up[0].bias)  # type: ignore[arg-type]

    def forward(self, image: Tensor) -> Tensor:
        height, width = image.shape[-2:]
        x = self._padded(image)
        mask = shift_mask(x.shape[-2], x.shape[-1], self.window, x.device)
        shallow = self.shallow(x)
        deep = shallow
        for group in self.groups:
            deep = group(deep, mask)
        out: Tensor = self.up(shallow + self.fuse(deep))
        out = out[..., : height * self.scale, : width * self.scale]
        if self.anchored:
            out = out + F.interpolate(image, scale_factor=self.scale, mode="bicubic")
        return out

    def _padded(self, image: Tensor) -> Tensor:
        """Mirrored at the right and at the bottom up to whole windows; the image alone, which needs no gradient."""
        height, width = image.shape[-2:]
        if min(height, width) < self.window:
            raise SupernetError(f"an image of {height} x {width} is smaller than a window of {self.window}")
        down, right = -height % self.window, -width % self.window
        return F.pad(image, (0, right, 0, down), mode="reflect") if down or right else image


class Group(nn.Module):
    """The paper's residual Swin transformer block: layers whose windows are in turn straight and shifted by half, a
    convolution, and the input added."""

    def __init__(self, embed: int, depth: int, heads: int, window: int, ratio: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(embed, heads, window, ratio, shifted=bool(i % 2)) for i in range(depth))
        self.conv = nn.Conv2d(embed, embed, 3, padding=1)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        tokens = x.permute(0, 2, 3, 1)
        for layer in self.layers:
            tokens = layer(tokens, mask)
        out: Tensor = x + self.conv(tokens.permute(0, 3, 1, 2))
        return out


class Layer(nn.Module):
    """``x + attention(norm(x))`` within windows, then ``x + mlp(norm(x))``; images have their channels last."""

    def __init__(self, embed: int, heads: int, window: int, ratio: float, shifted: bool) -> None:
        super().__init__()
        self.window, self.shift = window, window // 2 if shifted else 0
        self.norm1 = nn.LayerNorm(embed)
        self.attention = Attention(embed, heads, window)
        self.norm2 = nn.LayerNorm(embed)
        hidden = int(embed * ratio)
        self.mlp = nn.Sequential(nn.Linear(embed, hidden), nn.GELU(), nn.Dropout(0.0), nn.Linear(hidden, embed))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        n, height, width, embed = x.shape
        m, shift = self.window, self.shift if mask is not None else 0
        rows = self.norm1(x)
        if shift:
            rows = torch.roll(rows, (-shift, -shift), (1, 2))
        # (n, height, width) -> (n, windows down, m, windows across, m) -> (n, windows, m * m)
        rows = rows.reshape(n, height // m, m, width // m, m, embed).transpose(2, 3)
        rows = self.attention(rows.reshape(n, -1, m * m, embed), mask if shift else None)
        rows = rows.reshape(n, height // m, width // m, m, m, embed).transpose(2, 3).reshape(n, height, width, embed)
        if shift:
            rows = torch.roll(rows, (shift, shift), (1, 2))
        x = x + rows
        more: Tensor = self.mlp(self.norm2(x))
        return x + more


class Attention(nn.Module):
    """Self-attention within each window, with a learned bias for how two places lie to each other."""

    places: Tensor

    def __init__(self, embed: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(embed, 3 * embed)
        self.out = nn.Linear(embed, embed)
        self.bias = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        at = torch.arange(window)
        apart = at[:, None] - at[None, :] + window - 1
        grid = apart[:, None, :, None] * (2 * window - 1) + apart[None, :, None, :]
        self.register_buffer("places", grid.reshape(-1), persistent=False)
        nn.init.normal_(self.bias, std=0.02)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        n, windows, length, embed = x.shape
        qkv = self.qkv(x).reshape(n, windows, length, 3, self.heads, embed // self.heads)
        q, k, v = qkv.permute(3, 0, 1, 4, 2, 5).unbind(0)
        bias = self.bias[self.places].reshape(length, length, self.heads).permute(2, 0, 1)
        if mask is not None:
            bias = bias + mask
        scores = (q * (embed // self.heads) ** -0.5) @ k.transpose(-2, -1) + bias
        seen = scores.softmax(-1) @ v
        out: Tensor = self.out(seen.transpose(2, 3).reshape(n, windows, length, embed))
        return out


def shift_mask(height: int, width: int, window: int, device: torch.device) -> Tensor | None:
    """What is added to the scores of shifted windows, (windows, 1, places, places): -100 where two places were not
    neighbours before the image was rolled around. None where one window holds the image: then nothing is shifted."""
    if min(height, width) <= window:
        return None

    def region(length: int) -> Tensor:
        at = torch.arange(length, device=device)
        return (at >= length - window).long() + (at >= length - window // 2).long()

    regions = region(height)[:, None] * 3 + region(width)[None, :]
    regions = regions.reshape(height // window, window, width // window, window).transpose(1, 2)
    regions = regions.reshape(-1, window * window)
    return (regions[:, None, :] != regions[:, :, None]).float()[:, None] * -100.0
