"""Extraction: the subnet as a plain module, the same outputs to the last bit and no trace of weft."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, fx, nn

from weft.errors import SpaceError, SupernetError
from weft.space import Space
from weft.supernet import Chain, Choice, Optional, Shared, extract, initialise


class Skip(nn.Module):
    """Carries its input beside its output, as a U-shaped net does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor, *before: Tensor) -> tuple[Tensor, ...]:
        return (torch.tanh(self.inner(x)), x, *before)


class Merge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor, *before: Tensor, mask: Tensor) -> Tensor:
        return self.inner(x) * mask + sum(before)


def plain() -> Chain:
    space = Space()

    def conv(kernel: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 2, kernel, padding=kernel // 2), nn.BatchNorm2d(2), nn.ReLU(), nn.Dropout(0.5)
        )

    blocks = [
        Choice(space, f"block-{i}", {"k3": partial(conv, 3), "k5": partial(conv, 5), "skip": nn.Identity})
        for i in range(2)
    ]
    return Chain(
        Shared(partial(nn.Conv2d, 1, 2, 1), "stem"),
        *blocks,
        Optional(space, "extra", partial(nn.Conv2d, 2, 2, 1)),
        Shared(nn.Flatten(), "head"),
    )


def carrying() -> Chain:
    space = Space()
    blocks = [Choice(space, f"block{i}", {"p": Skip, "q": Skip}) for i in range(2)]
    return Chain(*blocks, Choice(space, "merge", {"one": Merge, "two": Merge}, extra_inputs=["mask"]), inputs="x")


def own_modules(module: nn.Module) -> set[str]:
    return {type(part).__module__ for part in module.modules()}


def test_every_subnet_comes_out_as_a_sequential_with_equal_bits() -> None:
    chain = initialise(plain, 1).eval()
    x = torch.randn(4, 1, 5, 5)
    with torch.no_grad():
        chain.module("block-0.k3")[1].running_mean.fill_(0.3)
        for subnet in chain.space.enumerate():
            found = extract(chain, subnet)
            assert isinstance(found, nn.Sequential)
            assert not found.training
            assert not any(part.training for part in found.modules())
            assert torch.equal(found(x), chain(x, subnet))
            assert all(name.split(".")[0] == "torch" for name in own_modules(found))
            assert len(found) == len(chain.route(subnet))
    assert isinstance(extract(chain, chain.space.first(), {"x": x}), nn.Sequential)


def test_a_skipped_chain_is_the_identity_a_tuple_leaves_as_one_and_tied_weights_stay_tied() -> None:
    space, x = Space(), torch.randn(2, 3)
    skipped = Chain(Optional(space, "a", nn.Linear(3, 3)))
    assert torch.equal(extract(skipped, space.subnet(a=False))(x), x)
    assert torch.equal(skipped(x, space.subnet(a=False)), x)
    inner = nn.Linear(3, 3)
    chain = Chain(Shared(nn.Sequential(inner, nn.ReLU(), inner), "tied"), Shared(Skip(), "skip"))
    found = extract(chain, chain.space.subnet(), {"x": x})
    for mine, true in zip(found(x), chain(x, chain.space.subnet()), strict=True):
        assert torch.equal(mine, true)
    assert found.tied[0] is found.tied[2]


def test_what_cannot_be_extracted_is_refused_with_the_reason() -> None:
    alike = Chain(Choice(Space(), "a", {"b": nn.Identity()}), Shared(nn.Identity(), "a_b"))
    for chain, message in ((alike, "rename"), (plain(), "not been built"), (initialise(carrying, 1), "example")):
        with pytest.raises(SupernetError, match=message):
            extract(chain, chain.space.first())
    with pytest.raises(SpaceError):
        extract(initialise(plain), carrying().space.first())


def test_tuples_and_side_inputs_come_out_as_a_graph_with_equal_bits() -> None:
    chain = initialise(carrying, 1).eval()
    batch = {"x": torch.randn(4, 3), "mask": torch.randn(4, 3), "y": torch.zeros(4)}
    other = {"x": torch.randn(7, 3), "mask": torch.randn(7, 3)}
    for subnet in chain.space.enumerate():
        found = extract(chain, subnet, batch)
        assert isinstance(found, fx.GraphModule)
        assert "mask" in found.code
        with torch.no_grad():
            assert torch.equal(found(batch["x"], batch["mask"]), chain(batch, subnet))
            assert torch.equal(found(x=other["x"], mask=other["mask"]), chain(other, subnet))
        assert not any(name.startswith("weft") for name in own_modules(found))


@pytest.mark.parametrize("make", [plain, carrying])
def test_the_extracted_module_and_the_chain_are_independent(make: Callable[[], Chain]) -> None:
    chain = initialise(make, 1).eval()
    subnet = chain.space.first()
    batch = {"x": torch.randn(4, 1, 5, 5) if make is plain else torch.randn(4, 3), "mask": torch.randn(4, 3)}
    chain.train()
    extract(chain, subnet, batch)
    assert all(part.training for part in chain.modules())
    chain.eval()
    inputs = (batch["x"],) if make is plain else (batch["x"], batch["mask"])
    for parameter in chain.parameters():
        parameter.grad = torch.ones_like(parameter)
    found = extract(chain, subnet, batch)
    assert all(p.grad is None for p in found.parameters())
    assert all(p.grad is not None for p in chain.parameters())
    assert not {t.data_ptr() for t in found.state_dict().values()} & {t.data_ptr() for t in chain.state_dict().values()}
    with torch.no_grad():
        before = found(*inputs).clone()
        for tensor in chain.state_dict().values():
            tensor.add_(1)
        assert torch.equal(found(*inputs), before)
        assert not torch.equal(chain(batch, subnet), before)
        changed = chain(batch, subnet).clone()
        for tensor in found.state_dict().values():
            tensor.zero_()
        assert torch.equal(chain(batch, subnet), changed)
