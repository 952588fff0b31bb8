"""Linear layers under a mixture, down to the probabilities: against the definition, alone and side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from elastic_law import near, noise, random_mixture, randomise, weighted_subnets
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft.elastic import MLP, Attention, Conv2d, Grid, Leaf, Linear, Mixture
from weft.elastic import linear as module
from weft.elastic.linear import linears
from weft.elastic.ops import linear as joined
from weft.elastic.ops.linear import mixed_linears

SIZES = ["heads", "ratio", "ratio down", "one choice", "inputs", "outputs", "two alone"]


def made(kind: str, count: int = 1, bias: bool = True, seed: int = 0) -> tuple[weft.Space, list[Linear]]:
    space = weft.Space()
    width = space.integer("width", [4, 6, 9])
    heads = space.integer("heads", [1, 3])
    ratio = space.categorical("ratio", [1.5, 2])
    dims: dict[str, tuple[Any, Any]] = {
        "heads": (width, 3 * heads),
        "ratio": (width, ratio * width),
        "ratio down": (ratio * width, width),
        "one choice": (width, width),
        "inputs": (width, 5),
        "outputs": (7, width),
        "two alone": (width, ratio * heads * 2),
    }
    layers = [randomise(Linear(space, *dims[kind], bias), seed + 10 * index) for index in range(count)]
    return space, layers


def literal(layers: Sequence[Linear], x: Tensor, space: weft.Space, mixture: Mixture) -> list[Tensor]:
    """The definition: weights and biases of every subnet, padded and weighed."""
    found = []
    for layer in layers:
        weight, bias = torch.zeros_like(layer.weight), torch.zeros(len(layer.weight), dtype=x.dtype)
        for prob, subnet in weighted_subnets(space, mixture):
            outputs, inputs = layer.sizes.of(subnet)
            pad = (0, weight.shape[1] - inputs, 0, weight.shape[0] - outputs)
            weight = weight + prob * F.pad(layer.weight[:outputs, :inputs], pad)
            if layer.bias is not None:
                bias = bias + prob * F.pad(layer.bias[:outputs], (0, len(bias) - outputs))
        found.append(F.linear(x, weight, bias))
    return found


def mixed(layers: Sequence[Linear], x: Tensor, mixture: Mixture) -> Tensor:
    """The layers side by side, whatever the number of tokens."""
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return mixed_linears(x, [layer.weight for layer in layers], biases, layers[0].sizes, mixture)


def along(gradient: Tensor | None) -> Tensor | None:
    """Of the gradient of probabilities, what keeps their sum: the rest means nothing."""
    return None if gradient is None else gradient - gradient.mean()


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(SIZES),
    st.integers(1, 3),
    st.booleans(),
    st.sets(st.sampled_from(["x", "weights", "biases", "probs"]), min_size=1),
    st.integers(0, 99),
)
def test_layers_side_by_side_and_their_gradients_are_those_of_the_definition(
    kind: str, count: int, bias: bool, wanted: set[str], seed: int
) -> None:
    space, layers = made(kind, count, bias, seed)
    for layer in layers:
        layer.double()
        layer.weight.requires_grad_("weights" in wanted)
        if layer.bias is not None:
            layer.bias.requires_grad_("biases" in wanted)
    rows = {name: random_mixture(space, seed, torch.float64)[name].detach() for name in space.choices}
    for row in rows.values():
        row.requires_grad_("probs" in wanted)
    x = noise(2, 3, layers[0].in_features, seed=seed).double().requires_grad_("x" in wanted)
    mixture = Mixture(space, rows)
    ours, theirs = mixed(layers, x, mixture), torch.cat(literal(layers, x, space, mixture), -1)
    near(ours.detach(), theirs.detach(), 1e-12)
    weights = [parameter for layer in layers for parameter in layer.parameters()]
    asked = [part for part in (x, *weights, *rows.values()) if part.requires_grad]
    if not asked:
        return
    gradient = noise(*ours.shape, seed=seed + 1).double()
    mine = torch.autograd.grad(ours, asked, gradient, materialize_grads=True)
    other = torch.autograd.grad(theirs, asked, gradient, materialize_grads=True)
    for part, one, two in zip(asked, mine, other, strict=True):
        prob = any(part is row for row in rows.values())
        near(along(one) if prob else one, along(two) if prob else two, 1e-11)  # type: ignore[arg-type]


class Products(TorchDispatchMode):
    """Counts the products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("which", ["q, k and v", "gate and up"])
def test_layers_of_the_same_sizes_that_read_one_input_are_one_product(which: str) -> None:
    space = weft.Space()
    width, size = space.integer("width", [4, 8]), space.integer("size", [1, 2])
    part = Attention(space, width, size, 4) if which == "q, k and v" else MLP(space, width, 6 * size, gated=True)
    x = noise(4, 64, 8)
    part(x, pick=random_mixture(space))
    with Products() as seen:
        part(x, pick=random_mixture(space))
    assert seen.count["addmm"] == 2  # theirs, and that of the last layer
    with Products() as seen:
        part(x, pick=space.last())
    assert seen.count["addmm"] == (4 if which == "q, k and v" else 3)


