"""Elastic norms and embeddings: the law, the expectation from its definition, and what is kept for the backward."""

from __future__ import annotations

import pytest
import torch
from elastic_law import (
    agrees_with_the_definition,
    holds_for_one_hots,
    holds_for_subnets,
    near,
    noise,
    random_mixture,
    randomise,
    refusing_values,
    saved,
    weighted_subnets,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import weft
from weft.elastic import Embedding, LayerNorm, Leaf, Mixture, RMSNorm
from weft.elastic.ops import norm as norm_chunks
from weft.elastic.ops import norm as normalise


def widths(*values: int) -> tuple[weft.Space, object]:
    space = weft.Space()
    return space, space.integer("width", values)


NORMS = {
    "layer": lambda space, width: LayerNorm(space, width),
    "layer without bias": lambda space, width: LayerNorm(space, width, bias=False),
    "rms": lambda space, width: RMSNorm(space, width),
}


def test_a_mixture_of_two_widths_is_the_mean_of_two_padded_norms() -> None:
    space, width = widths(2, 4)
    norm = LayerNorm(space, width, eps=0.0)
    mixture = Mixture(space, {"width": torch.tensor([0.25, 0.75])})
    x = torch.tensor([[0.0, 2.0, 4.0, 6.0]])
    # Over the first two: -1, 1. Over all four, mean 3 and deviation sqrt(5): -3, -1, 1, 3, each by sqrt(5).
    root = 5**0.5
    wanted = [-0.25 - 0.75 * 3 / root, 0.25 - 0.75 / root, 0.75 / root, 0.75 * 3 / root]
    torch.testing.assert_close(norm(x, pick=mixture), torch.tensor([wanted]))


@pytest.mark.parametrize("kind", NORMS)
def test_pick_and_one_hot_and_plain_norms_are_one(kind: str) -> None:
    space, width = widths(6, 11, 16)
    norm = randomise(NORMS[kind](space, width))
    x = noise(3, 5, 16) + 2.0
    subnets = list(space.enumerate())

    def part(subnet: weft.Subnet) -> Tensor:
        return x[..., : subnet["width"]]

    holds_for_subnets(norm, part, subnets)
    holds_for_one_hots(norm, part, subnets, space, garbage=9.0)


@pytest.mark.parametrize("kind", NORMS)
def test_a_mixture_of_norms_is_the_expectation_of_padded_ones(kind: str) -> None:
    space, width = widths(6, 11, 16)
    norm = randomise(NORMS[kind](space, width))

    def literal(x: Tensor, mixture: Mixture) -> Tensor:
        out = torch.zeros_like(x)
        for chance, subnet in weighted_subnets(space, mixture):
            size = subnet["width"]
            if isinstance(norm, RMSNorm):
                one = F.rms_norm(x[..., :size], (size,), norm.weight[:size], norm.eps)
            else:
                bias = None if norm.bias is None else norm.bias[:size]
                one = F.layer_norm(x[..., :size], (size,), norm.weight[:size], bias, norm.eps)
            out = out + chance * F.pad(one, (0, 16 - size))
        return out

    agrees_with_the_definition(norm, noise(3, 5, 16) * 2.0 + 1.0, space, literal)


WAYS = {"all widths at once": normalise._SegmentedNorm.apply, "by chunks": norm_chunks.chunked_norm}


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True),
    st.booleans(),
    st.booleans(),
    st.integers(0, 999),
)
def test_the_backward_of_a_mixed_norm_is_the_derivative_of_its_forward(
    way: str, sizes: list[int], centred: bool, shifted: bool, seed: int
) -> None:
    sizes = sorted(sizes)
    x = noise(4, sizes[-1], seed=seed).double().requires_grad_()
    weight = noise(sizes[-1], seed=seed + 1).double().requires_grad_()
    bias = noise(sizes[-1], seed=seed + 2).double().requires_grad_() if shifted and centred else None
    likely = torch.softmax(noise(len(sizes), seed=seed + 3).double(), 0).requires_grad_()

    def run(*values: Tensor) -> Tensor:
        shift = values[3] if bias is not None else None
        out: Tensor = WAYS[way](*values[:2], shift, values[2], tuple(sizes), 1e-2, centred)
        return out

    values = (x, weight, likely) if bias is None else (x, weight, likely, bias)
    assert torch.autograd.gradcheck(run, values)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("wanted", [{0}, {1}, {2}, {3}, {0, 1, 2, 3}])
def test_both_ways_agree_on_whatever_wants_a_gradient(wanted: set[int], biased: bool) -> None:
    values = [noise(3, 7, 16).double() + 1, noise(16, seed=1).double(), noise(16, seed=2).double()]
    values.append(torch.softmax(noise(3, seed=3).double(), 0))
    for index, value in enumerate(values):
        value.requires_grad_(index in wanted)
    x, weight, bias, likely = values
    asked = [value for value in values if value.requires_grad and (biased or value is not bias)]
    if not asked:
        return
    results = []
    for run in WAYS.values():
        out = run(x, weight, bias if biased else None, likely, (5, 6, 16), 1e-5, True)
        results.append([out.detach(), *torch.autograd.grad(out, asked, noise(*out.shape, seed=4).double())])
    for one, other in zip(*results, strict=True):
        near(one, other, 1e-12)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(("tokens", "chunks"), [(1, 7), (3, 3), (4, 2), (6, 2), (7, 1), (8, 1)])
