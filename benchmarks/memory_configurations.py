"""What is measured: models of every family in several sizes, batches, optimizers, dtypes, with and without recomputing.

The ``tuned`` set was looked at while the estimator was written; the ``fresh`` one was measured once it was finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

DTYPES = ("float32", "bfloat16")
OPTIMIZERS = {"sgd": {"lr": 0.01, "momentum": 0.9}, "adamw": {"lr": 1e-4}}


@dataclass(frozen=True)
class Configuration:
    family: str
    size: dict[str, Any]
    batch: int
    optimizer: str
    dtype: str
    recompute: bool
    set: str

    @property
    def name(self) -> str:
        size = ",".join(f"{key}={value}" for key, value in self.size.items())
        again = "recompute" if self.recompute else "keep"
        return f"{self.family}[{size}] b{self.batch} {self.optimizer} {self.dtype} {again}"


def configurations(which: str) -> list[Configuration]:
    """Of a set, every combination at the first batch of a size, and half of them at each of the others."""
    rows = []
    every = list(product(OPTIMIZERS, DTYPES, (False, True)))
    halves = [[every[i] for i in places] for places in ((0, 3, 5, 6), (1, 2, 4, 7))]
    for turn, (family, size, batches) in enumerate(SETS[which]):
        for place, batch in enumerate(batches):
            # The fresh set takes half of the combinations everywhere, in turn.
            part = every if which == "tuned" and not place else halves[(place + turn) % 2]
            rows += [Configuration(family, size, batch, *combination, which) for combination in part]
    return rows


def gpt(layers: int, width: int, heads: int, length: int, vocabulary: int, dropout: float) -> dict[str, Any]:
    return {
        "layers": layers, "width": width, "heads": heads, "length": length, "vocabulary": vocabulary,
        "dropout": dropout,
    }  # fmt: skip


def hf(
    layers: int, width: int, heads: int, hidden: int, vocabulary: int, tokens: int, groups: int = 0
) -> dict[str, Any]:
    size = {
        "layers": layers, "width": width, "heads": heads, "hidden": hidden, "vocabulary": vocabulary, "tokens": tokens,
    }  # fmt: skip
    return size | ({"groups": groups} if groups else {})


def vit(layers: int, width: int, heads: int, image: int, patch: int, dropout: float) -> dict[str, Any]:
    return {"layers": layers, "width": width, "heads": heads, "image": image, "patch": patch, "dropout": dropout}


def swin(depths: tuple[int, ...], width: int, image: int, window: int) -> dict[str, Any]:
    return {"depths": depths, "width": width, "image": image, "window": window}


def swinir(groups: int, depth: int, width: int, image: int, window: int) -> dict[str, Any]:
    return {"groups": groups, "depth": depth, "width": width, "image": image, "window": window}


def resnet(depths: tuple[int, ...], width: int, side: int) -> dict[str, Any]:
    return {"depths": depths, "width": width, "side": side}


def mobilenet(depths: tuple[int, ...], width: int, kernel: int, side: int) -> dict[str, Any]:
    return {"depths": depths, "width": width, "kernel": kernel, "side": side}


def unet(width: int, depth: int, norm: str, side: int) -> dict[str, Any]:
    return {"width": width, "depth": depth, "norm": norm, "side": side}


def rnn(kind: str, layers: int, width: int, vocabulary: int, dropout: float, tokens: int) -> dict[str, Any]:
    return {
        "kind": kind, "layers": layers, "width": width, "vocabulary": vocabulary, "dropout": dropout, "tokens": tokens,
    }  # fmt: skip


def mlp(inputs: int, width: int, layers: int, dropout: float) -> dict[str, Any]:
    return {"inputs": inputs, "width": width, "layers": layers, "dropout": dropout}


TUNED: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("gpt", gpt(6, 512, 8, 512, 32000, 0.1), (8, 16)),
    ("gpt", gpt(12, 768, 12, 1024, 50257, 0.0), (4, 8)),
    ("gpt", gpt(4, 256, 4, 256, 1000, 0.1), (32, 96)),
    ("llama", hf(6, 512, 8, 1408, 32000, 512, 4), (8, 16)),
    ("llama", hf(8, 1024, 16, 2816, 16000, 1024, 16), (4,)),
    ("bert", hf(12, 768, 12, 3072, 30522, 128), (16, 64)),
    ("bert", hf(4, 512, 8, 2048, 30522, 384), (16,)),
    ("vit", vit(12, 384, 6, 224, 16, 0.1), (32, 64)),
    ("vit", vit(8, 768, 12, 160, 16, 0.0), (32,)),
    ("swin", swin((2, 2, 6, 2), 96, 224, 7), (16, 32)),
    ("swin", swin((2, 2, 2), 64, 128, 8), (64,)),
    ("swinir", swinir(4, 6, 180, 64, 8), (4, 8)),
    ("swinir", swinir(4, 4, 60, 48, 8), (16,)),
    ("resnet", resnet((3, 4, 6, 3), 64, 224), (16, 48)),
    ("resnet", resnet((2, 2, 2, 2), 32, 128), (64,)),
    ("mobilenet", mobilenet((2, 3, 3, 3), 32, 5, 224), (16, 32)),
    ("mobilenet", mobilenet((1, 2, 2), 48, 3, 160), (32,)),
    ("unet", unet(32, 4, "batch", 256), (4, 8)),
    ("unet", unet(64, 3, "group", 128), (8,)),
    ("rnn", rnn("lstm", 2, 1024, 20000, 0.2, 128), (32, 64)),
    ("rnn", rnn("gru", 3, 512, 10000, 0.0, 100), (64,)),
    ("rnn", rnn("bilstm", 2, 512, 10000, 0.0, 100), (48,)),
    ("mlp", mlp(784, 4096, 4, 0.1), (512, 8192)),
]

FRESH: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("gpt", gpt(10, 640, 10, 768, 40000, 0.1), (6, 11)),
    ("gpt", gpt(16, 384, 6, 320, 8000, 0.0), (24,)),
    ("llama", hf(10, 768, 12, 2048, 24000, 640, 6), (5, 9)),
    ("bert", hf(8, 640, 10, 2560, 28000, 256), (12, 28)),
    ("vit", vit(10, 512, 8, 192, 16, 0.1), (24, 72)),
    ("swin", swin((2, 4, 4, 2), 64, 224, 7), (12, 40)),
    ("swinir", swinir(3, 6, 120, 56, 8), (6,)),
    ("resnet", resnet((2, 3, 4, 2), 48, 192), (20, 36)),
    ("mobilenet", mobilenet((2, 2, 3), 40, 3, 192), (24, 50)),
    ("unet", unet(48, 3, "batch", 192), (6,)),
    ("unet", unet(40, 4, "group", 160), (10,)),
    ("rnn", rnn("lstm", 3, 768, 15000, 0.1, 90), (40,)),
    ("rnn", rnn("gru", 2, 1280, 12000, 0.2, 64), (56,)),
    ("mlp", mlp(3072, 3000, 6, 0.2), (1024,)),
]

SETS = {"tuned": TUNED, "fresh": FRESH}
