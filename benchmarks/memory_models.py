"""The models whose memory is measured and estimated: small ones of torch.nn, and two families of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]
Loss = Callable[[Any, Batch], Tensor] | None


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=p, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(n, length, width))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0, causal: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout, causal)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Layer(width, heads, dropout, causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y))


class ViT(nn.Module):
    """Of torch's own encoder layers."""

    def __init__(self, layers: int, width: int, heads: int, image: int, patch: int, dropout: float) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(len(y), -1, -1), y], 1) + self.places
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y[:, 0]))


class Window(nn.Module):
    """A Swin layer: attention within (shifted) windows, with a learned bias for each relative place."""

    def __init__(self, width: int, heads: int, image: int, window: int, shift: int) -> None:
        super().__init__()
        self.window, self.shift, self.heads = window, shift, heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        places = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = places[:, :, None] - places[:, None, :] + window - 1
        self.register_buffer("relative", apart[0] * (2 * window - 1) + apart[1])
        mask = None
        if shift:
            zone = torch.zeros(1, image, image, 1)
            cuts = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
            for i, rows in enumerate(cuts):
                for j, columns in enumerate(cuts):
                    zone[:, rows, columns] = 3 * i + j
            zones = self.cut(zone).squeeze(-1)
            mask = (zones[:, None, :] != zones[:, :, None]).float() * -100.0
        self.register_buffer("mask", mask)

    def cut(self, x: Tensor) -> Tensor:
        n, h, w, c = x.shape
        s = self.window
        return x.view(n, h // s, s, w // s, s, c).transpose(2, 3).reshape(-1, s * s, c)

    def forward(self, x: Tensor) -> Tensor:
        n, h, w, c = x.shape
        s = self.window
        y = self.norm1(x)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        bias = self.table[self.relative.view(-1)].view(s * s, s * s, -1).permute(2, 0, 1).unsqueeze(0)
        if self.mask is not None:
            bias = (bias + self.mask.unsqueeze(1)).repeat(n, 1, 1, 1)
        y = self.attention(self.cut(y), bias)
        y = y.view(n, h // s, w // s, s, s, c).transpose(2, 3).reshape(n, h, w, c)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        x = x + y
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    def __init__(self, depths: tuple[int, ...], width: int, image: int, window: int) -> None:
        super().__init__()
        self.patches, rows, side = nn.Conv2d(3, width, 4, 4), [], image // 4
        for i, depth in enumerate(depths):
            size = width * 2**i
            rows += [Window(size, size // 32, side, window, window // 2 * (j % 2)) for j in range(depth)]
            if i + 1 < len(depths):
                rows.append(Merge(size))
                side //= 2
        self.blocks = nn.ModuleList(rows)
        last = width * 2 ** (len(depths) - 1)
        self.norm, self.head = nn.LayerNorm(last), nn.Linear(last, 1000)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patches(x).permute(0, 2, 3, 1)
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y).mean((1, 2)))


class Merge(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.less = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.less(self.norm(torch.cat(parts, -1)))


class SwinIR(nn.Module):
    """Super-resolution by 2: windows at one resolution, convolutions around them, pixels shuffled at the end."""

    def __init__(self, groups: int, depth: int, width: int, image: int, window: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.blocks = nn.ModuleList(Group(depth, width, image, window) for _ in range(groups))
        self.up = nn.Sequential(nn.Conv2d(width, 12, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = x.permute(0, 2, 3, 1)
        for block in self.blocks:
            y = block(y)
        return self.up(x + self.last(y.permute(0, 3, 1, 2)))


class Group(nn.Module):
    def __init__(self, depth: int, width: int, image: int, window: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Window(width, 6, image, window, window // 2 * (i % 2)) for i in range(depth)))
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.layers(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class Bottleneck(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int, source: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(source, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, outer, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip
        same = stride == 1 and source == outer
        short = nn.Sequential(nn.Conv2d(source, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
        self.short = nn.Identity() if same else short

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x), inplace=True)


class ResNet(nn.Module):
    def __init__(self, depths: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        rows, source = [], width
        for i, depth in enumerate(depths):
            for j in range(depth):
                rows.append(Bottleneck(width * 2**i, 4 * width * 2**i, 2 if i and not j else 1, source))
                source = 4 * width * 2**i
        self.blocks, self.head = nn.ModuleList(rows), nn.Linear(source, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Inverted(nn.Module):
    """MobileNet's block, depthwise in the middle, with a squeeze."""

    def __init__(self, source: int, outer: int, expand: int, kernel: int, stride: int) -> None:
        super().__init__()
        inner = source * expand
        self.body = nn.Sequential(
            nn.Conv2d(source, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.Hardswish(),
            nn.Conv2d(inner, inner, kernel, stride, kernel // 2, groups=inner, bias=False),
            nn.BatchNorm2d(inner), nn.Hardswish(),
        )  # fmt: skip
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(inner, inner // 4, 1), nn.ReLU(), nn.Conv2d(inner // 4, inner, 1),
            nn.Hardsigmoid(),
        )  # fmt: skip
        self.last = nn.Sequential(nn.Conv2d(inner, outer, 1, bias=False), nn.BatchNorm2d(outer))
        self.same = stride == 1 and source == outer

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y = self.last(y * self.squeeze(y))
        return x + y if self.same else y


class MobileNet(nn.Module):
    def __init__(self, depths: tuple[int, ...], width: int, kernel: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.Hardswish())
        rows, source = [], width
        for i, depth in enumerate(depths):
            for j in range(depth):
                rows.append(Inverted(source, width * (i + 1), 4, kernel, 1 if j else 2))
                source = width * (i + 1)
        self.blocks, self.head = nn.ModuleList(rows), nn.Linear(source, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Twice(nn.Sequential):
    def __init__(self, source: int, width: int, norm: str) -> None:
        norms = [nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(8, width) for _ in range(2)]
        act = nn.ReLU(inplace=True) if norm == "batch" else nn.SiLU()
        super().__init__(
            nn.Conv2d(source, width, 3, padding=1), norms[0], act, nn.Conv2d(width, width, 3, padding=1), norms[1], act
        )


class UNet(nn.Module):
    def __init__(self, width: int, depth: int, norm: str) -> None:
        super().__init__()
        sizes = [width * 2**i for i in range(depth + 1)]
        self.blocks = nn.ModuleList(
            [
                *(Twice(sizes[i - 1] if i else 3, size, norm) for i, size in enumerate(sizes)),
                *(Twice(2 * size, size, norm) for size in reversed(sizes[:-1])),
            ]
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * size, size, 2, 2) for size in reversed(sizes[:-1]))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        depth = len(self.up)
        for i in range(depth):
            kept.append(self.blocks[i](x))
            x = F.max_pool2d(kept[-1], 2)
        x = self.blocks[depth](x)
        for i, up in enumerate(self.up):
            x = self.blocks[depth + 1 + i](torch.cat([kept.pop(), up(x)], 1))
        return self.head(x)


class RNN(nn.Module):
    def __init__(self, kind: str, layers: int, width: int, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        cell = {"lstm": nn.LSTM, "gru": nn.GRU, "bilstm": nn.LSTM}[kind]
        two = kind == "bilstm"
        self.cell = cell(width, width, layers, batch_first=True, dropout=dropout, bidirectional=two)
        self.head = nn.Linear((1 + two) * width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(self.tokens(x))[0])


class MLP(nn.Sequential):
    def __init__(self, inputs: int, width: int, layers: int, dropout: float) -> None:
        row: list[nn.Module] = []
        for i in range(layers):
            row.append(
                nn.Sequential(
                    nn.Linear(width if i else inputs, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout)
                )
            )
        super().__init__(*row, nn.Linear(width, 1000))


def classes(outputs: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), batch["targets"].flatten())


def pixels(outputs: Tensor, batch: Batch) -> Tensor:
    return F.l1_loss(outputs, batch["targets"])


def build(family: str, size: dict[str, Any], batch: int) -> tuple[nn.Module, Batch, Loss]:
    """A model in training mode on the current default device, a batch of zeros for it, and its loss (None: the
    model's own)."""
    if family in ("llama", "bert"):
        return _of_transformers(family, size, batch)
    options = {key: value for key, value in size.items() if key not in ("tokens", "side")}
    images = {"vit": ViT, "swin": Swin, "resnet": ResNet, "mobilenet": MobileNet}
    if family in images:
        model: nn.Module = images[family](**options)
        side = size.get("side", size.get("image"))
        return model, {"x": torch.zeros(batch, 3, side, side), "targets": torch.zeros(batch, dtype=torch.long)}, classes
    if family in ("gpt", "rnn"):
        model = GPT(**options) if family == "gpt" else RNN(**options)
        words = torch.zeros(batch, size.get("tokens", size.get("length")), dtype=torch.long)
        return model, {"x": words, "targets": words.clone()}, classes
    if family == "swinir":
        x = torch.zeros(batch, 3, size["image"], size["image"])
        return SwinIR(**options), {"x": x, "targets": torch.zeros(batch, 3, 2 * x.shape[2], 2 * x.shape[3])}, pixels
    if family == "unet":
        x = torch.zeros(batch, 3, size["side"], size["side"])
        return UNet(**options), {"x": x, "targets": x.clone()}, pixels
    x = torch.zeros(batch, size["inputs"])
    return MLP(**options), {"x": x, "targets": torch.zeros(batch, dtype=torch.long)}, classes


def _of_transformers(family: str, size: dict[str, Any], batch: int) -> tuple[nn.Module, Batch, Loss]:
    import transformers

    words = torch.zeros(batch, size["tokens"], dtype=torch.long)
    common = {
        "vocab_size": size["vocabulary"], "hidden_size": size["width"], "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"], "intermediate_size": size["hidden"], "attn_implementation": "sdpa",
    }  # fmt: skip
    if family == "llama":
        config = transformers.LlamaConfig(**common, num_key_value_heads=size["groups"], use_cache=False)
        model: nn.Module = transformers.LlamaForCausalLM(config)
    else:
        model = transformers.BertForMaskedLM(transformers.BertConfig(**common, max_position_embeddings=512))
    return model.train(), {"input_ids": words, "labels": words.clone()}, None
