"""The border between blocks: gradients do not depend on where a chain is cut."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain as joined
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from weft.engine.optimizer import Optimizer
from weft.engine.reference import SequentialReference
from weft.space import Space
from weft.supernet import Activations, Chain, Choice, as_activations
from weft.supernet.layer import grad_barrier

WIDTH = 4


class Weave(nn.Module):
    """Takes three tensors and gives three; every one is used several times, and one may pass untouched."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind = kind
        self.p, self.q = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixed = torch.tanh(self.p(a) + b * self.scale + self.q(c))
        if self.kind == 0:
            return mixed + a * c, b, a + mixed * b
        if self.kind == 1:
            return torch.sin(mixed * b) + a, mixed * c + self.q(b), c
        if self.kind == 3:  # one tensor under two names
            return mixed, mixed, a * b + c
        return c, self.p(mixed) * a + b, mixed.detach() * self.scale + a


class Enter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.inner(x)
        return y, torch.tanh(y), x


class Leave(nn.Module):
    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a * b + c


def loss_of(outputs: Tensor, y: Tensor) -> Tensor:
    return ((outputs - y) ** 2).mean()


def cut_gradients(layers: list[nn.Module], cuts: set[int], x: Tensor, y: Tensor) -> list[Tensor | None]:
    """By hand: stages that exchange detached tensors forward and gradients backward."""
    stages, start = [], 0
    for end in [*sorted(cuts), len(layers)]:
        stages.append(layers[start:end])
        start = end
    entered: list[Activations] = []
    left: list[Activations] = []
    carry: Activations = (x,)
    for stage in stages:
        if entered:
            carry = tuple(t.detach().requires_grad_(t.requires_grad) for t in carry)
        entered.append(carry)
        for layer in stage:
            carry = grad_barrier(as_activations(layer(*carry), "layer"))
        left.append(carry)
    found: dict[int, list[Tensor | None]] = {}
    loss = loss_of(carry[0], y)
    outputs, seeds = [loss], [torch.ones(())]
    for index in reversed(range(len(stages))):
        parameters = [p for layer in stages[index] for p in layer.parameters()]
        inputs = [t for t in entered[index] if t.requires_grad]
        own = torch.autograd.grad(outputs, [*parameters, *inputs], seeds, allow_unused=True)
        found[index] = list(own[: len(parameters)])
        passed = dict(zip((id(t) for t in inputs), own[len(parameters) :], strict=True))
        if index:
            pairs = [(out, passed.get(id(t))) for out, t in zip(left[index - 1], entered[index], strict=True)]
            outputs = [out for out, grad in pairs if grad is not None]
            seeds = [grad for _, grad in pairs if grad is not None]
    return list(joined.from_iterable(found[index] for index in range(len(stages))))


def build(kinds: tuple[int, ...], seed: int) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [Enter(), *map(Weave, kinds), Leave()]


@pytest.mark.parametrize("kinds", [(0, 1, 2), (1, 0, 1), (2, 2, 0), (0, 0, 0), (3, 0, 1), (3, 3, 1)])
def test_gradients_have_the_same_bits_at_every_cut(kinds: tuple[int, ...]) -> None:
    for seed in range(3):
        layers = build(kinds, seed)
        x, y = torch.randn(5, WIDTH), torch.randn(5, WIDTH)
        whole = cut_gradients(layers, set(), x, y)
        assert sum(g is not None for g in whole) >= 10
        places = range(1, len(layers))
        for count in range(1, len(layers)):
            for cuts in combinations(places, count):
                for a, b in zip(whole, cut_gradients(layers, set(cuts), x, y), strict=True):
                    # A gradient of nothing is nothing or zeros, depending on who asks.
                    assert (a is None or b is None) or torch.equal(a, b)
                    assert (a is None) == (b is None) or not torch.any(a if a is not None else b)


@pytest.mark.parametrize("kinds", [(0, 1, 2), (2, 0, 1), (3, 0, 1)])
def test_the_sequential_law_has_the_gradients_of_the_cut_chain(
    make: Callable[..., SequentialReference], kinds: tuple[int, ...]
) -> None:
    layers = build(kinds, 7)
    space = Space()
    chain = Chain(*(Choice(space, f"b{i}", {"only": layer}) for i, layer in enumerate(layers)), inputs="x")
    x, y = torch.randn(5, WIDTH), torch.randn(5, WIDTH)
    expected = cut_gradients(layers, {1, 2, 3, 4}, x, y)
    before = [p.detach().clone() for p in chain.parameters()]
    sequential = make(
        chain, [space.first()], optimizer=Optimizer("sgd", lr=1.0), loss=lambda out, batch: loss_of(out, batch["y"])
    )
    sequential.step(0, {"x": x, "y": y})
    for start, end, gradient in zip(before, chain.parameters(), expected, strict=True):
        assert torch.equal(end.detach(), start if gradient is None else torch.add(start, gradient, alpha=-1.0))


def test_a_border_changes_no_value_and_leaves_single_tensors_alone() -> None:
    a, b, c = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True), torch.arange(3)
    assert grad_barrier((a,))[0] is a
    assert grad_barrier((a, c)) == (a, c)
    passed = grad_barrier((a * 2, c, b * 3))
    assert torch.equal(passed[0], a * 2)
    assert passed[1] is c
    assert torch.equal(passed[2], b * 3)


def test_a_tensor_that_nobody_uses_behind_the_border_gets_no_gradient() -> None:
    a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    passed = grad_barrier((a * 2, b * 3))
    grads = torch.autograd.grad(passed[0].sum(), [a, b], allow_unused=True)
    assert torch.equal(grads[0], torch.full((3,), 2.0))
    assert grads[1] is None
