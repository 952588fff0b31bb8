"""The expected weight and the linear layer with it, against the definition: every entry by itself, in double."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from weft.elastic import Linear, Mixture
from weft.elastic.ops import linear as module
from weft.elastic.ops import weight as passes
from weft.elastic.ops.linear import mixed_linear
from weft.elastic.ops.weight import expected_weight
from weft.utils.rng import generator

FORMS = {"masked": module._Masked, "scaled": module._Scaled}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.from_numpy(generator(seed, "superpose", *shape).standard_normal(shape)).to(dtype)


def parts(
    tokens: int, inputs: int, outputs: int, rank: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """x, weight, bias, rows, columns."""
    shapes = ((2, tokens, inputs), (outputs, inputs), (outputs,), (rank, outputs), (rank, inputs))
    found = [draw(*shape, seed=seed + k, dtype=dtype) for k, shape in enumerate(shapes)]
    # As in every mixture the first entry of a columns' factor is 1, which is what the bias goes by.
    found[4] = torch.cat([torch.ones(rank, 1, dtype=dtype), found[4][:, 1:].abs()], dim=1)
    found[3] = found[3].abs()
    return [part.requires_grad_() for part in found]


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


def close(ours: Tensor | None, theirs: Tensor | None, tolerance: float = 1e-12) -> None:
    assert ours is not None
    assert theirs is not None
    assert ours.shape == theirs.shape
    torch.testing.assert_close(
        ours, theirs.to(ours.dtype), rtol=tolerance, atol=tolerance * float(theirs.detach().abs().max())
    )


def test_the_expected_weight_of_two_sizes_by_hand() -> None:
    # 2 x 2 with probability 0.25, else 1 x 2: the second row is within the pick in a quarter of the cases.
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    rows, columns = torch.tensor([[1.0, 0.25]]), torch.tensor([[1.0, 1.0]])
    assert torch.equal(expected_weight(weight, rows, columns), torch.tensor([[1.0, 2.0], [0.75, 1.0]]))
    out = mixed_linear(torch.tensor([[1.0, 1.0]]), weight, torch.tensor([1.0, 2.0]), rows, columns)
    assert torch.equal(out, torch.tensor([[4.0, 2.25]]))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(0, 99))
def test_the_expected_weight_and_its_gradients_are_those_of_the_definition(
    height: int, width: int, rank: int, seed: int
) -> None:
    _, weight, _, rows, columns = parts(1, width, height, rank, seed)
    gradient = draw(height, width, seed=seed + 9)
    ours, theirs = expected_weight(weight, rows, columns), entrywise(weight, rows, columns)
    close(ours, theirs)
    for mine, other in zip(
        torch.autograd.grad(ours, (weight, rows, columns), gradient),
        torch.autograd.grad(theirs, (weight, rows, columns), gradient),
        strict=True,
    ):
        close(mine, other)


def test_a_weight_of_four_dimensions_counts_all_but_the_first_as_columns() -> None:
    weight, rows, columns = draw(4, 3, 2, 2), draw(2, 4), draw(2, 12)
    ours = expected_weight(weight, rows, columns)
    close(ours, entrywise(weight.flatten(1), rows, columns).view(4, 3, 2, 2))
    # A gradient that is not laid out as the weight is.
    weight.requires_grad_()
    other = draw(2, 2, 3, 4).permute(3, 2, 1, 0)
    (mine,) = torch.autograd.grad(expected_weight(weight, rows, columns), weight, other)
    close(mine, torch.einsum("sr,sc->rc", rows, columns).view(4, 3, 2, 2) * other)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(FORMS)),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 3),
    st.booleans(),
    st.sets(st.integers(0, 4), min_size=1),
    st.integers(0, 99),
)
def test_both_forms_agree_with_the_definition_for_whatever_wants_a_gradient(
    form: str, tokens: int, inputs: int, outputs: int, rank: int, biased: bool, wanted: set[int], seed: int
) -> None:
    given = parts(tokens, inputs, outputs, 1 if form == "scaled" else rank, seed)
    for index, part in enumerate(given):
        part.requires_grad_(index in wanted)
    x, weight, bias, rows, columns = given
    use = bias if biased else None
    ours: Tensor = FORMS[form].apply(x, weight, use, rows, columns)
    theirs = literal(x, weight, use, rows, columns)
    close(ours, theirs)
    asked = [part for part in given if part.requires_grad and (biased or part is not bias)]
    if not asked:
        return
    gradient = draw(*ours.shape, seed=seed + 9)
    kept = gradient.clone()
    mine = torch.autograd.grad(ours, asked, gradient)
    for one, other in zip(mine, torch.autograd.grad(theirs, asked, gradient, materialize_grads=True), strict=True):
        close(one, other)
    assert torch.equal(gradient, kept)  # what belongs to the graph is not written over


def test_gradients_agree_with_finite_differences() -> None:
    for form, rank in (("masked", 3), ("masked", 1), ("scaled", 1)):
        given = parts(3, 4, 5, rank)
        # Of the columns but the first entry, which the bias takes to be 1.
        head, tail = given[4].detach()[:, :1], given[4].detach()[:, 1:].requires_grad_()

        def run(*values: Tensor, form: str = form, head: Tensor = head) -> Tensor:
            out: Tensor = FORMS[form].apply(*values[:4], torch.cat([head, values[4]], dim=1))
            return out

        assert torch.autograd.gradcheck(run, (*given[:4], tail))


@pytest.mark.parametrize("entries", [1, 7, 16, 1 << 20])
@pytest.mark.parametrize("rank", [1, 3])
def test_weights_taken_in_pieces_of_any_size_give_the_same(
    entries: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "_PIECE", entries)
    given = parts(3, 5, 7, rank)
    gradient = draw(2, 3, 7, seed=9)
    ours, theirs = module._Masked.apply(*given), literal(*given)
    close(ours, theirs)
    for one, other in zip(
        torch.autograd.grad(ours, given, gradient), torch.autograd.grad(theirs, given, gradient), strict=True
    ):
        close(one, other)
    _, weight, _, rows, columns = given
    ours, theirs = expected_weight(weight, rows, columns), entrywise(weight, rows, columns)
    close(ours, theirs)
    wanted = (weight, rows, columns)
    for one, other in zip(
        torch.autograd.grad(ours, wanted, gradient[0, :1].t() * weight),
        torch.autograd.grad(theirs, wanted, gradient[0, :1].t() * weight),
        strict=True,
    ):
        close(one, other)


@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize("wanted", [{0, 1, 2, 3, 4}, {1, 4}, {3}, {0}])
def test_a_weight_that_lies_transposed_in_memory_serves_as_well(form: str, wanted: set[int]) -> None:
    given = parts(3, 5, 7, 1 if form == "scaled" else 3)
    given[1] = given[1].detach().t().contiguous().requires_grad_()
    for index, part in enumerate(given):
        part.requires_grad_(index in wanted)
    x, turned, bias, rows, columns = given
    ours, theirs = FORMS[form].apply(x, turned.t(), bias, rows, columns), literal(x, turned.t(), bias, rows, columns)
    close(ours, theirs)
    asked = [part for part in given if part.requires_grad]
    gradient = draw(*ours.shape, seed=9)
    for one, other in zip(
        torch.autograd.grad(ours, asked, gradient), torch.autograd.grad(theirs, asked, gradient), strict=True
    ):
        close(one, other)


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
        expected = expected_weight(given[1], given[3], given[4])
        found = torch.autograd.grad(expected, [given[1], given[3], given[4]], given[1].detach())
        return [out, expected, *found, *torch.autograd.grad(out, given, gradient)]

    first, again = run(), run()
    monkeypatch.setattr(passes, "weight_kernels", lambda *_: None)
    for one, two, other in zip(first, again, run(), strict=True):
        assert torch.equal(one, two)
        close(one, other, 1e-5)


def test_which_form_is_taken_depends_on_the_tokens_and_not_on_the_result() -> None:
    taken = set()
    for tokens in (1, 4096):
        values = parts(tokens, 16, 16, 1, dtype=torch.float32)
        out = mixed_linear(*values)
        taken.add(type(out.grad_fn).__name__)
        for form in FORMS.values():
            close(out, form.apply(*values), 1e-5)
    assert taken == {"_ScaledBackward", "_MaskedBackward"}


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
        assert far(mine, truth) <= max(2 * far(other, truth), 5e-3)
    assert far(ours, exact) <= max(2 * far(plain, exact), 5e-3)


def far(found: Tensor, truth: Tensor) -> float:
    found, truth = found.detach().double(), truth.detach().double()
    return float((found - truth).norm() / truth.norm())


def test_factors_of_single_precision_serve_weights_of_double() -> None:
    x, weight, bias, rows, columns = (part.detach() for part in parts(2, 4, 6, 2))
    out = mixed_linear(x, weight, bias, rows.float(), columns.float())
    assert out.dtype == torch.float64
    close(out, literal(x, weight, bias, rows.float().double(), columns.float().double()))


def test_a_mixed_layer_agrees_with_the_sum_over_all_combinations_padded() -> None:
    space = weft.Space()
    width = space.categorical("width", [4, 6, 8])
    ratio = space.categorical("ratio", [1.5, 2])
    layer = Linear(space, width, ratio * width).double()
    probabilities = {
        "width": torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64, requires_grad=True),
        "ratio": torch.tensor([0.6, 0.4], dtype=torch.float64, requires_grad=True),
    }
    x = draw(5, 8).requires_grad_()
    weight = bias = 0
    for (i, w), (j, r) in product(enumerate((4, 6, 8)), enumerate((1.5, 2))):
        p, out = probabilities["width"][i] * probabilities["ratio"][j], int(w * r)
        weight = weight + p * F.pad(layer.weight[:out, :w], (0, 8 - w, 0, 16 - out))
        bias = bias + p * F.pad(layer.bias[:out], (0, 16 - out))
    theirs = F.linear(x, weight, bias)  # type: ignore[arg-type]
    single = {name: p.detach().float().requires_grad_() for name, p in probabilities.items()}
    ours = layer(x, pick=Mixture.unchecked(space, single))
    close(ours, theirs, 1e-6)
    gradient = draw(5, 16, seed=3)
    mine = torch.autograd.grad(ours, [x, layer.weight, layer.bias, *single.values()], gradient)
    other = torch.autograd.grad(theirs, [x, layer.weight, layer.bias, *probabilities.values()], gradient)
    for one, two in zip(mine, other, strict=True):
        size = float(two.abs().max())  # what is left where all are nearly equal is no more exact than they are
        if one.dtype == torch.float32:  # of probabilities only directions that keep the sum matter
            one, two = one - one.mean(), two - two.mean()
        torch.testing.assert_close(one, two.to(one.dtype), rtol=1e-5, atol=1e-5 * size)


@contextmanager
def saved(found: dict[int, Tensor]) -> Iterator[None]:
    def pack(tensor: Tensor) -> Tensor:
        return found.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def saved_bytes(work: Callable[[], Tensor], parameters: list[nn.Parameter]) -> int:
    """Bytes of the distinct storages that a forward keeps for the backward, parameters left out."""
    found: dict[int, Tensor] = {}
    with saved(found):
        out = work()
    for parameter in parameters:
        found.pop(parameter.untyped_storage().data_ptr(), None)
    del out
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


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

    def mixed() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            out: Tensor = layer(x, pick=Mixture.unchecked(space, probabilities))
        return out

    def alone() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            out: Tensor = plain(x)
        return out

    ours, theirs = saved_bytes(mixed, list(layer.parameters())), saved_bytes(alone, list(plain.parameters()))
    factors = 3 * (64 + 128) * 4  # rank x (inputs + outputs)
    tables = 2 * factors  # which places are within the pick, for each option: they belong to the layer
    assert ours <= theirs + factors + tables + 1024
