"""The rules of updates one by one: which layers change, by what, at which rate, and what is kept."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import ceil
from typing import Any

import pytest
import torch
from stages import equal, layer_contents, make_engine
from torch import Tensor, nn

from weft.engine.optimizer import Optimizer
from weft.engine.reference import SequentialReference
from weft.errors import ConsistencyError, SupernetError, TrainError
from weft.space import Space, Subnet
from weft.supernet import Chain, Choice, Optional, Shared

WIDTH = 3


def linear(seed: int = 0) -> nn.Linear:
    layer = nn.Linear(WIDTH, WIDTH)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.5)
    return layer


def two_choices(*, blocks: int = 1, layer: Callable[[int], nn.Module] = linear, **options: Any) -> Chain:
    space = Space()
    middle = [Choice(space, f"b{i}", {"p": layer(2 * i + 1), "q": layer(2 * i + 2)}, **options) for i in range(blocks)]
    return Chain(Shared(linear(91), "stem"), *middle, Shared(linear(92), "head"))


def only(layer: nn.Module, **options: Any) -> tuple[Chain, Subnet]:
    """A chain of a choice with one candidate, between nothing and nothing."""
    space = Space()
    chain = Chain(Choice(space, "b", {"only": layer}, **options))
    return chain, space.first()


def batch(seed: int, rows: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, WIDTH, generator=generator), "y": torch.randn(rows, WIDTH, generator=generator)}


def train(sequential: SequentialReference, steps: int) -> None:
    for i in range(steps):
        sequential.step(i, batch(i))


# -- who is updated


class Half(nn.Module):
    """Uses one of its two parameters only where the batch says so; `never` has no gradient at all."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.never = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.used


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("consistency", ["exact", "delayed(1)", "lagged(2)", "bounded(2,1)"])
def test_a_parameter_without_gradient_gets_zeros_so_decay_and_momentum_still_act(consistency: str, m: int) -> None:
    chain, subnet = only(Half())
    options = {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.5}
    sequential = make_engine(chain, [subnet] * 4, consistency=consistency, m=m, optimizer=Optimizer("sgd", **options))
    train(sequential, 4)
    truth = nn.Parameter(torch.full((WIDTH,), 0.5))
    optimizer = torch.optim.SGD([truth], **options)
    updates = {"exact": 4, "delayed(1)": 4, "lagged(2)": 2, "bounded(2,1)": 2 * m}[consistency]
    for _ in range(updates):
        truth.grad = torch.zeros_like(truth)
        optimizer.step()
    assert torch.equal(chain.module("b.only").never, truth)
    assert not torch.equal(truth, torch.full((WIDTH,), 0.5))


@pytest.mark.parametrize("consistency", ["exact", "delayed(2)", "bounded(1,1)"])
def test_a_frozen_parameter_stays_as_it_is(consistency: str) -> None:
    layer = linear(1)
    layer.bias.requires_grad_(False)
    chain, subnet = only(layer)
    before, weight = layer.bias.clone(), layer.weight.detach().clone()
    optimizer = Optimizer("sgd", lr=0.1, weight_decay=0.1)
    train(make_engine(chain, [subnet] * 3, consistency=consistency, optimizer=optimizer), 3)
    assert torch.equal(layer.bias, before)
    assert not torch.equal(layer.weight, weight)


# -- batch statistics


MOMENTA = {"fast": 0.5, "slow": 0.25}