def test_neighbours_of_other_sizes_and_layers_that_compute_in_their_own_way_stay_apart_and_in_order() -> None:
    class Doubled(Linear):
        def forward(self, x: Tensor, pick: Any) -> Tensor:
            return 2 * super().forward(x, pick=pick)

    space = weft.Space()
    width = space.integer("width", [4, 8])
    layers = [
        kind(space, width, size) for kind, size in ((Linear, 3), (Linear, width), (Linear, width), (Doubled, width))
    ]
    layers += [Linear(space, width, width, bias=False), Linear(space, 8, 4)]
    x, mixture = noise(64, 8), random_mixture(space)
    found = linears(layers, x, mixture)
    assert [out.shape[-1] for out in found] == [3, 8, 8, 8, 8, 4]
    for out, layer in zip(found, layers, strict=True):
        near(out.detach(), layer(x, pick=mixture).detach(), 1e-6)
    plain = layers[-1]  # without choices: the same under every mixture
    assert torch.equal(found[-1], F.linear(x, plain.weight, plain.bias))


@pytest.mark.parametrize("tokens", [1, 512])
def test_few_tokens_and_many_give_the_same_whichever_way_is_taken(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    space, layers = made("heads", 3)
    x = noise(tokens, 9).requires_grad_()
    results = []
    for few in (True, False):
        monkeypatch.setattr(module, "few_tokens", lambda *_, few=few: few)
        mixture = random_mixture(space)
        out = torch.cat(linears(layers, x, mixture), -1)
        asked = [x, *(p for layer in layers for p in layer.parameters()), mixture["width"], mixture["heads"]]
        found = torch.autograd.grad(out, asked, noise(*out.shape, seed=1))
        results.append([out.detach(), *found[:-2], *(along(f) for f in found[-2:])])
    for one, two in zip(*results, strict=True):
        near(one, two, 1e-5)


def test_a_backward_goes_by_the_autocast_of_its_forward() -> None:
    space, layers = made("ratio", 2)
    x = noise(8, 9).requires_grad_()
    mixture = random_mixture(space)
    asked = [x, *(p for layer in layers for p in layer.parameters()), mixture["width"], mixture["ratio"]]
    out = mixed(layers, x, mixture)
    gradient = noise(*out.shape, seed=1)
    outside = torch.autograd.grad(out, asked, gradient, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(out, asked, gradient)
    for one, two in zip(outside, inside, strict=True):
        assert torch.equal(one, two)


def test_a_mixture_from_one_vector_cuts_what_is_asked_for_and_its_gradient_goes_back_there() -> None:
    space = weft.Space()
    for name, count in (("a", 2), ("b", 3), ("c", 2)):
        space.categorical(name, list(range(count)))
    vector = torch.tensor([0.5, 0.5, 0.2, 0.3, 0.5, 0.1, 0.9, 7.0], requires_grad=True)
    mixture = Mixture.flat(space, ["a", "b", "c"], vector)
    assert mixture.names == ("a", "b", "c")
    assert torch.equal(mixture["b"], vector[2:5])
    assert mixture["b"] is mixture["b"]
    (mixture["b"] * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert torch.equal(vector.grad, torch.tensor([0, 0, 1.0, 2.0, 3.0, 0, 0, 0]))  # type: ignore[arg-type]
    with pytest.raises(weft.WeftError, match="no probabilities for 'd'"):
        mixture["d"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_on_a_gpu_the_fused_kernels_agree_with_the_eager_path_and_with_themselves(
    kind: str, bias: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, layers = made(kind, count, bias)
    layers = [layer.cuda() for layer in layers]
    rows = {name: random_mixture(space)[name].detach().cuda().requires_grad_() for name in space.choices}
    x = noise(50, layers[0].in_features).cuda().requires_grad_()
    gradient = noise(50, count * layers[0].out_features, seed=1).cuda()
    asked = [x, *(p for layer in layers for p in layer.parameters()), *(rows[n] for n in layers[0].sizes.names)]

    def run() -> list[Tensor]:
        out = mixed(layers, x, Mixture.unchecked(space, rows))
        return [out.detach(), *torch.autograd.grad(out, asked, gradient)]

    first, again = run(), run()
    monkeypatch.setattr(joined, "linear_kernels", lambda *_: None)
    for one, two, other in zip(first, again, run(), strict=True):
        assert torch.equal(one, two)
        near(one, other, 1e-5)


@pytest.mark.parametrize("kind", ["linear", "grid", "conv"])
def test_the_backward_of_a_slice_sees_what_the_weight_holds_by_then(kind: str) -> None:
    space = weft.Space()
    width = space.integer("width", [4, 8])
    makers: dict[str, Callable[[], Leaf]] = {
        "linear": lambda: Linear(space, width, width),
        "grid": lambda: Grid(space, (width,), (2, width)),
        "conv": lambda: Conv2d(space, width, width, 3),
    }
    layer, x = makers[kind](), noise(2, 4, 5, 5) if kind == "conv" else noise(3, 4)
    small = space.first()

    def gradient(change: Callable[[], object]) -> Tensor:
        given = x.clone().requires_grad_()
        out = layer(given, small)
        change()
        (found,) = torch.autograd.grad(out, [given], torch.ones_like(out))
        return found

    before = gradient(lambda: None)
    assert torch.equal(gradient(lambda: None), before)
    assert torch.equal(gradient(lambda: layer.weight.data.mul_(2.0)), 2 * before)


def test_a_size_of_too_many_combinations_is_refused_at_once() -> None:
    space = weft.Space()
    total = sum((space.integer(f"w{i}", [1, 2, 3]) for i in range(40)), start=weft.space.Expr.of(0))
    with pytest.raises(weft.WeftError, match="combinations of options, more than 4,096"):
        Linear(space, 4, total)
