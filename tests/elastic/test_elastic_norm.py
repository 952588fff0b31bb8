"""Elastic norms and embeddings: the law, the expectation from its definition, and what is kept for the backward."""

from __future__ import annotations

import pytest
import torch
from elastic_law import (
    agrees_with_the_definition,
    chain_of,
    check_law,
    near,
    noise,
    random_mixture,
    randomise,
    saved,
    weighted_subnets,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import weft
from weft.elastic import Embedding, LayerNorm, Mixture, RMSNorm
from weft.elastic.ops.norm import mixed_norm


def widths(*values: int) -> tuple[weft.Space, object]:
    space = weft.Space()
    return space, space.integer("width", values)


NORMS = {
    "layer": lambda space, width: LayerNorm(space, width),
    "layer without bias": lambda space, width: LayerNorm(space, width, bias=False),
    "rms": lambda space, width: RMSNorm(space, width),
}


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_keeps_the_law(kind: str) -> None:
    space, width = widths(6, 11, 16)
    chain, x = chain_of(space, randomise(NORMS[kind](space, width))), noise(3, 5, 16) + 2.0
    for subnet in space.enumerate():
        check_law(chain, subnet, x, subnet["width"], dim=-1, modes=(False,), garbage=9.0)


@pytest.mark.parametrize("kind", NORMS)
def test_a_mixture_of_norms_is_the_expectation_of_padded_ones(kind: str) -> None:
    space, width = widths(6, 11, 16)
    norm = randomise(NORMS[kind](space, width))

    def literal(x: Tensor, mixture: Mixture) -> Tensor:
        out = torch.zeros_like(x)
        for prob, subnet in weighted_subnets(space, mixture):
            size = subnet["width"]
            if isinstance(norm, RMSNorm):
                one = F.rms_norm(x[..., :size], (size,), norm.weight[:size], norm.eps)
            else:
                bias = None if norm.bias is None else norm.bias[:size]
                one = F.layer_norm(x[..., :size], (size,), norm.weight[:size], bias, norm.eps)
            out = out + prob * F.pad(one, (0, 16 - size))
        return out

    agrees_with_the_definition(norm, noise(3, 5, 16) * 2.0 + 1.0, space, literal)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True),
    st.booleans(),
    st.booleans(),
    st.integers(0, 999),
)
def test_the_backward_of_a_mixed_norm_is_the_derivative_of_its_forward(
    sizes: list[int], centred: bool, shifted: bool, seed: int
) -> None:
    sizes = sorted(sizes)
    x = noise(4, sizes[-1], seed=seed).double().requires_grad_()
    weight = noise(sizes[-1], seed=seed + 1).double().requires_grad_()
    bias = noise(sizes[-1], seed=seed + 2).double().requires_grad_() if shifted and centred else None
    probs = torch.softmax(noise(len(sizes), seed=seed + 3).double(), 0).requires_grad_()

    def run(*values: Tensor) -> Tensor:
        shift = values[3] if bias is not None else None
        return mixed_norm(*values[:2], shift, values[2], tuple(sizes), 1e-2, centred)

    values = (x, weight, probs) if bias is None else (x, weight, probs, bias)
    assert torch.autograd.gradcheck(run, values)


def test_no_tokens_give_no_output_and_gradients_of_zero() -> None:
    space, width = widths(4, 8)
    norm, x = LayerNorm(space, width), noise(0, 8).requires_grad_()
    out = norm(x, pick=random_mixture(space))
    out.sum().backward()
    assert out.shape == (0, 8)
    assert norm.weight.grad is not None
    assert torch.equal(norm.weight.grad, torch.zeros(8))


@pytest.mark.parametrize("kind", NORMS)
def test_autocast_does_not_change_a_norm_of_single_precision(kind: str) -> None:
    space, width = widths(64, 96, 128)
    norm, mixture = randomise(NORMS[kind](space, width)), random_mixture(space)
    results = []
    for enabled in (False, True):
        x = noise(64, 128).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = norm(x, pick=mixture)
            results.append(
                [out.detach(), *torch.autograd.grad(out, [x, norm.weight, mixture["width"]], noise(64, 128))]
            )
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("smallest", "shift"), [(16, 50.0), (64, 50.0), (512, 300.0)])
def test_a_mixed_norm_is_about_as_accurate_as_a_plain_one(smallest: int, shift: float) -> None:
    space, width = widths(smallest, 1024)
    x = noise(200, 1024)
    x[:, smallest:] += shift  # so that the mean of the first width is far from that of the second
    exact, plain = F.layer_norm(x.double(), (1024,)).float(), F.layer_norm(x, (1024,))
    out = LayerNorm(space, width)(x, pick=Mixture.one_hot(space.last(), space))
    assert (out - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-5 * exact.abs().max()
    equal = (1e5 + 1e3 * noise(256, 1)).expand(256, 1024)
    assert LayerNorm(space, width)(equal, pick=random_mixture(space)).isfinite().all()


@pytest.mark.parametrize("kind", NORMS)
def test_under_autocast_a_mixed_norm_has_the_type_and_nearly_the_values_of_a_plain_one(kind: str) -> None:
    space, width = widths(8, 16)
    norm = randomise(NORMS[kind](space, width))
    x = noise(4, 16)
    subnet = space.last()
    mixture = Mixture.one_hot(subnet, space)
    with torch.autocast("cpu", torch.bfloat16):
        small = x.bfloat16().requires_grad_()
        mixed = norm(small, pick=mixture)
        assert mixed.dtype == norm(small, pick=subnet).dtype
    mixed.float().sum().backward()
    assert small.grad is not None
    assert small.grad.dtype == torch.bfloat16
    near(mixed.detach().float(), norm(x, pick=subnet).detach(), 0.02)


def test_a_norm_has_a_fixed_width_or_one_that_its_space_knows() -> None:
    space, width = widths(2, 3)
    norm, x = randomise(LayerNorm(space, 8)), noise(4, 8)
    assert torch.equal(norm(x, pick=random_mixture(space)), F.layer_norm(x, (8,), norm.weight, norm.bias))
    with pytest.raises(weft.WeftError, match="width"):
        LayerNorm(weft.Space(), width)


@pytest.mark.parametrize("kind", NORMS)
def test_a_mixed_norm_keeps_no_copy_of_its_input(kind: str) -> None:
    space, width = widths(192, 216, 240)
    norm = NORMS[kind](space, width)
    x = noise(64, 240).requires_grad_()
    with saved(norm) as mixed:
        norm(x, pick=random_mixture(space))
    tokens, choices = 64, 3
    statistics = (1 if kind == "rms" else 2) * tokens * choices
    assert sum(mixed) <= 4 * (x.numel() + statistics + choices + choices**2)  # the last for probabilities by width
    table, ids = Embedding(space, 9, width), torch.zeros(50, dtype=torch.int64)
    with saved(table) as mixed:
        table(ids, pick=random_mixture(space))
    assert sum(mixed) <= 8 * 50 + 4 * (240 + 3 * 240)  # the last for probabilities by place


def test_a_mixture_of_embeddings_is_the_expectation_of_padded_ones() -> None:
    space, width = widths(4, 7, 12)
    table = randomise(Embedding(space, 9, width))

    def literal(ids: Tensor, mixture: Mixture) -> Tensor:
        each = [
            prob * F.pad(F.embedding(ids, table.weight[:, : subnet["width"]]), (0, 12 - subnet["width"]))
            for prob, subnet in weighted_subnets(space, mixture)
        ]
        return torch.stack(each).sum(0)

    agrees_with_the_definition(table, torch.tensor([[0, 3, 3], [8, 1, 3]]), space, literal)
