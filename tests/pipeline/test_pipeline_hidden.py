"""What a layer hides from its versions is found in its first passes, and what only looks so is let through."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from weft.errors import ConsistencyError
from weft.pipeline.consistency import Clock, parse
from weft.pipeline.hidden import BACKWARDS, FORWARDS, Hidden, changed, kept


def clock(consistency: str, m: int = 1, window: int = 3) -> Clock:
    return Clock(parse(consistency), m, 100, window)


class Layer(nn.Module):
    """A linear layer that does something beside, as told."""

    def __init__(self, beside: Callable[[Any, Tensor], None], **attributes: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("counts", torch.zeros(3))
        self.beside = beside
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        self.beside(self, x)
        out: Tensor = self.inner(x)
        return out


def passes(module: nn.Module, hidden: Hidden, count: int = FORWARDS + 2) -> int:
    """How many forwards went well; the rest raise."""
    for number in range(count):
        try:
            with hidden.forward():
                module(torch.full((2, 3), float(number)))
        except ConsistencyError:
            return number
    return count


def blend(layer: Any, x: Tensor) -> None:
    layer.state = 0.9 * layer.state + x.sum(0)


def count_up(layer: Any, x: Tensor) -> None:
    layer.state.add_(1)


def append(layer: Any, x: Tensor) -> None:
    layer.state.append(x)


def replace(layer: Any, x: Tensor) -> None:
    layer.state["last"] = x + 1


def within(layer: Any, x: Tensor) -> None:
    layer.state["all"][0][1].mul_(2)


STATEFUL: list[tuple[Callable[[Any, Tensor], None], Any, str]] = [
    (blend, lambda: torch.zeros(3), "'state'"),
    (count_up, lambda: torch.zeros(3), "'state'"),
    (append, list, "'state'"),
    (append, lambda: deque(maxlen=1), r"'state\[0\]'"),
    (replace, dict, r"'state\['last'\]'"),
    (within, lambda: {"all": [(1, torch.ones(2))]}, r"'state\['all'\]\[0\]\[1\]'"),
]


@pytest.mark.parametrize(("beside", "state", "name"), STATEFUL)
def test_a_tensor_that_a_forward_changes_is_named(beside: Any, state: Any, name: str) -> None:
    module = Layer(beside, state=state())
    hidden = Hidden("block3", module, clock("bounded(4, 3)", m=2))
    with hidden.forward():
        module(torch.ones(2, 3))  # the first may fill a cache
    wanted = f"layer 'block3' keeps tensors for itself, in {name}, .* 'exact'; here it is bounded.4, 3."
    with pytest.raises(ConsistencyError, match=wanted), hidden.forward():
        module(torch.ones(2, 3))


def test_a_tensor_of_a_part_is_named_with_its_way() -> None:
    module = nn.Sequential(nn.Identity(), Layer(blend, state=torch.zeros(3)))
    hidden = Hidden("b", module, clock("lagged(2)"))
    with hidden.forward():
        module(torch.ones(2, 3))
    with pytest.raises(ConsistencyError, match=r"in '1\.state'"), hidden.forward():
        module(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("consistency", "m", "found"),
    [
        ("exact", 1, False),
        ("exact", 2, False),
        ("delayed(1)", 1, True),
        ("lagged(2)", 1, True),
        ("bounded(2, 3)", 1, True),
        ("stashed(2, 3)", 1, True),
        ("recomputed(2, 3)", 1, True),
    ],
)
def test_only_steps_in_exact_order_may_have_a_state(consistency: str, m: int, found: bool) -> None:
    module = Layer(blend, state=torch.zeros(3))
    assert passes(module, Hidden("b", module, clock(consistency, m))) == (1 if found else FORWARDS + 2)


def once(layer: Any, x: Tensor) -> None:
    if layer.table is None:
        layer.table = torch.arange(3)


def by_size(layer: Any, x: Tensor) -> None:
    layer.table.setdefault(float(x[0, 0]), x)


def buffered(layer: Any, x: Tensor) -> None:
    layer.counts += 1


def passing(layer: Any, x: Tensor) -> None:
    layer.table = x
    layer.table = None


@pytest.mark.parametrize(
    ("beside", "table"), [(once, None), (by_size, {}), (buffered, [1, 2]), (passing, None), (lambda layer, x: None, 3)]
)
def test_caches_buffers_and_what_is_gone_in_the_end_are_let_through(beside: Any, table: Any) -> None:
    module = Layer(beside, table=table)
    assert passes(module, Hidden("b", module, clock("bounded(2, 3)"))) == FORWARDS + 2


def test_weights_that_an_attribute_also_holds_may_be_updated() -> None:
    def step(layer: Any, x: Tensor) -> None:
        layer.inner.weight.data.add_(1)
        layer.inner.weight.grad = torch.ones(3, 3)

    module = Layer(step)
    module.__dict__["also"] = [module.inner.weight, module.counts]
    assert kept(module) == {}
    assert passes(module, Hidden("b", module, clock("bounded(2, 3)"))) == FORWARDS + 2


def test_torch_s_own_layers_keep_nothing() -> None:
    modules: list[nn.Module] = [
        nn.LSTM(3, 3, batch_first=True),
        nn.TransformerEncoderLayer(3, 1, 4, batch_first=True),
        nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)),
    ]
    for module in modules:
        hidden = Hidden("b", module, clock("bounded(2, 3)"))
        for _ in range(FORWARDS):
            with hidden.forward():
                module(torch.randn(2, 4, 3))
            for parameter in module.parameters():
                parameter.data.mul_(0.5)


def test_a_tensor_at_the_address_of_one_that_is_gone_is_another_one() -> None:
    module = nn.Module()
    module.__dict__["state"] = torch.zeros(3)
    before = kept(module)
    for _ in range(50):
        module.__dict__["state"] = torch.zeros(3)
        assert changed(before, kept(module)) == "state"


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


def run(module: nn.Module, hidden: Hidden) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    out = module(x)
    with hidden.backward():
        out.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("part", ["module", "function"])
def test_a_forward_within_a_backward_is_refused_under_bounded(part: str, reentrant: bool) -> None:
    module = Checkpointed(part, reentrant)
    own = module.inner._parameters
    hidden = Hidden("b", module, clock("bounded(4, 3)"))
    with pytest.raises(ConsistencyError, match=r"layer 'b' runs its forward again .* recomputed\(4, 3\).*stashed\(4, "):
        run(module, hidden)
    assert module.inner._parameters is own  # as it was, for whoever goes on


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("consistency", ["exact", "delayed(2)", "lagged(2)", "stashed(4, 3)", "recomputed(4, 3)"])
def test_a_forward_within_a_backward_is_let_through_elsewhere(consistency: str, reentrant: bool) -> None:
    module = Checkpointed("module", reentrant)
    run(module, Hidden("b", module, clock(consistency)))


def test_it_is_let_through_where_no_backward_is_ahead_of_its_forward() -> None:
    module = Checkpointed("module", False)
    run(module, Hidden("b", module, clock("bounded(4, 3)", window=1)))


def test_what_is_recomputed_without_weights_is_let_through() -> None:
    module = Checkpointed("activation", False)
    run(module, Hidden("b", module, clock("bounded(4, 3)")))


def test_a_backward_hook_may_look_at_a_weight() -> None:
    module = nn.Linear(3, 3)
    seen = []
    module.register_full_backward_hook(lambda part, *rest: seen.append(part.weight.norm().item()))
    run(module, Hidden("b", module, clock("bounded(4, 3)")))
    assert len(seen) == 1


def test_gradients_under_watch_are_those_without() -> None:
    module = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
    x = torch.randn(2, 3, 4)
    hidden = Hidden("b", module, clock("bounded(4, 3)"))
    found = []
    for _ in range(BACKWARDS + 1):  # the last is not watched
        module.zero_grad()
        with hidden.forward():
            out = module(x)
        with hidden.backward():
            out.square().sum().backward()
        found.append([parameter.grad for parameter in module.parameters()])
    assert hidden.backward() is hidden.forward()  # nothing at all from here on
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert one is not None
            assert two is not None
            assert torch.equal(one, two)
