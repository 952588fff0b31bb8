"""The reference against a literal one, which keeps every version and derives every gradient by hand, and against a
plain training loop."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from stages import make_engine
from torch import Tensor, nn

from weft.engine.optimizer import Optimizer
from weft.space import Space, Subnet
from weft.supernet import Chain, Choice, Shared, initialise

WIDTH, BATCH = 3, 8
LR, MOMENTUM, DECAY = 0.002, 0.9, 0.01
VIRTUAL = ("bounded", "stashed")


class Affine(nn.Module):
    """relu(x W' + b), in operations whose gradients a person can write down; without ReLU at the end of a chain."""

    def __init__(self, rectify: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.empty(WIDTH))
        self.rectify = rectify

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight.t() + self.bias
        return torch.relu(out) if self.rectify else out


def build(middle: int, seed: int) -> Chain:
    space = Space()
    blocks = [
        Choice(space, f"b{i}", {"p": Affine(), "q": Affine(), "skip": nn.Identity()}, consistency=None)
        for i in range(middle)
    ]
    chain = Chain(Shared(Affine(), "stem"), *blocks, Shared(Affine(rectify=False), "head"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in chain.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.6)
    return chain


@dataclass
class Told:
    """One layer of the reference: `versions[v]` holds its weights after the updates of all slots below v."""

    kind: str
    numbers: tuple[int, ...]
    block: int
    blocks: int
    rectify: bool
    versions: list[tuple[Tensor, Tensor]]
    momentum: tuple[Tensor, Tensor] | None = None
    sums: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    # The table of the design, a line each.
    def slot(self, n: int, m: int) -> int:
        if self.kind == "lagged":
            return (n // m) // self.numbers[0]
        return n // self.numbers[0] if self.kind in VIRTUAL else n // m

    def sees_forward(self, n: int, m: int) -> int:
        step = n // m
        if self.kind == "exact":
            return step
        if self.kind == "delayed":
            return len([j for j in range(step) if j < step - self.numbers[0]])
        if self.kind == "lagged":
            return len([w for w in range(step // self.numbers[0]) if w <= step // self.numbers[0] - 2])
        every, depth = self.numbers
        window = depth - (self.block * depth) // self.blocks
        return max(n + 1 - window, 0) // every

    def sees_backward(self, n: int, m: int) -> int:
        return n // self.numbers[0] if self.kind == "bounded" else self.sees_forward(n, m)

    def members(self, slot: int, m: int, steps: int) -> list[int]:
        return [n for n in range(steps * m) if self.slot(n, m) == slot]


class Reference:
    """Every version of every layer, in plain tensor operations without autograd."""

    def __init__(
        self, chain: Chain, consistency: dict[str, str], m: int, steps: int, rate: Callable[[int], float]
    ) -> None:
        self.m, self.steps, self.rate = m, steps, rate
        self.layers: dict[str, Told] = {}
        for name, layer in chain.layers.items():
            module = chain.module(name)
            if isinstance(module, Affine):
                kind, _, rest = consistency[name].partition("(")
                numbers = tuple(int(part) for part in rest.rstrip(")").split(",") if part)
                start = (module.weight.detach().clone(), module.bias.detach().clone())
                self.layers[name] = Told(kind, numbers, layer.block, len(chain.blocks), module.rectify, [start])

    def microbatch(self, n: int, used: list[str], x: Tensor, y: Tensor) -> Tensor:
        inputs, outputs = [], []
        for name in used:
            layer = self.layers[name]
            weight, bias = layer.versions[layer.sees_forward(n, self.m)]
            inputs.append(x)
            x = x @ weight.t() + bias
            x = torch.relu(x) if layer.rectify else x
            outputs.append(x)
        difference = x - y
        loss = (difference * difference).sum()
        share = torch.full((), 1.0 / self.m)
        grad = share * difference + share * difference
        for name, entered, left in reversed(list(zip(used, inputs, outputs, strict=True))):
            layer = self.layers[name]
            weight, _ = layer.versions[layer.sees_backward(n, self.m)]
            if layer.rectify:
                grad = torch.where(left > 0, grad, torch.zeros(()))
            own = (grad.t() @ entered, grad.sum(0))
            grad = grad @ weight
            slot = layer.slot(n, self.m)
            before = layer.sums.get(slot)
            layer.sums[slot] = own if before is None else (before[0] + own[0], before[1] + own[1])
        self._close(n)
        return loss

    def _close(self, n: int) -> None:
        for layer in self.layers.values():
            slot = layer.slot(n, self.m)
            members = layer.members(slot, self.m, self.steps)
            if members[-1] != n:
                continue
            assert len(layer.versions) == slot + 1
            newest = layer.versions[slot]
            total = layer.sums.pop(slot, None)
            if total is not None:
                steps = len({member // self.m for member in members})
                newest = self._updated(layer, newest, tuple(part / steps for part in total), self.rate(n // self.m))
            layer.versions.append(newest)

    def _updated(
        self, layer: Told, weights: tuple[Tensor, Tensor], gradients: tuple[Tensor, ...], rate: float
    ) -> tuple[Tensor, Tensor]:
        new, velocity = [], []
        for index, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            decayed = torch.add(gradient, weight, alpha=DECAY)
            moved = decayed if layer.momentum is None else torch.add(layer.momentum[index] * MOMENTUM, decayed)
            velocity.append(moved)
            new.append(torch.add(weight, moved, alpha=-LR * rate))
        layer.momentum = (velocity[0], velocity[1])
        return new[0], new[1]


def compare(chain: Chain, consistency: dict[str, str], m: int, picks: list[tuple[Subnet, ...]], seed: int = 0) -> None:
    """Trains both and compares every element of every layer, and every loss, after every step."""
    steps = len(picks)

    def rate(step: int) -> float:
        return 1.0 - step / (2 * steps)

    reference = Reference(chain, consistency, m, steps, rate)
    sequential = make_engine(
        chain,
        picks,
        consistency=consistency,
        m=m,
        optimizer=Optimizer("sgd", lr=LR, momentum=MOMENTUM, weight_decay=DECAY, fused=False),
        schedule=lambda step, of: rate(step),
    )
    generator = torch.Generator().manual_seed(seed)
    for step, subnets in enumerate(picks):
        x = torch.randn(BATCH, WIDTH, generator=generator)
        y = torch.randn(BATCH, WIDTH, generator=generator)
        result = sequential.step(step, {"x": x, "y": y})
        part = BATCH // m
        for j in range(m):
            used = [layer.name for layer in chain.route(subnets[j % len(subnets)]) if layer.name in reference.layers]
            rows = slice(j * part, (j + 1) * part)
            loss = reference.microbatch(step * m + j, used, x[rows], y[rows])
            assert torch.equal(loss, result.losses[j]), f"loss of step {step}, micro-batch {j}"
        for name, layer in reference.layers.items():
            for mine, true in zip(sequential.weights[name].parameters, layer.versions[-1], strict=True):
                assert torch.equal(mine.detach(), true), f"'{name}' ({consistency[name]}, m={m}) after step {step}"
    assert all(not weights.kept and weights.pending is None for weights in sequential.weights.values())


def irregular(chain: Chain, steps: int, per_step: int, seed: int) -> list[tuple[Subnet, ...]]:
    """Subnets in which some layers come often, some seldom, some never."""
    draw = random.Random(seed)
    names = [block.name for block in chain.blocks if not block.shared]
    bias = {name: [draw.random() ** 3 + 1e-3 for _ in range(3)] for name in names}

    def one() -> Subnet:
        return chain.space.subnet({name: draw.choices(["p", "q", "skip"], bias[name])[0] for name in names})

    return [tuple(one() for _ in range(per_step)) for _ in range(steps)]


@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize(
    "consistency",
    [
        *("exact", "delayed(0)", "delayed(1)", "delayed(3)", "lagged(1)", "lagged(3)"),
        *("bounded(4,4)", "bounded(8,3)", "bounded(4,1)", "stashed(4,4)", "stashed(8,3)"),
    ],
)
def test_every_weight_is_that_of_the_table_after_every_step(consistency: str, m: int) -> None:
    chain = build(3, seed=1)
    compare(chain, dict.fromkeys(chain.layers, consistency), m, irregular(chain, 11, m, seed=2))


def test_the_reference_tells_the_consistencies_apart() -> None:
    """The oracle would prove nothing if every line of the table gave the same weights."""
    found = set()
    consistencies = ("exact", "delayed(1)", "delayed(2)", "lagged(1)", "lagged(2)")
    virtual = [f"{kind}(2,{depth})" for kind in VIRTUAL for depth in (2, 4)]
    for text in (*consistencies, *virtual):
        chain = build(2, seed=5)
        consistency = dict.fromkeys(chain.layers, text)
        picks = [(chain.space.subnet(b0="p", b1="q"),)] * 60  # until what recomputes meets a sign that has changed
        compare(chain, consistency, 1, picks)
        found.add(tuple(torch.cat([p.detach().flatten() for p in chain.parameters()]).tolist()))
    # delayed(1) and lagged(1) are the same consistency: one step late, an update a step.
    assert len(found) == 4 + len(virtual)


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, int, int, list[str], int]:
    middle = draw(st.integers(1, 4))
    blocks = middle + 2
    m = draw(st.sampled_from([1, 2, 4]))
    steps = draw(st.integers(1, 12))
    per_step = draw(st.sampled_from([1, m]))
    consistencies = st.one_of(
        st.just("exact"),
        st.integers(0, 5).map("delayed({})".format),
        st.integers(1, 5).map("lagged({})".format),
        st.tuples(st.sampled_from(VIRTUAL), st.integers(1, 4), st.integers(1, blocks)).map(
            lambda told: f"{told[0]}({told[1] * m},{told[2]})"
        ),
    )
    layers = 2 + 3 * middle
    texts = draw(st.lists(consistencies, min_size=layers, max_size=layers))
    return middle, m, steps, per_step, texts, draw(st.integers(0, 10**6))


@settings(max_examples=100, deadline=None)
@given(run=runs())
def test_any_mixture_of_consistencies_follows_the_table(run: tuple[int, int, int, int, list[str], int]) -> None:
    middle, m, steps, per_step, texts, seed = run
    chain = build(middle, seed)
    compare(chain, dict(zip(chain.layers, texts, strict=True)), m, irregular(chain, steps, per_step, seed), seed)


# `exact` against a plain training loop: zero_grad, backward, one optimizer a layer.


LOOP_STEPS, ROWS = 12, 12


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
            rows = slice(part * ROWS // m, (part + 1) * ROWS // m)
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


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize(
    ("kind", "cls", "options"), OPTIMIZERS, ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.parametrize("make_chain", [mlp, convolutional])
def test_exact_training_is_the_plain_loop_to_the_last_bit(
    make_chain: Callable[[], Chain], kind: str, cls: Any, options: dict[str, Any], m: int
) -> None:
    ours, theirs = initialise(make_chain, seed=3), initialise(make_chain, seed=3)
    generator = torch.Generator().manual_seed(m)
    shape = (4,) if make_chain is mlp else (1, 4, 4)
    batches = [
        {"x": torch.randn(ROWS, *shape, generator=generator), "y": torch.randint(0, 5, (ROWS,), generator=generator)}
        for _ in range(LOOP_STEPS)
    ]
    everything = list(ours.space.enumerate())
    subnets = [everything[(7 * i * i + i) % len(everything)] for i in range(LOOP_STEPS)]
    sequential = make_engine(ours, subnets, m=m, optimizer=Optimizer(kind, **options), loss=cross_entropy)
    losses = [loss.item() for i, batch in enumerate(batches) for loss in sequential.step(i, batch).losses]
    assert losses == plain_loop(theirs, subnets, batches, m, lambda params: cls(params, **options))
    for (name, mine), (other, true) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(mine, true), name
    sequential.eval_mode()
    for (name, mine), (_, true) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        # Folded with lerp where torch mixes inside the kernel: the same number up to rounding, the counts exactly.
        torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-6, msg=name)