class Norms(nn.Module):
    """Two norms of different momentum beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = (nn.BatchNorm1d(WIDTH, momentum=momentum) for momentum in MOMENTA.values())

    def forward(self, x: Tensor) -> Tensor:
        return self.fast(x) + self.slow(x)


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("consistency", ["exact", "delayed(2)", "lagged(2)", "bounded(2,1)", "bounded(4,1)"])
def test_statistics_are_folded_in_micro_batch_order_when_the_update_is_applied(consistency: str, m: int) -> None:
    norms = Norms()
    chain, subnet = only(norms)
    sequential = make_engine(chain, [subnet] * 5, m=m, consistency=consistency, optimizer=Optimizer("sgd", lr=0.0))
    waits = {"exact": m, "delayed(2)": m, "lagged(2)": 2 * m, "bounded(2,1)": 2, "bounded(4,1)": 4}[consistency]
    count, waiting = 0, []
    expected = {part: (torch.zeros(WIDTH), torch.ones(WIDTH)) for part in MOMENTA}
    for i in range(5):
        data = batch(i, rows=8)
        sequential.step(i, data)
        for j in range(m):
            waiting.append(data["x"][j * 8 // m : (j + 1) * 8 // m])
            if len(waiting) == waits or (i, j) == (4, m - 1):
                for rows in waiting:
                    for part, momentum in MOMENTA.items():
                        mean, var = expected[part]
                        expected[part] = mean.lerp(rows.mean(0), momentum), var.lerp(rows.var(0), momentum)
                    count += 1
                waiting = []
        found = layer_contents(sequential, "b.only")
        for part, (mean, var) in expected.items():
            torch.testing.assert_close(found[f"b.only.{part}.running_mean"], mean)
            torch.testing.assert_close(found[f"b.only.{part}.running_var"], var)
            assert int(found[f"b.only.{part}.num_batches_tracked"]) == count
    sequential.eval_mode()
    for part, momentum in MOMENTA.items():
        norm = norms.get_submodule(part)
        torch.testing.assert_close(norm.running_mean, expected[part][0])
        assert norm.momentum == momentum
    assert count == 5 * m


def test_a_norm_that_the_user_froze_normalises_with_its_own_buffers() -> None:
    class Frozen(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> Frozen:
            return super().train(False)

    norm = Frozen(WIDTH)
    with torch.no_grad():
        norm.running_mean.copy_(torch.tensor([1.0, 2.0, 3.0]))
    chain, subnet = only(norm)
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    sequential = make_engine(chain, [subnet] * 4, on_nonfinite="skip", optimizer=Optimizer("sgd", lr=0.0))
    bad = batch(1)
    bad["y"][0, 0] = torch.nan
    for i, data in enumerate([batch(0), bad, batch(2)]):
        loss = sequential.step(i, data).losses[0]
        if i != 1:
            out = (data["x"] - torch.tensor([1.0, 2.0, 3.0])) / (torch.ones(WIDTH) + norm.eps).sqrt()
            torch.testing.assert_close(loss, ((out - data["y"]) ** 2).sum())
    sequential.eval_mode()
    assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())


class Counts(nn.Module):
    """Changes a buffer of its own in every forward, and reads it."""

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("seen", torch.tensor(float(start)))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return x * self.scale / self.seen


@pytest.mark.parametrize(
    ("consistency", "m"), [("exact", 2), ("delayed(1)", 1), ("lagged(1)", 1), ("bounded(1,1)", 1), ("bounded(2,1)", 2)]
)
def test_a_layer_that_changes_its_own_buffers_is_refused(consistency: str, m: int) -> None:
    chain, subnet = only(Counts())
    sequential = make_engine(chain, [subnet] * 3, consistency=consistency, m=m)
    with pytest.raises(ConsistencyError, match=r"'b.only' changes its own buffers .* needs 'exact'"):
        sequential.step(0, batch(0))


def test_a_layer_that_changes_its_own_buffers_late_is_refused_too() -> None:
    class Late(Counts):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if float(x[0, 0]) > 0 else x * self.scale

    chain, subnet = only(Late())
    sequential = make_engine(chain, [subnet] * 3, consistency="delayed(1)")
    data = batch(0)
    sequential.step(0, {**data, "x": -data["x"].abs()})
    with pytest.raises(ConsistencyError, match="changes its own buffers"):
        sequential.step(1, {**data, "x": data["x"].abs()})


@pytest.mark.parametrize(("consistency", "m"), [("exact", 2), ("delayed(1)", 1), ("lagged(1)", 1), ("bounded(1,1)", 1)])
def test_a_norm_with_a_cumulative_average_is_refused(consistency: str, m: int) -> None:
    chain, subnet = only(nn.BatchNorm1d(WIDTH, momentum=None))
    with pytest.raises(ConsistencyError, match=r"'b.only' .* momentum=None"):
        make_engine(chain, [subnet] * 3, consistency=consistency, m=m)


def test_a_norm_with_a_cumulative_average_may_be_exact_with_one_micro_batch() -> None:
    ours, theirs = nn.BatchNorm1d(WIDTH, momentum=None), nn.BatchNorm1d(WIDTH, momentum=None)
    chain, subnet = only(ours)
    sequential = make_engine(chain, [subnet] * 3)
    for i in range(3):
        sequential.step(i, batch(i))
        theirs(batch(i)["x"])
    assert torch.equal(ours.running_mean, theirs.running_mean)
    assert torch.equal(ours.running_var, theirs.running_var)
    assert int(ours.num_batches_tracked) == 3


# -- what is kept


@pytest.mark.parametrize(
    ("consistency", "most"),
    [
        *(("exact", 0), ("delayed(1)", 1), ("delayed(4)", 4), ("lagged(1)", 1), ("lagged(3)", 1)),
        *((f"bounded({every},6)", None) for every in (1, 2, 5)),
    ],
)
@pytest.mark.parametrize("regular", [True, False])
def test_no_more_versions_are_kept_than_the_design_says(consistency: str, most: int | None, regular: bool) -> None:
    chain = two_choices(blocks=4)
    generator = torch.Generator().manual_seed(5)
    pick = ["p", "q"]
    draws = torch.randint(0, 2, (20, 4), generator=generator).tolist()
    steps = [chain.space.subnet({f"b{i}": "p" if regular else pick[row[i]] for i in range(4)}) for row in draws]
    sequential = make_engine(chain, steps, consistency=consistency, optimizer=Optimizer("sgd", lr=0.01))
    reached = dict.fromkeys(sequential.weights, 0)

    def limit(name: str) -> int:
        at = sequential.weights[name].schedule
        return most if most is not None else ceil((at.window - 1) / at.consistency.every)

    for i in range(20):
        sequential.step(i, batch(i))
        for name, weights in sequential.weights.items():
            assert len(weights.kept) <= limit(name), name
            reached[name] = max(reached[name], len(weights.kept))
            # Each kept version has a reader to come, which asks for a number between its own and the next one's.
            begins = sorted(weights.kept)
            reads = {weights.schedule.forward_reads(n) for n in range(i + 1, 20)}
            for begin, end in pairwise([*begins, weights.newest]):
                assert any(begin <= version < end for version in reads), f"'{name}' keeps version {begin} for nobody"
    assert all(not weights.kept for weights in sequential.weights.values())
    if regular:  # the bound is reached, so that it says something
        assert reached == {name: 0 if name.endswith(".q") else limit(name) for name in reached}


# -- gradients are nobody's but the layer's


class Sum(nn.Module):
    """Autograd hands the very same gradient tensor to both parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(WIDTH))
        self.b = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.a + self.b)


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("consistency", ["exact", "lagged(2)", "bounded(2,1)"])
@pytest.mark.parametrize("m", [1, 2])
def test_parameters_that_share_a_gradient_tensor_are_each_scaled_once(
    consistency: str, clip: float | None, m: int
) -> None:
    """In the last window the layer is used by the last micro-batch alone, so nothing has copied its gradient before."""
    chain = two_choices(layer=lambda seed: Sum())
    p, q = chain.space.subnet(b0="p"), chain.space.subnet(b0="q")
    steps, optimizer = [p, p, q, (q,) * (m - 1) + (p,)], Optimizer("sgd", lr=0.1)
    sequential = make_engine(chain, steps, m=m, consistency=consistency, clip=clip, optimizer=optimizer)
    for i in range(4):
        sequential.step(i, batch(i))
        layer = chain.module("b0.p")
        torch.testing.assert_close(layer.b - layer.a, torch.ones(WIDTH), rtol=0, atol=1e-6)


