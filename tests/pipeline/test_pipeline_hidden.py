"""A layer that runs its forward again in its backward is refused under ``bounded``, and let through elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from weft.engine.consistency import VersionSchedule, parse_consistency
from weft.engine.inplace_weights import BACKWARDS, RecomputeGuard
from weft.errors import ConsistencyError


def clock(consistency: str, m: int = 1, window: int = 3) -> VersionSchedule:
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
    guard = RecomputeGuard("b", module, clock("bounded(4, 3)"))
    with pytest.raises(ConsistencyError, match=r"layer 'b' runs its forward again .* stashed\(4, "):
        run(module, guard)
    assert module.inner._parameters is own  # as it was, for whoever goes on


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("consistency", ["exact", "delayed(2)", "lagged(2)", "stashed(4, 3)"])
def test_a_forward_within_a_backward_is_let_through_elsewhere(consistency: str, reentrant: bool) -> None:
    module = Checkpointed("module", reentrant)
    run(module, RecomputeGuard("b", module, clock(consistency)))


def test_it_is_let_through_where_no_backward_is_ahead_of_its_forward() -> None:
    module = Checkpointed("module", False)
    run(module, RecomputeGuard("b", module, clock("bounded(4, 3)", window=1)))


def test_what_is_recomputed_without_weights_is_let_through() -> None:
    module = Checkpointed("activation", False)
    run(module, RecomputeGuard("b", module, clock("bounded(4, 3)")))


def test_a_backward_hook_may_look_at_a_weight() -> None:
    module = nn.Linear(3, 3)
    seen = []
    module.register_full_backward_hook(lambda part, *rest: seen.append(part.weight.norm().item()))
    run(module, RecomputeGuard("b", module, clock("bounded(4, 3)")))
    assert len(seen) == 1


def test_gradients_under_watch_are_those_without() -> None:
    module = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
    x = torch.randn(2, 3, 4)
    guard = RecomputeGuard("b", module, clock("bounded(4, 3)"))
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
