"""The law at `exact` against the loop that anybody would write: zero_grad, backward, one optimizer a layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.engine.optimizer import Optimizer
from weft.engine.reference import SequentialReference
from weft.space import Space, Subnet
from weft.supernet import Chain, Choice, Shared, initialise

STEPS, BATCH = 12, 12


def mlp(out: int = 5) -> Chain:
    space = Space()
    blocks = [
        Choice(
            space,
            f"block{i}",
            {
                "thin": lambda: nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 5)),
                "wide": lambda: nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5, bias=False)),
                "skip": nn.Identity,
            },
        )
        for i in range(3)
    ]
    return Chain(Shared(partial(nn.Linear, 4, 5), "stem"), *blocks, Shared(partial(nn.Linear, 5, out), "head"))


def convolutional() -> Chain:
    space = Space()

    def candidate(kernel: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 3, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(3), nn.ReLU())

    blocks = [Choice(space, f"block{i}", {"k1": partial(candidate, 1), "k3": partial(candidate, 3)}) for i in range(2)]
    head = partial(nn.Sequential, nn.Flatten(), nn.Linear(3 * 16, 5))
    return Chain(Shared(partial(nn.Conv2d, 1, 3, 3, padding=1), "stem"), *blocks, Shared(lambda: head(), "head"))


def cross_entropy(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs, batch["y"])


def plain_loop(
    chain: Chain, subnets: list[Subnet], batches: list[dict[str, Tensor]], m: int, optimizer: Callable[..., Any]
) -> list[float]:
    optimizers = {
        name: optimizer(chain.module(name).parameters())
        for name in chain.layers
        if list(chain.module(name).parameters())
    }
    losses = []
    chain.train()
    for subnet, batch in zip(subnets, batches, strict=True):
        chain.zero_grad()
        for part in range(m):
            rows = slice(part * BATCH // m, (part + 1) * BATCH // m)
            piece = {key: value[rows] for key, value in batch.items()}
            loss = cross_entropy(chain(piece["x"], subnet), piece)
            (loss / m).backward()
            losses.append(loss.item())
        for layer in chain.route(subnet):
            if layer.name in optimizers:
                optimizers[layer.name].step()
    return losses


OPTIMIZERS = [
    ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "fused": False}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "fused": True}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    ("adamw", torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "fused": False}),
    ("adamw", torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
    ("nadam", torch.optim.NAdam, {"lr": 0.01}),
    ("rmsprop", torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    ("adagrad", torch.optim.Adagrad, {"lr": 0.05, "fused": False}),
]


@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("kind", "cls", "options"), OPTIMIZERS, ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.parametrize("build", [mlp, convolutional])
def test_exact_training_is_the_plain_loop_to_the_last_bit(
    make: Callable[..., SequentialReference],
    build: Callable[[], Chain],
    kind: str,
    cls: Any,
    options: dict[str, Any],
    m: int,
) -> None:
    ours, theirs = initialise(build, seed=3), initialise(build, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    generator = torch.Generator().manual_seed(m)
    shape = (4,) if build is mlp else (1, 4, 4)
    batches = [
        {"x": torch.randn(BATCH, *shape, generator=generator), "y": torch.randint(0, 5, (BATCH,), generator=generator)}
        for _ in range(STEPS)
    ]
    everything = list(ours.space.enumerate())
    subnets = [everything[(7 * i * i + i) % len(everything)] for i in range(STEPS)]
    sequential = make(ours, subnets, m=m, optimizer=Optimizer(kind, **options), loss=cross_entropy)
    losses = [loss.item() for i, batch in enumerate(batches) for loss in sequential.step(i, batch).losses]
    assert losses == plain_loop(theirs, subnets, batches, m, lambda params: cls(params, **options))
    for (name, mine), (other, true) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(mine, true), name
    sequential.eval_mode()
    for (name, mine), (_, true) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        # Folded with lerp where torch mixes inside the kernel: the same number up to rounding, the counts exactly.
        torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-6, msg=name)


def test_delayed_by_zero_steps_is_exact_to_the_last_bit(make: Callable[..., SequentialReference]) -> None:
    found = []
    for consistency in ("exact", "delayed(0)"):
        chain = initialise(mlp, seed=1)
        subnets = list(chain.space.enumerate())[:8]
        sequential = make(chain, subnets, m=2, consistency=consistency, loss=cross_entropy)
        for i in range(8):
            generator = torch.Generator().manual_seed(i)
            sequential.step(
                i,
                {
                    "x": torch.randn(BATCH, 4, generator=generator),
                    "y": torch.randint(0, 5, (BATCH,), generator=generator),
                },
            )
        found.append([p.detach().clone() for p in chain.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