class Turned(nn.Module):
    """Autograd hands out the matrix's gradient column by column, and the shift's as one number shown many times."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.shift = nn.Parameter(torch.zeros(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix.t().contiguous() + self.shift


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("way", ["default", "fused", "foreach"])
@pytest.mark.parametrize("consistency", ["exact", "lagged(2)"])
def test_gradients_that_lie_otherwise_in_memory_than_their_weights_are_applied_element_by_element(
    kind: str, way: str, consistency: str
) -> None:
    found = []
    for extra in ({"fused": False, "foreach": False}, {} if way == "default" else {way: True}):
        chain, subnet = only(Turned())
        optimizer = Optimizer(kind, lr=0.1, **extra)
        sequential = make_engine(
            chain, [subnet] * 3, consistency=consistency, optimizer=optimizer, loss=lambda out, batch: out.sum()
        )
        train(sequential, 3)
        found.append([p.detach().clone() for p in chain.parameters()])
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(plain, other)


def test_clipping_bounds_the_mean_gradient_of_each_layer_by_itself() -> None:
    free, clipped = two_choices(), two_choices()
    p = free.space.subnet(b0="p")
    before = {name: [t.detach().clone() for t in free.module(name).parameters()] for name in free.layers}
    for chain, clip in ((free, None), (clipped, 0.5)):
        make_engine(chain, [p], m=2, clip=clip, optimizer=Optimizer("sgd", lr=1.0)).step(0, batch(0))
    for name in ("stem", "b0.p", "head"):
        gradient = [a - b for a, b in zip(before[name], free.module(name).parameters(), strict=True)]
        norm = torch.cat([g.flatten() for g in gradient]).norm()
        assert norm > 0.5
        for g, start, end in zip(gradient, before[name], clipped.module(name).parameters(), strict=True):
            torch.testing.assert_close(start - end, g * (0.5 / norm), rtol=1e-4, atol=1e-6)


# -- layers of many kinds under old versions


class Called(nn.Module):
    """A module of torch behind a function that gives it its input."""

    def __init__(self, inner: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.inner, x)


def tied() -> nn.Module:
    pair = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    pair[2].weight = pair[0].weight
    return pair


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "recurrent": lambda: Called(nn.GRU(WIDTH, WIDTH, batch_first=True), lambda gru, x: gru(x[:, None])[0].squeeze(1)),
    "tied": tied,
    "attention": lambda: Called(nn.MultiheadAttention(WIDTH, 1), lambda attend, x: x + attend(x, x, x)[0]),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "double": lambda: Called(nn.Linear(WIDTH, WIDTH).double(), lambda linear, x: linear(x.double()).float()),
    "convolution": lambda: Called(nn.Conv1d(1, 1, 3, padding=1), lambda filters, x: filters(x[:, None]).squeeze(1)),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("consistency", ["delayed(2)", "lagged(2)", "bounded(1,3)"])
def test_a_micro_batch_sees_the_old_version_whatever_the_layer_is_made_of(kind: str, consistency: str) -> None:
    """The first three micro-batches read version 0, so their losses are those of the layer as it was, and it trains."""
    torch.manual_seed(0)
    space = Space()
    chain = Chain(Choice(space, "b", {"only": LAYERS[kind]()}), Shared(nn.Identity(), "a"), Shared(nn.Identity(), "z"))
    subnet = space.first()
    with torch.no_grad():
        old = [((chain(batch(i)["x"], subnet) - batch(i)["y"]) ** 2).sum() for i in range(3)]
    sequential = make_engine(
        chain, [subnet] * 6, consistency={"b.only": consistency}, optimizer=Optimizer("sgd", lr=0.05, weight_decay=0.1)
    )
    start = [p.detach().clone() for p in chain.parameters()]
    losses = [sequential.step(i, batch(i)).losses[0] for i in range(3)]
    torch.testing.assert_close(torch.stack(losses), torch.stack(old), rtol=1e-6, atol=1e-6)
    for i in range(3, 6):
        sequential.step(i, batch(i))
    assert all(not torch.equal(a, b) and b.dtype == a.dtype for a, b in zip(start, chain.parameters(), strict=True))


class Everything(nn.Module):
    """Matrices, filters, norms of one and two dimensions, an embedding, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.filters = nn.Linear(WIDTH, WIDTH), nn.Conv1d(1, 1, 3, padding=1)
        self.norm, self.square = nn.BatchNorm1d(WIDTH), nn.LayerNorm((1, WIDTH))
        self.table = nn.Embedding(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.linear(torch.tanh(self.linear(x))).float())
        out = self.filters(out.unsqueeze(1)).float()
        return self.square(out).squeeze(1) + self.table((x[:, 0] > 0).long())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("consistency", ["delayed(2)", "bounded({m},1)", "bounded({m},3)"])
