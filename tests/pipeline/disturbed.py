"""What stages in processes of their own import for tests: supernets whose layers dawdle or fail, data, and losses."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import stages
import torch
from stages import KINDS
from torch import Tensor, nn

from weft.data import Data, Tensors
from weft.engine.losses import cross_entropy
from weft.space import Space
from weft.supernet import Chain, Choice, Optional, Shared

_clock = random.SystemRandom()
"""Never the same twice, and no generator that training could draw from."""


def dawdle(most: float = 0.004) -> None:
    """Sleeps for a random time, but only on a stage."""
    if "RANK" in os.environ:
        time.sleep(_clock.uniform(0.0, most))


class Late(nn.Module):
    """A layer whose forward and backward take a random time."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor, **side: Tensor) -> Any:
        dawdle()
        outputs = self.inner(*inputs, **side)
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        if first.requires_grad:
            first.register_hook(_dawdle_back)
        return outputs


def _dawdle_back(gradient: Tensor) -> None:
    dawdle()


def late(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Late(make())


def late_chain(build: Callable[..., Chain], *arguments: Any) -> Chain:
    """A supernet of ``stages`` whose layers all take a random time."""

    def choice(space: Space, name: str, candidates: Mapping[str, Any], **options: Any) -> Choice:
        return Choice(space, name, {key: late(make) for key, make in candidates.items()}, **options)

    blocks: dict[str, Any] = {
        "Shared": lambda make, name: Shared(late(make), name),
        "Optional": lambda space, name, make: Optional(space, name, late(make)),
        "Choice": choice,
    }
    vars(stages).update(blocks)
    try:
        return build(*arguments)
    finally:
        vars(stages).update(Shared=Shared, Optional=Optional, Choice=Choice)


def convolutional(blocks: int = 4) -> Chain:
    return late_chain(stages.convolutional, blocks)


def text() -> Chain:
    return late_chain(stages.text)


def encoder_decoder() -> Chain:
    return late_chain(stages.encoder_decoder)


NETS: dict[str, Callable[..., Chain]] = {
    "convolutional": convolutional,
    "text": text,
    "encoder-decoder": encoder_decoder,
}


def samples(kind: str, seen: str | None = None) -> Data:
    """Data for a kind of supernet. Each stage that loads it leaves its process id in the folder ``seen``, by start and
    rank."""
    if seen is not None and "RANK" in os.environ:
        name = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}.{os.environ['RANK']}"
        (Path(seen) / f".{name}").write_text(str(os.getpid()))
        (Path(seen) / f".{name}").rename(Path(seen) / name)
    batch = KINDS[kind][1]
    train, held = ([batch(step) for step in steps] for steps in (range(12), range(100, 103)))
    parts = ({key: torch.cat([part[key] for part in parts]) for key in parts[0]} for parts in (train, held))
    first, second = (Tensors(**part) for part in parts)
    return Data(kind, first, second)


def loss(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy that takes its time."""
    dawdle()
    return cross_entropy(outputs, batch)


class Faulty(nn.Module):
    """A layer that fails, gives what cannot travel or is not a number, or is sound."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.how == "raise":
            raise ValueError("a layer\nthat fails")
        if self.how == "sparse":
            return x.to_sparse()
        return x / 0.0 * 0.0 if self.how == "nan" else x


def faulty(where: int, how: str) -> Chain:
    """Five shared layers, one of which fails, and a choice without weights."""
    layers = [Shared(partial(Faulty, how if k == where else ""), f"layer{k}") for k in range(5)]
    return Chain(*layers, Choice(Space(), "last", {"a": nn.Identity, "b": nn.Identity}))


def numbers() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {"x": torch.randn(16, 4, generator=draw), "label": torch.randint(0, 4, (16,), generator=draw)}
