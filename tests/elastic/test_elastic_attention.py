"""Elastic attention, perceptrons and transformer blocks: the law, the definition, and what cannot be made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from elastic_law import (
    agrees_with_the_definition,
    chain_of,
    check_law,
    corners,
    expected,
    noise,
    random_mixture,
    randomise,
    refusing_values,
    saved,
)
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from weft.elastic import (
    MLP,
    Attention,
    Grid,
    Head,
    LayerNorm,
    Mixture,
    Module,
    PatchEmbedding,
    RMSNorm,
    Rotary,
    TokenEmbedding,
    TransformerBlock,
)
from weft.elastic.extract import plain_module
from weft.errors import SupernetError

TOKENS = 5


def made(case: str) -> tuple[weft.Space, Attention]:
    """A space with the choices 'width' and more, and an attention of it."""
    space = weft.Space()
    width = space.integer("width", [6, 12])
    options = {**CASES[case][1], **({"rotary": Rotary(4)} if case == "rotary" else {})}
    return space, Attention(space, width, *CASES[case][0](space), **options)


def grouped(space: weft.Space) -> tuple[Any, ...]:
    groups, each = space.integer("groups", [1, 2]), space.integer("each", [1, 2])
    return groups * each, 4, groups


def all_of_it(space: weft.Space) -> tuple[Any, ...]:
    heads, _, groups = grouped(space)
    return heads, space.integer("size", [2, 3]), groups


def from_width(space: weft.Space) -> tuple[Any, ...]:
    heads = space.integer("heads", [1, 2, 3])
    return heads, space.handle("width") / heads


THREE = lambda space: (space.integer("heads", [1, 2, 3]), 4)  # noqa: E731
CASES: dict[str, tuple[Callable[[weft.Space], tuple[Any, ...]], dict[str, Any]]] = {
    "heads": (THREE, {}),
    "causal, eager": (THREE, {"causal": True, "eager": True}),
    "causal, without biases": (THREE, {"causal": True, "bias": False, "out_bias": False}),
    "groups of heads": (grouped, {}),
    "groups of heads, eager": (grouped, {"eager": True, "causal": True}),
    "a number of heads, whatever the groups": (lambda space: (4, 4, space.integer("groups", [1, 2, 4])), {}),
    "heads for two groups": (lambda space: (space.integer("heads", [2, 4, 6]), 4, 2), {}),
    "one key and value": (lambda space: (space.integer("heads", [1, 2, 3]), 4, 1), {}),
    "head size": (lambda space: (space.integer("heads", [1, 2]), space.integer("size", [2, 3, 5])), {}),
    "head size, fixed scale": (lambda space: (2, space.integer("size", [2, 5])), {"scale": 0.3}),
    "head size from the width": (from_width, {}),
    "all of it": (all_of_it, {"causal": True}),
    "rotary": (grouped, {"causal": True}),
}


def keeps_the_law(space: weft.Space, module: Module, x: Tensor, features: bool = True, garbage: float = 3.0) -> None:
    """Every subnet, which takes its width of the features of x (or all of it)."""
    chain = chain_of(space, randomise(module))
    for subnet in space.enumerate():
        inputs = subnet["width"] if features else None
        check_law(chain, subnet, x, inputs, dim=-1, modes=(False,), garbage=garbage)


@pytest.mark.parametrize("case", CASES)
def test_attention_keeps_the_law(case: str) -> None:
    space, attention = made(case)
    keeps_the_law(space, attention, noise(2, TOKENS, 12))


@pytest.mark.parametrize("case", CASES)
def test_a_mixture_of_attention_has_the_expected_weights_of_every_layer(case: str) -> None:
    space, attention = made(case)
    randomise(attention)
    groups, each, dim = attention.sizes.largest

    def scale(subnet: weft.Subnet) -> float:
        return float(attention.sizes.of(subnet)[2]) ** -0.5

    def literal(x: Tensor, mixture: Mixture) -> Tensor:
        folded = case in ("head size", "head size from the width", "all of it")
        weights = {name: expected(getattr(attention, name), space, mixture) for name in ("k", "v", "out")}
        weights["q"] = expected(attention.q, space, mixture, scale if folded else None)
        q, k, v = (F.linear(x, weights[name]["weight"], weights[name].get("bias")) for name in "qkv")
        q = q.view(2, TOKENS, groups * each, dim).transpose(1, 2)
        k, v = (one.view(2, TOKENS, groups, dim).transpose(1, 2).repeat_interleave(each, 1) for one in (k, v))
        if case == "rotary":
            q, k = (turned(one, attention.rotary.frequencies) for one in (q, k))
        scores = q @ k.transpose(-1, -2) * (1.0 if folded else 0.3 if "fixed" in case else dim**-0.5)
        if attention.causal:
            scores = scores + torch.full((TOKENS, TOKENS), float("-inf")).triu(1)
        y = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(2, TOKENS, -1)
        return F.linear(y, weights["out"]["weight"], weights["out"].get("bias"))

    agrees_with_the_definition(attention, noise(2, TOKENS, 12), space, literal)


def turned(x: Tensor, frequencies: Tensor) -> Tensor:
    """Each pair of features (i, i + 2) of a head of 4 as a complex number, turned by its place times the frequency."""
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.01], dtype=frequencies.dtype))
    pairs = torch.complex(x[..., :2], x[..., 2:])
    angles = torch.arange(x.shape[-2])[:, None] * frequencies
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag), -1)


def test_heads_are_nested_so_that_every_pick_has_its_own_rows_in_every_larger_one() -> None:
    # Rows of q by (group, head of the group, feature): 2 x 3 x 2, so a group is 6 rows and a head is 2.
    space = weft.Space()
    groups, each = space.integer("groups", [1, 2]), space.integer("each", [1, 3])
    attention = Attention(space, 5, groups * each, 2, groups)
    rows = {(g, e): set() for g in (1, 2) for e in (1, 3)}
    for subnet in space.enumerate():
        entries = corners(attention, subnet)["q.weight"][:, 0] // 5
        rows[subnet["groups"], subnet["each"]] = set(entries.tolist())
    assert rows[1, 1] == {0, 1}
    assert rows[1, 3] == {0, 1, 2, 3, 4, 5}
    assert rows[2, 1] == {0, 1, 6, 7}
    assert rows[2, 3] == set(range(12))


def test_a_transposed_grid_keeps_its_layout_in_the_plain_form() -> None:
    space = weft.Space()
    width, heads = space.integer("width", [3, 6]), space.integer("heads", [1, 2, 3])
    grid = randomise(Grid(space, width, (3, heads, 2), transposed=True))
    for subnet in space.enumerate():
        plain, x = grid.plain(subnet), noise(2, TOKENS, subnet["width"])
        assert torch.equal(plain(x), grid(x, pick=subnet))
        assert plain.weight.t().is_contiguous()
        whole = grid.weight.view(6, 3, 3, 2)[: subnet["width"], :, : subnet["heads"]]
        assert torch.equal(plain.weight, whole.reshape(subnet["width"], -1).t())

    def literal(x: Tensor, mixture: Mixture) -> Tensor:
        parts = expected(grid, space, mixture)
        return F.linear(x, parts["weight"].t(), parts["bias"])

    agrees_with_the_definition(grid, noise(2, TOKENS, 6), space, literal)


@pytest.mark.parametrize("gated", [False, True])
def test_a_perceptron_keeps_the_law_and_a_mixture_has_the_expected_weights(gated: bool) -> None:
    space = weft.Space()
    width, ratio = space.integer("width", [4, 7, 8]), space.categorical("ratio", [1.5, 2.0])
    mlp = MLP(space, width, ratio * width, nn.SiLU if gated else nn.GELU, gated)
    keeps_the_law(space, mlp, noise(2, 3, 8))

    def literal(x: Tensor, mixture: Mixture) -> Tensor:
        weights = {name: expected(leaf, space, mixture) for name, leaf in mlp.named_children() if name != "activation"}
        up = F.linear(x, **weights["up"])
        inner = F.silu(F.linear(x, **weights["gate"])) * up if gated else F.gelu(up)
        return F.linear(inner, **weights["down"])

    agrees_with_the_definition(mlp, noise(2, 3, 8), space, literal)


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_a_transformer_block_keeps_the_law(norm: type) -> None:
    space = weft.Space()
    width, heads = space.integer("width", [6, 10]), space.integer("heads", [1, 2])
    ratio = space.categorical("ratio", [1.5, 2.0])
    attention, mlp = Attention(space, width, heads, 4, causal=True), MLP(space, width, ratio * width)
    keeps_the_law(
        space, TransformerBlock(space, width, attention, mlp, norm, dropout=0.5), noise(2, TOKENS, 10), garbage=0.0
    )


def test_embeddings_and_heads_keep_the_law() -> None:
    space = weft.Space()
    width = space.integer("width", [4, 7])
    ids, images = torch.tensor([[0, 3, 3], [8, 1, 3]]), noise(2, 2, 8, 8)
    keeps_the_law(space, TokenEmbedding(space, 9, width, 3), ids, features=False)
    keeps_the_law(space, PatchEmbedding(space, 8, 4, width, 2), images, features=False)
    for of in ("all", "first", "mean"):
        keeps_the_law(space, Head(space, width, 5, of), noise(2, 3, 7))


@pytest.mark.parametrize("case", ["heads", "groups of heads", "head size", "rotary"])
def test_a_mixture_keeps_little_more_for_its_backward_than_the_plain_attention(case: str) -> None:
    space, attention = made(case)
    x = noise(8, 256, 12).requires_grad_()
    mixture = random_mixture(space)
    plain = plain_module(attention, space.last())
    with saved(plain) as theirs:
        plain(x)
    with saved(attention) as ours:
        attention(x, pick=mixture)
    assert sum(ours) <= 1.02 * sum(theirs)


@pytest.mark.parametrize("case", ["groups of heads", "all of it", "rotary"])
def test_the_mixture_path_never_asks_for_a_value(case: str) -> None:
    space, attention = made(case)
    attention(noise(2, TOKENS, 12), pick=random_mixture(space, 1))  # what is constant is worked out once
    norm, mixture = LayerNorm(space, space.handle("width")), random_mixture(space)
    norm(noise(2, TOKENS, 12), pick=random_mixture(space, 1))
    with refusing_values():
        attention(norm(noise(2, TOKENS, 12), pick=mixture), pick=mixture).sum().backward()
    assert all(mixture[name].grad is not None for name in mixture.names)
    with pytest.raises(AssertionError), refusing_values():
        float(attention.out.weight.detach().sum())


def test_what_is_extracted_takes_other_batches_and_lengths_and_modes() -> None:
    space, attention = made("rotary")
    mlp = MLP(space, space.handle("width"), 8)
    block = randomise(TransformerBlock(space, space.handle("width"), attention, mlp, dropout=0.5)).eval()
    plain = plain_module(block, space.last())
    for shape in ((1, 1, 12), (3, 9, 12)):
        x = noise(*shape)
        assert torch.equal(plain.eval()(x), block(x, pick=space.last()))
        assert not torch.equal(plain.train()(x), plain(x))  # dropout works in it


def test_blocks_built_on_the_meta_device_get_the_weights_that_others_get() -> None:
    space, _ = made("rotary")
    width = space.handle("width")

    def block() -> TransformerBlock:
        attention = Attention(space, width, 2, 4, causal=True, rotary=Rotary(4))
        return TransformerBlock(space, width, attention, MLP(space, width, 8), sums=4)

    def late() -> TransformerBlock:
        with torch.device("meta"):
            return block()

    usual, other = (
        weft.initialise(weft.Chain(weft.Elastic(space, "block", make)), seed=3).module("block")
        for make in (block, late)
    )
    for one in (usual, other):
        assert 0.015 < float(one.attention.q.weight.detach().std()) < 0.025
        assert 0.0075 < float(one.attention.out.weight.detach().std()) < 0.0125
        vectors = [tensor for tensor in one.state_dict().values() if tensor.dim() == 1]
        assert all(map(torch.equal, vectors, [t for t in usual.state_dict().values() if t.dim() == 1]))


def test_heads_that_cannot_be_are_refused_with_the_pick() -> None:
    space = weft.Space()
    heads, groups = space.integer("heads", [2, 3, 4]), space.integer("groups", [1, 2])
    with pytest.raises(SupernetError, match=r"heads=3 groups=2 there are 3 heads and 2 kv_heads"):
        Attention(space, 8, heads, 4, groups)
    space.require((heads != 3) | (groups != 2))
    Attention(space, 8, heads, 4, groups)
    with pytest.raises(SupernetError, match=r"whole number of head_dim, but with heads=3 it is 5.33333"):
        Attention(space, 16, heads, 16 / heads)
    with pytest.raises(SupernetError, match=r"made for, 4, not 2, 4"):
        Attention(space, 8, 2, space.integer("size", [2, 4]), rotary=Rotary(4))
    for arguments in ((3,), (4, [1.0, 2.0, 3.0])):
        with pytest.raises(SupernetError, match="an even number"):
            Rotary(arguments[0], frequencies=arguments[1] if arguments[1:] else None)
