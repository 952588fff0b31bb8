"""The networks and the data of the cases. Trials and stages import them by name, so this file keeps its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import weft
from benchmarks.golden.adapter import first


def digits() -> Any:
    return weft.data.digits()


def digits_mlp() -> Any:
    return weft.zoo.digits_mlp()


def digits_conv() -> Any:
    return weft.zoo.digits_conv()


def small_gpt() -> Any:
    return weft.zoo.language_model(17, 8, width=16, layers=2, heads=2, dropout=0.1)


def text_data() -> Any:
    tokens = torch.randint(0, 17, (600,), generator=torch.Generator().manual_seed(0))
    source = first("weft.data:Text")(tokens, 8)
    return weft.Data("golden", source, source)


def elastic() -> Any:
    return weft.zoo.vit_test()


def elastic_gpt() -> Any:
    return weft.zoo.gpt_test(17, 8)


NETS = {
    "mlp": (digits_mlp, digits),
    "conv": (digits_conv, digits),
    "gpt": (small_gpt, text_data),
    "elastic": (elastic, digits),
    "elastic-gpt": (elastic_gpt, text_data),
}


def trial_mlp(params: Mapping[str, Any]) -> nn.Module:
    """What the recipes train."""
    width, depth = int(params["width"]), int(params.get("depth", 1))
    hidden = [nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1)) for _ in range(depth)]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), *hidden, nn.Linear(width, 10))


def plain_mlp() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)), (
        torch.zeros(32, 64),
    )


class ConvNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.body = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width),
            nn.ReLU(),
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(self.stem(x)))
        return found


class Encoder(nn.Module):
    """A transformer's encoder with a head."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        one = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(one, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(x).mean(1))
        return found


class Recurrent(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, 100)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.lstm(self.embed(ids))[0])
        return found


def gpt2(layers: int = 2, width: int = 64) -> tuple[nn.Module, Any]:
    """GPT-2 of transformers, small; its output has the loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=width, n_head=4, n_positions=64, vocab_size=256, use_cache=False)
    ids = torch.zeros(8, 32, dtype=torch.long)
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def mixtral() -> tuple[nn.Module, Any]:
    """A mixture of experts of transformers, small."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=256,
        max_position_embeddings=64,
        use_cache=False,
    )
    ids = torch.zeros(8, 32, dtype=torch.long)
    return MixtralForCausalLM(config), {"input_ids": ids, "labels": ids}


def zoo_gpt() -> tuple[nn.Module, Any]:
    """The largest subnet of the zoo's GPT as a plain module."""
    chain = weft.initialise(small_gpt, 0)
    return weft.extract(chain, chain.largest()), (torch.zeros(8, 8, dtype=torch.long),)


def convolutions() -> tuple[nn.Module, Any]:
    return ConvNet(), (torch.zeros(16, 3, 16, 16),)


def encoder() -> tuple[nn.Module, Any]:
    return Encoder(), (torch.zeros(16, 24, 64),)


def recurrent() -> tuple[nn.Module, Any]:
    return Recurrent(), (torch.zeros(16, 12, dtype=torch.long),)


PLAIN = {
    "mlp": plain_mlp,
    "conv": convolutions,
    "encoder": encoder,
    "lstm": recurrent,
    "zoo-gpt": zoo_gpt,
    "gpt2": gpt2,
    "mixtral": mixtral,
}
"""Plain modules by kind, each with a batch: for plans and estimates."""