def test_where_nothing_moves_every_consistency_is_exact(consistency: str, m: int, precision: str) -> None:
    """At a rate of zero all versions are equal, so losses and the momentum of every gradient are those of `exact`."""
    found = []
    for said in ("exact", consistency.format(m=m)):
        torch.manual_seed(0)
        chain = two_choices(layer=lambda seed: Everything())
        p, q = chain.space.subnet(b0="p"), chain.space.subnet(b0="q")
        options = {"precision": precision, "optimizer": Optimizer("sgd", lr=0.0, momentum=0.9)}
        sequential = make_engine(chain, [p, q, p, p, q], m=m, consistency=said, **options)
        losses = torch.stack([loss for i in range(5) for loss in sequential.step(i, batch(i, 8)).losses])
        states = [{k: v for k, v in layer_contents(sequential, name).items() if "@" not in k} for name in chain.layers]
        found.append((losses, states))
    assert torch.equal(found[0][0], found[1][0])
    for mine, true in zip(found[1][1], found[0][1], strict=True):
        assert equal(mine, true)


def test_a_parameters_name_that_would_confuse_a_checkpoint_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"a#b": nn.Linear(WIDTH, WIDTH)})

    chain, subnet = only(Odd())
    with pytest.raises(SupernetError, match=r"'parts.a#b.weight' of layer 'b.only'"):
        make_engine(chain, [subnet])


