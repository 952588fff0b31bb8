"""One thread for every test of this folder, and the parts that most of them are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from stages import clipped
from torch import Tensor

from weft.engine.consistency import parse_consistency
from weft.engine.optimizer import Optimizer
from weft.engine.reference import SequentialReference
from weft.engine.train_step import TrainStep
from weft.space import Space, Stream, Subnet
from weft.supernet import Chain


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Listed(Stream):
    """The steps that a test wants, written out."""

    name = "listed"
    summary = "steps given by hand"
    bits = 0.0

    def __init__(self, space: Space, steps: Sequence[tuple[Subnet, ...]]) -> None:
        super().__init__(space)
        self.steps = list(steps)
        self.microbatches = max(len(step) for step in steps) if any(len(step) > 1 for step in steps) else None

    def _step(self, index: int) -> tuple[Subnet, ...]:
        return self.steps[index]


def squares(outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    difference = outputs - batch["y"]
    return (difference * difference).sum()


@pytest.fixture(scope="session")
def listed() -> type[Listed]:
    return Listed


@pytest.fixture(scope="session")
def make() -> Callable[..., SequentialReference]:
    """`make(chain, steps, consistency=..., m=...)`: the law over the subnets of each step, ready to train."""

    def build(
        chain: Chain,
        steps: Sequence[tuple[Subnet, ...] | Subnet],
        *,
        consistency: str | Mapping[str, str] = "exact",
        m: int = 1,
        optimizer: Optimizer | None = None,
        schedule: Any = "constant",
        clip: Any = None,
        loss: Any = squares,
        **options: Any,
    ) -> SequentialReference:
        rules = consistency if isinstance(consistency, Mapping) else dict.fromkeys(chain.layers, consistency)
        config = TrainStep(
            steps=len(steps),
            microbatches=m,
            stream=Listed(chain.space, [step if isinstance(step, tuple) else (step,) for step in steps]),
            consistency={name: parse_consistency(rules.get(name, "exact")) for name in chain.layers},
            loss=loss,
            optimizer=clipped(optimizer or Optimizer("sgd", lr=0.05, momentum=0.9), clip, schedule),
            **options,
        )
        sequential = SequentialReference(chain, config, torch.device("cpu"))
        sequential.train_mode()
        return sequential

    return build
