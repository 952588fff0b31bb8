"""Trials of one shape as one batched training, against the same trials one after another in the same process.

    python benchmarks/fusion.py [--quick] [--device cuda] [--json FILE]

Each model trains for some steps on random data with learning rate, weight decay, dropout and seed of each trial its own
(`dropout` says whether they drop at all; every lane then draws what it draws alone, with as many draws as lanes).
`alone_s` is the sum over the trials, `fused_s` the one training, both after a warm-up, with the evaluation at the end;
`ratio` is alone / fused. `loss_difference` is the largest between a step's loss alone and fused, relative.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from machine import read_rows, write
from torch import Tensor, nn

from weft.data import Data, Tensors
from weft.tune.fusion.compatibility import fusion_key
from weft.tune.fusion.trainer import train_fused
from weft.tune.recipe import Recipe, TrialConfig, trial_config
from weft.tune.training.trainer import train
from weft.utils.rng import generator

CLASSES, IMAGE, CONTEXT, TOKENS = 10, 8, 16, 64
LANES = (2, 8, 16, 32)


def mlp(params: Mapping[str, Any]) -> nn.Module:
    drop = nn.Dropout(params.get("dropout", 0.0))
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * IMAGE**2, 64), nn.ReLU(), drop, nn.Linear(64, CLASSES))


def conv(params: Mapping[str, Any]) -> nn.Module:
    def block(a: int, b: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]

    body = [*block(3, 8, 1), *block(8, 16, 2), *block(16, 32, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*body, nn.Dropout(params.get("dropout", 0.0)), nn.Linear(32, CLASSES))


class Transformer(nn.Module):
    """Two blocks of 32 channels over tokens."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, 32), nn.Parameter(torch.zeros(CONTEXT, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 128, dropout, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.tokens(tokens) + self.places))
        return out


def transformer(params: Mapping[str, Any]) -> nn.Module:
    return Transformer(params.get("dropout", 0.0))


def data(name: str) -> Data:
    draw = generator(0, "fusion", name)
    count = 512
    if name == "transformer":
        tokens = torch.from_numpy(draw.integers(0, TOKENS, (count, CONTEXT + 1)))
        source = Tensors(tokens=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous())
    else:
        images = torch.from_numpy(draw.standard_normal((count, 3, IMAGE, IMAGE), dtype="float32"))
        source = Tensors(image=images, label=torch.from_numpy(draw.integers(0, CLASSES, count)))
    return Data(name, source, source)


MODELS = {"mlp": mlp, "conv": conv, "transformer": transformer}


def settings(name: str, lanes: int, steps: int, dropout: bool) -> list[TrialConfig]:
    recipe = Recipe(model=MODELS[name], data=data(name), steps=steps, batch_size=16, optimizer="adamw")
    found = []
    for lane in range(lanes):
        own: dict[str, Any] = {"lr": 1e-3 * (1 + lane / lanes), "weight_decay": 0.01 * lane, "seed": lane}
        found.append(trial_config(recipe, {**own, "dropout": 0.1 + 0.3 * lane / lanes} if dropout else own))
    return found


def alone(chosen: list[TrialConfig], device: str) -> tuple[float, list[tuple[float, ...]]]:
    began, losses = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        for lane, one in enumerate(chosen):
            place = Path(folder, str(lane))
            losses.append(train(one, None, device=device, directory=place, report=lambda *_: False).losses)
    return time.perf_counter() - began, losses


def fused(chosen: list[TrialConfig], device: str) -> tuple[float, list[tuple[float, ...]]]:
    began, found = time.perf_counter(), dict[int, Any]()
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder, str(lane)) for lane in range(len(chosen))]
        train_fused(chosen, None, device=device, directories=places, report=lambda *_: False, ended=found.__setitem__)
    return time.perf_counter() - began, [found[lane].losses for lane in range(len(chosen))]


def measure(name: str, lanes: int, steps: int, dropout: bool, device: str) -> dict[str, Any]:
    chosen = settings(name, lanes, steps, dropout)
    if fusion_key(chosen[0]) is None:
        return {"model": name, "lanes": lanes, "refused": True}
    warm = settings(name, lanes, 3, dropout)
    alone(warm[:1], device)
    fused(warm, device)
    one, separate = alone(chosen, device)
    all_, together = fused(chosen, device)
    worst = max(abs(a - b) / abs(a) for x, y in zip(separate, together, strict=True) for a, b in zip(x, y, strict=True))
    return {
        "model": name,
        "lanes": lanes,
        "dropout": dropout,
        "steps": steps,
        "alone_s": round(one, 3),
        "fused_s": round(all_, 3),
        "ratio": round(one / all_, 3),
        "loss_difference": worst,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for row in read_rows(args.json) if row.get("device") != args.device]
    for name in MODELS:
        for dropout in (False, True):
            for lanes in (2, 8) if args.quick else LANES:
                steps = 10 if args.quick else 40 if args.device == "cpu" else 200
                row = {"device": args.device, **measure(name, lanes, steps, dropout, args.device)}
                rows.append(row)
                print(row, flush=True)
                write(args.json, rows=rows)


if __name__ == "__main__":
    main()
