"""Gradients at the border between blocks, under other weights in place of a module's own, and where a layer computes
its forward again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import combinations

import pytest
import stages
import torch
from stages import make_engine
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from weft.engine.consistency import VersionSchedule, parse_consistency
from weft.engine.inplace_weights import BACKWARDS, ParameterSwap, RecomputeGuard
from weft.engine.losses import mean_squared_error
from weft.engine.optimizer import Optimizer
from weft.engine.reference import SequentialReference
from weft.errors import ConsistencyError
from weft.space import Space
from weft.supernet import Chain, Choice, Shared, initialise

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


def woven(kinds: tuple[int, ...]) -> Chain:
    layers = [partial(Weave, kind) for kind in kinds]
    return Chain(*(Shared(make, f"b{i}") for i, make in enumerate([Enter, *layers, Leave])), inputs="x")


def rows(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(5, WIDTH, generator=generator) for name in "xy"}


@pytest.mark.parametrize("kinds", [(0, 1, 2), (1, 0, 1), (2, 2, 0), (0, 0, 0), (3, 0, 1), (3, 3, 1)])
def test_gradients_have_the_same_bits_at_every_cut(monkeypatch: pytest.MonkeyPatch, kinds: tuple[int, ...]) -> None:
    monkeypatch.setitem(stages.KINDS, "woven", (partial(woven, kinds), rows))
    optimizer = Optimizer("sgd", lr=1.0, schedule="constant")
    task = stages.make_task("woven", steps=1, optimizer=optimizer, loss=mean_squared_error, metrics={})
    plain, alone = task.chain(), SequentialReference(task.chain(), task.config, stages.CPU)
    whole = stages.run_engine(alone, task)
    mean_squared_error(plain(rows(0), plain.space.subnet()), rows(0)).backward()
    for parameter, trained in zip(plain.parameters(), alone.chain.parameters(), strict=True):
        moved = torch.zeros(()) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(trained, parameter - moved)
    for count in range(1, len(plain.blocks)):
        for cut in combinations(range(1, len(plain.blocks)), count):
            assert stages.in_stages(task, cut, 2)[0].layers == whole.layers, cut


# Other weights in place of a module's own, in the forward and in a backward that recomputes it.


class Recomputed(nn.Module):
    """The same layer, its activations kept or recomputed in the backward."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 4))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)
        return out


def recomputing(recompute: bool) -> Chain:
    space = Space()
    blocks = [Choice(space, f"b{i}", {"only": lambda: Recomputed(recompute)}) for i in range(3)]
    return Chain(Shared(lambda: nn.Linear(4, 4), "stem"), *blocks)


def test_a_module_computes_with_what_it_is_bound_to_and_has_its_own_again_afterwards() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight  # tied: both places must follow
    own = module[0].weight
    binding = ParameterSwap(module, [own])
    with binding.to([2 * torch.eye(2)]):
        assert torch.equal(module(torch.ones(1, 2)), torch.full((1, 2), 4.0))
    assert module[0].weight is own
    assert module[1].weight is own
    with pytest.raises(ZeroDivisionError), binding.to([torch.eye(2)]):
        raise ZeroDivisionError
    assert module[0].weight is own


@pytest.mark.parametrize("consistency", ["exact", "delayed(3)", "lagged(2)"])
def test_a_layer_that_is_recomputed_in_its_backward_sees_the_version_of_its_forward(consistency: str) -> None:
    found = []
    for recompute in (False, True):
        chain = initialise(lambda recompute=recompute: recomputing(recompute), seed=2)
        subnet = chain.space.first()
        sequential = make_engine(
            chain, [subnet] * 10, consistency=consistency, loss=lambda out, batch: out.square().mean()
        )
        for i in range(10):
            sequential.step(i, {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(i))})
        found.append(chain.state_dict())
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name


# A layer that runs its forward again in its backward is refused under ``bounded``, and let through elsewhere.


def schedule(consistency: str, m: int = 1, window: int = 3) -> VersionSchedule:
    return VersionSchedule(parse_consistency(consistency), m, 100, window)


class Checkpointed(nn.Module):
    """Computes a part of itself again in its backward: the part with its weights, or one without any."""

    def __init__(self, part: str, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.part, self.reentrant = part, reentrant

    def forward(self, x: Tensor) -> Tensor:
        parts: dict[str, Callable[[Tensor], Tensor]] = {
            "module": self.inner,
            "function": lambda y: F.linear(y, self.inner.weight, self.inner.bias),
            "activation": torch.tanh,
        }
        out = checkpoint(parts[self.part], x, use_reentrant=self.reentrant)
        assert isinstance(out, Tensor)
        return self.inner(out) if self.part == "activation" else out


def run(module: nn.Module, guard: RecomputeGuard) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    out = module(x)
    with guard.backward():
        out.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("part", ["module", "function"])
def test_a_forward_within_a_backward_is_refused_under_bounded(part: str, reentrant: bool) -> None:
    module = Checkpointed(part, reentrant)
    own = module.inner._parameters
    guard = RecomputeGuard("b", module, schedule("bounded(4, 3)"))
    with pytest.raises(ConsistencyError, match=r"layer 'b' runs its forward again .* stashed\(4, "):
        run(module, guard)
    assert module.inner._parameters is own  # as it was, for whoever goes on


@pytest.mark.parametrize(
    ("part", "consistency", "window"),
    [
        *(("module", consistency, 3) for consistency in ("exact", "delayed(2)", "lagged(2)", "stashed(4, 3)")),
        pytest.param("module", "bounded(4, 3)", 1, id="no backward is ahead of its forward"),
        pytest.param("activation", "bounded(4, 3)", 3, id="recomputed without weights"),
    ],
)
def test_a_forward_within_a_backward_is_let_through_elsewhere(part: str, consistency: str, window: int) -> None:
    for reentrant in (False, True) if part == "module" else (False,):
        module = Checkpointed(part, reentrant)
        run(module, RecomputeGuard("b", module, schedule(consistency, window=window)))


def test_a_backward_hook_may_look_at_a_weight() -> None:
    module = nn.Linear(3, 3)
    seen = []
    module.register_full_backward_hook(lambda part, *rest: seen.append(part.weight.norm().item()))
    run(module, RecomputeGuard("b", module, schedule("bounded(4, 3)")))
    assert len(seen) == 1


def test_gradients_under_watch_are_those_without() -> None:
    module = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
    x = torch.randn(2, 3, 4)
    guard = RecomputeGuard("b", module, schedule("bounded(4, 3)"))
    found = []
    for _ in range(BACKWARDS + 1):  # the last is not watched
        module.zero_grad()
        out = module(x)
        with guard.backward():
            out.square().sum().backward()
        found.append([parameter.grad for parameter in module.parameters()])
    assert isinstance(guard.backward(), nullcontext)  # nothing at all from here on
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert one is not None
            assert two is not None
            assert torch.equal(one, two)
