"""Building: weights are a function of the seed and the layer's name, wherever and however they are made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from weft.errors import SupernetError
from weft.space import Space
from weft.supernet import Chain, Choice, LazyLayer, Shared, build_on_meta, initialise


def candidate(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.GELU(), nn.Linear(width, 3))


def build(order: tuple[str, ...] = ("thin", "wide")) -> Chain:
    space = Space()
    widths = {"thin": 2, "wide": 5}
    return Chain(
        Shared(partial(nn.Linear, 4, 3), "stem"),
        Choice(space, "b", {name: partial(candidate, widths[name]) for name in order}),
        Shared(partial(nn.Linear, 3, 2), "head"),
    )


def state(chain: Chain) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in chain.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def ready() -> Chain:
    """A factory of a chain with modules, and not with functions that make them."""
    return Chain(Shared(nn.Linear(3, 3), "a"), Shared(nn.Linear(3, 3), "z"))


@pytest.mark.parametrize("make", [build, ready])
def test_the_same_seed_gives_the_same_supernet_and_another_another(make: Callable[[], Chain]) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = state(initialise(make, 1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)  # the user's generator has no part in it
    assert same(state(initialise(make, 1)), first)
    other = state(initialise(make, 2))
    assert not any(torch.equal(first[name], other[name]) for name in first if first[name].dim() > 1)


def test_a_layers_weights_do_not_depend_on_the_other_layers() -> None:
    a, b = state(initialise(build, 1)), state(initialise(lambda: build(("wide", "thin")), 1))
    assert same(a, {name: b[name] for name in a})
    alone = initialise(lambda: Chain(Shared(partial(nn.Linear, 3, 2), "head")), 1)
    assert torch.equal(alone.module("head").weight, a["head.weight"])
    chain = initialise(lambda: Chain(*(Shared(partial(nn.Linear, 3, 3), name) for name in "pq")))
    assert not torch.equal(chain.module("p").weight, chain.module("q").weight)


def test_a_module_keeps_its_values_and_a_factory_is_called_once() -> None:
    stem, calls = nn.Linear(3, 3), []

    def make() -> nn.Module:
        calls.append(1)
        return nn.Linear(3, 3)

    chain = Chain(Shared(stem, "stem"), Shared(make, "head"))
    assert not calls
    before = stem.weight.detach().clone()
    initialise(chain, 1)
    head = chain.module("head").weight.detach().clone()
    initialise(chain, 2)
    assert len(calls) == 1
    assert chain.module("stem") is stem
    assert torch.equal(stem.weight, before)
    assert torch.equal(chain.module("head").weight, head)


class Mean(nn.Module):
    """Draws for itself after its parts, as many modules do: the parent has the last word."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        nn.init.zeros_(self.inner.bias)


@pytest.mark.parametrize(
    "make",
    [
        partial(nn.Linear, 3, 4),
        partial(candidate, 4),
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))),
        partial(nn.Embedding, 5, 3),
        partial(nn.GRU, 3, 4),
        partial(nn.MultiheadAttention, 4, 2),
        partial(nn.TransformerEncoderLayer, 4, 2, 8),
        Mean,
    ],
    ids=["linear", "mlp", "conv", "embedding", "gru", "attention", "transformer", "own reset"],
)
def test_a_module_on_the_meta_device_becomes_what_its_factory_makes(make: Callable[[], nn.Module]) -> None:
    factory = initialise(lambda: Chain(Shared(make, "a"), Shared(nn.Identity(), "z")), 3)
    with torch.device("meta"):
        chain = Chain(Shared(make(), "a"), Shared(nn.Identity(), "z"))
    assert all(p.is_meta for p in chain.parameters())
    built = initialise(chain, 3)
    assert not any(t.is_meta for t in built.state_dict().values())
    assert same(state(factory), state(built))
    with torch.device("meta"):  # a factory may be called here too, and resets later
        late = initialise(Chain(Shared(make, "a")), 3, only=["a"])
    assert same(state(late), state(factory))


def test_of_modules_on_the_meta_device_only_those_that_can_reset_themselves_are_given_values() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

    pretrained = nn.Linear(3, 3)
    before = pretrained.weight.detach().clone()
    with torch.device("meta"):
        mixed = Chain(Shared(nn.Sequential(pretrained, nn.Linear(3, 3)), "a"))
        bare, tied = (nn.Sequential(nn.Linear(3, 3), last) for last in (Bare(), nn.Linear(3, 3)))
    tied[1].weight = tied[0].weight  # torch would untie them
    assert torch.equal(initialise(mixed, 1).module("a")[0].weight, before)  # what has values keeps them
    assert not mixed.module("a")[1].weight.is_meta
    for module, message in ((bare, r"'a.1' \(Bare\) .* factory"), (tied, r"'a' has tied weights .* factory")):
        with pytest.raises(SupernetError, match=message):
            initialise(Chain(Shared(module, "a")))


def test_only_the_named_layers_are_built() -> None:
    chain = initialise(build, 1, only=["b.thin", "head"])
    full = initialise(build, 1)
    assert isinstance(chain.module("stem"), LazyLayer)
    assert isinstance(chain.module("b.wide"), LazyLayer)
    for name in ("b.thin", "head"):
        for a, b in zip(chain.module(name).parameters(), full.module(name).parameters(), strict=True):
            assert torch.equal(a, b)
    with pytest.raises(SupernetError, match="not been built"):
        chain(torch.ones(2, 4), chain.space.subnet(b="thin"))
    with pytest.raises(SupernetError, match=r"'b.thick'.*'b.thin'"):
        initialise(build, 1, only=["b.thick"])
    initialise(chain, 1, only=["stem", "b.wide"])
    assert same(state(chain), state(full))


@pytest.mark.parametrize("build", [initialise, build_on_meta])
def test_a_factory_that_returns_something_else_is_refused(build: Callable[..., Chain]) -> None:
    with pytest.raises(SupernetError, match=r"returned int, not a weft\.Chain"):
        build(lambda: 3)
    with pytest.raises(SupernetError, match=r"'a' returned int, not an nn.Module"):
        build(lambda: Chain(Shared(lambda: 3, "a")))


def test_a_chain_on_the_meta_device_has_every_shape_and_no_value_and_draws_nothing() -> None:
    real, before = initialise(build, 1), torch.get_rng_state()
    shapes = {name: tensor.shape for name, tensor in real.state_dict().items()}
    for net in (build, build(), real):
        flat = build_on_meta(net)
        assert all(tensor.is_meta for tensor in flat.state_dict().values())
        assert {name: tensor.shape for name, tensor in flat.state_dict().items()} == shapes
    reads = build_on_meta(lambda: Chain(Shared(lambda: nn.Linear(int(torch.ones(3).sum()), 2), "reads")))
    assert reads.module("reads").weight.is_meta
    assert not any(tensor.is_meta for tensor in real.state_dict().values())
    assert torch.equal(torch.get_rng_state(), before)