# -- the optimizer sees layers come and go


def biases_decay_not(name: str, parameter: nn.Parameter) -> dict[str, float]:
    return {"weight_decay": 0.0} if parameter.dim() < 2 else {"lr": 0.0}


@pytest.mark.parametrize(
    ("optimizer", "part"),
    [
        (Optimizer("adamw", lr=0.1, weight_decay=0.5, groups=biases_decay_not), "bias"),
        (Optimizer("muon", lr=0.1, others=Optimizer("sgd", lr=0.0)), "weight"),
    ],
    ids=["options of their own", "muon for the matrices"],
)
def test_single_parameters_may_be_updated_otherwise(optimizer: Optimizer, part: str) -> None:
    chain = two_choices()
    before = {name: t.detach().clone() for name, t in chain.named_parameters()}
    train(make_engine(chain, [chain.space.subnet(b0="p")] * 2, optimizer=optimizer), 2)
    changed = {name for name, after in chain.named_parameters() if not torch.equal(before[name], after)}
    assert changed == {f"{layer}.{part}" for layer in ("stem", "b0.p", "head")}


@pytest.mark.parametrize(
    ("m", "subnets", "data", "options", "words"),
    [
        (3, 1, {}, {}, "multiple of 3"),
        (2, 1, {"odd": torch.ones(3)}, {}, "as many rows"),
        (2, 1, {"odd": torch.tensor(1.0)}, {}, "as many rows"),
        (2, 3, {}, {}, "set microbatches=3"),
        (1, 1, {}, {"loss": lambda out, batch: out.sum(0)}, "one number"),
        (1, 1, {}, {"loss": lambda out, batch: 1.0}, "one number"),
        (1, 1, {}, {"optimizer": Optimizer("sgd", lr=-1.0)}, "SGD refuses its options"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_step_that_cannot_be_done_is_refused(
    m: int, subnets: int, data: dict[str, Tensor], options: dict[str, Any], words: str
) -> None:
    chain, subnet = only(linear())
    with pytest.raises(TrainError, match=words):
        make_engine(chain, [(subnet,) * subnets], m=m, **options).step(0, {**batch(0, rows=4), **data})


def test_a_subnet_that_uses_no_weights_at_all_is_a_step_like_any_other() -> None:
    space = Space()
    chain = Chain(Optional(space, "a", linear(1)), Optional(space, "z", nn.BatchNorm1d(WIDTH, affine=False)))
    on, off = space.subnet(a=True, z=True), space.subnet(a=False, z=False)
    only_norm = space.subnet(a=False, z=True)
    sequential = make_engine(chain, [on, off, only_norm, on], consistency={"a": "delayed(1)", "z": "lagged(2)"})
    train(sequential, 4)
    sequential.eval_mode()
    assert int(chain.module("z").num_batches_tracked) == 3
