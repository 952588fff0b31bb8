"""The expected weight and the linear layer with it, against the definition: every entry by itself, in double."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from elastic_law import draw, near, saved
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from weft.elastic import Linear, Mixture
from weft.elastic.ops import linear as module
from weft.elastic.ops import weight as passes
from weft.elastic.ops.linear import mixed_linear

FORMS = {"masked": module._Masked, "scaled": module._Scaled}


def parts(
    tokens: int, inputs: int, outputs: int, rank: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """x, weight, bias, rows, columns."""
    shapes = ((2, tokens, inputs), (outputs, inputs), (outputs,), (rank, outputs), (rank, inputs))
    tensors = [draw(*shape, seed=seed + k, dtype=dtype) for k, shape in enumerate(shapes)]
    # As in every mixture the first entry of a columns' factor is 1, which is what the bias goes by.
    tensors[4] = torch.cat([torch.ones(rank, 1, dtype=dtype), tensors[4][:, 1:].abs()], dim=1)
    tensors[3] = tensors[3].abs()
    return [part.requires_grad_() for part in tensors]


def entrywise(weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Every entry by itself, from the definition."""
    entries = [
        weight[r, c] * sum(rows[s, r] * columns[s, c] for s in range(len(rows)))
        for r, c in product(range(weight.shape[0]), range(weight.shape[1]))
    ]
    return torch.stack(entries).view_as(weight)


def literal(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor:
    inside = None if bias is None else bias * sum(rows[s] * columns[s, 0].detach() for s in range(len(rows)))
    return F.linear(x, entrywise(weight, rows, columns), inside)


def agree(ours: Tensor, theirs: Tensor, asked: list[Tensor], seed: int = 0) -> None:
    """The same values and gradients; what belongs to the graph is not written over."""
    near(ours, theirs, 1e-12)
    if not asked:
        return
    gradient = draw(*ours.shape, seed=seed + 9)
    kept = gradient.clone()
    mine = torch.autograd.grad(ours, asked, gradient)
    for one, other in zip(mine, torch.autograd.grad(theirs, asked, gradient, materialize_grads=True), strict=True):
        near(one, other, 1e-12)
    assert torch.equal(gradient, kept)


PIECES = st.sampled_from([1, 7, 16, 1 << 20])
"""How many entries of a weight are taken at once."""


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(FORMS)),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.sets(st.integers(0, 4), min_size=1),
    PIECES,
    st.integers(0, 99),
)
def test_both_forms_agree_with_the_definition_for_whatever_wants_a_gradient(
    form: str,
    tokens: int,
    inputs: int,
    outputs: int,
    rank: int,
    biased: bool,
    transposed: bool,
    wanted: set[int],
    entries: int,
    seed: int,
) -> None:
    """A weight may lie transposed in memory, and be taken in pieces of any size."""
    leaves = parts(tokens, inputs, outputs, 1 if form == "scaled" else rank, seed)
    if transposed:
        leaves[1] = leaves[1].detach().t().contiguous()
    for index, part in enumerate(leaves):
        part.requires_grad_(index in wanted)
    x, weight, bias, rows, columns = leaves
    arguments = x, weight.t() if transposed else weight, bias if biased else None, rows, columns
    asked = [part for part in leaves if part.requires_grad and (biased or part is not bias)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "_PIECE", entries)
        agree(FORMS[form].apply(*arguments), literal(*arguments), asked, seed)


@pytest.mark.parametrize("form", sorted(FORMS))
def test_a_backward_goes_by_the_autocast_of_its_forward(form: str) -> None:
    given = parts(4, 6, 8, 1, dtype=torch.float32)
    gradient = draw(2, 4, 8, seed=9, dtype=torch.float32)
    out = FORMS[form].apply(*given)
    outside = torch.autograd.grad(out, given, gradient, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(out, given, gradient)
    for one, other in zip(outside, inside, strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rank", [1, 3, 16])
def test_on_a_gpu_the_fused_kernels_agree_with_the_eager_path_and_with_themselves(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [part.detach().cuda().requires_grad_() for part in parts(50, 70, 130, rank, dtype=torch.float32)]
    gradient = draw(2, 50, 130, seed=9, dtype=torch.float32).cuda()

    def run() -> list[Tensor]:
        out = mixed_linear(*given)
        return [out, *torch.autograd.grad(out, given, gradient)]

    first, again = run(), run()
    monkeypatch.setattr(passes, "weight_kernels", lambda *_: None)
    for one, two, other in zip(first, again, run(), strict=True):
        assert torch.equal(one, two)
        near(one, other, 1e-5)


def test_few_tokens_are_scaled_and_for_many_the_weight_is_masked() -> None:
    taken = [type(mixed_linear(*parts(tokens, 16, 16, 1)).grad_fn).__name__ for tokens in (1, 4096)]
    assert taken == ["_ScaledBackward", "_MaskedBackward"]


@pytest.mark.parametrize("form", sorted(FORMS))
def test_under_autocast_outputs_and_gradients_have_the_dtypes_and_the_accuracy_of_a_plain_layer(form: str) -> None:
    given = parts(64, 32, 48, 1, dtype=torch.float32)
    x, weight, bias, rows, columns = given
    with torch.autocast("cpu", torch.bfloat16):
        ours: Tensor = FORMS[form].apply(*given)
        plain = F.linear(x, weight * rows.t() * columns, bias * rows[0])
    assert ours.dtype == plain.dtype == torch.bfloat16
    gradient = draw(*ours.shape, seed=9, dtype=torch.bfloat16)
    exact = literal(*(part.double() for part in given))
    wanted = torch.autograd.grad(exact, given, gradient.double())
    by_plain = torch.autograd.grad(plain, given, gradient)
    for mine, other, truth in zip(torch.autograd.grad(ours, given, gradient), by_plain, wanted, strict=True):
        assert mine.dtype == other.dtype == torch.float32
        assert distance(mine, truth) <= max(2 * distance(other, truth), 5e-3)
    assert distance(ours, exact) <= max(2 * distance(plain, exact), 5e-3)


def distance(result: Tensor, truth: Tensor) -> float:
    result, truth = result.detach().double(), truth.detach().double()
    return float((result - truth).norm() / truth.norm())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "outputs"), [(8, "ratio"), (512, "ratio"), (8, "heads"), (512, "heads")])
def test_a_mixed_layer_saves_no_more_than_a_plain_one_but_for_its_factors(
    tokens: int, outputs: str, dtype: torch.dtype | None
) -> None:
    space = weft.Space()
    width = space.categorical("width", [32, 48, 64])
    ratio = space.categorical("ratio", [1.5, 2])
    heads = space.categorical("heads", [2, 4])
    layer = Linear(space, width, {"ratio": ratio * width, "heads": 32 * heads}[outputs])
    plain = nn.Linear(layer.in_features, layer.out_features)
    x = draw(tokens, 64, dtype=torch.float32).requires_grad_()
    choices = {"width": 3, "ratio": 2, "heads": 2}
    probabilities = {name: torch.full((n,), 1 / n, requires_grad=True) for name, n in choices.items()}

    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        with saved(layer) as ours:
            layer(x, pick=Mixture.unchecked(space, probabilities))
        with saved(plain) as theirs:
            plain(x)
    factors = 3 * (64 + 128) * 4  # rank x (inputs + outputs)
    tables = 2 * factors  # which places are within the pick, for each option: they belong to the layer
    assert sum(ours) <= sum(theirs) + factors + tables + 1024