def test_each_token_is_in_one_chunk(tokens: int, chunks: int, centred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_chunks, "_tokens", lambda _: tokens)
    x, weight, bias = noise(7, 16).double() + 1, noise(16, seed=1).double(), noise(16, seed=2).double()
    values = [x, weight, bias, torch.softmax(noise(3, seed=3).double(), 0)]
    assert len(list(norm_chunks._chunks((x,), (None,)))) == chunks
    results = []
    for run in WAYS.values():
        held = [value.clone().requires_grad_() for value in values]
        out = run(*held, (5, 6, 16), 1e-5, centred)
        results.append([out.detach(), *torch.autograd.grad(out, held, noise(7, 16, seed=4).double())])
    for one, other in zip(*results, strict=True):
        near(one, other, 1e-12)


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


@pytest.mark.parametrize("smallest", [16, 64])
def test_widths_far_apart_keep_the_accuracy_of_a_one_hot(smallest: int) -> None:
    space, width = widths(smallest, 1024)
    norm = LayerNorm(space, width)
    x = noise(200, 1024)
    x[:, smallest:] += 50.0  # so that the mean of the first width is far from that of the second
    exact = F.layer_norm(x.double(), (1024,)).float()
    out = norm(x, pick=Mixture.one_hot(space.last(), space))
    assert (out - exact).abs().max() <= 1e-5 * exact.abs().max()


def test_a_token_of_equal_large_features_stays_finite() -> None:
    space, width = widths(60, 113, 128)
    x = (1e5 + 1e3 * noise(256, 1)).expand(256, 128).clone()
    assert LayerNorm(space, width)(x, pick=random_mixture(space)).isfinite().all()


@pytest.mark.parametrize("chunked", [True, False])
def test_a_large_mean_costs_a_mixed_norm_no_more_accuracy_than_a_plain_one(
    chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(normalise, "by_chunks", lambda *_: chunked)
    space, width = widths(64, 128)
    norm = LayerNorm(space, width)
    x = noise(64, 128) + 300.0
    mixture = Mixture.one_hot(space.last(), space)
    exact = F.layer_norm(x.double(), (128,)).float()
    plain = F.layer_norm(x, (128,))
    assert (norm(x, pick=mixture) - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-6


def test_a_norm_of_fixed_width_is_a_plain_one_under_every_mixture() -> None:
    space, _ = widths(2, 3)
    norm = randomise(LayerNorm(space, 8))
    x = noise(4, 8)
    mixed = norm(x, pick=random_mixture(space))
    assert torch.equal(mixed, F.layer_norm(x, (8,), norm.weight, norm.bias))


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


def test_pick_and_one_hot_and_plain_embeddings_are_one() -> None:
    space, width = widths(4, 7, 12)
    table = randomise(Embedding(space, 9, width))
    ids = torch.tensor([[0, 3, 3], [8, 1, 3]])
    subnets = list(space.enumerate())
    holds_for_subnets(table, lambda _: ids, subnets)
    holds_for_one_hots(table, lambda _: ids, subnets, space)


def test_a_mixture_of_embeddings_is_the_expectation_of_padded_ones() -> None:
    space, width = widths(4, 7, 12)
    table = randomise(Embedding(space, 9, width))

    def literal(ids: Tensor, mixture: Mixture) -> Tensor:
        each = [
            chance * F.pad(F.embedding(ids, table.weight[:, : subnet["width"]]), (0, 12 - subnet["width"]))
            for chance, subnet in weighted_subnets(space, mixture)
        ]
        return torch.stack(each).sum(0)

    agrees_with_the_definition(table, torch.tensor([[0, 3, 3], [8, 1, 3]]), space, literal)


def test_a_mixed_embedding_keeps_its_ids_alone() -> None:
    space, width = widths(4, 12)
    table = Embedding(space, 9, width)
    ids = torch.zeros(50, dtype=torch.int64)
    with saved(table) as mixed:
        table(ids, pick=random_mixture(space))
    assert sum(mixed) <= 8 * 50 + 4 * (12 + 2 * 12)  # the last for probabilities by place


@pytest.mark.parametrize("kind", ["norm", "table"])
def test_the_mixture_path_never_asks_for_a_value(kind: str) -> None:
    space, width = widths(4, 12)
    module: Leaf = LayerNorm(space, width) if kind == "norm" else Embedding(space, 9, width)
    x = noise(2, 3, 12) if kind == "norm" else torch.zeros(2, 3, dtype=torch.int64)
    module(x, pick=random_mixture(space, 1))  # what is constant is worked out once
    mixture = random_mixture(space)
    with refusing_values():
        module(x, pick=mixture).sum().backward()
    assert mixture["width"].grad is not None
    with pytest.raises(AssertionError), refusing_values():
        float(module.weight.detach().sum())


def test_a_width_that_reads_nothing_known_is_refused() -> None:
    other, width = widths(4, 8)
    assert other.size() == 2
    with pytest.raises(weft.WeftError, match="width"):
        LayerNorm(weft.Space(), width)
