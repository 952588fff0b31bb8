"""What elastic layers promise: a one-hot mixture is the subnet, and the subnet is the plain module, bit by bit.

`check_law` holds a chain to it, and `agrees_with_the_definition` a mixture to its expectation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from weft.elastic import Leaf, Mixture
from weft.elastic.extract import plain_module
from weft.elastic.sizes import combinations
from weft.space import Space, Subnet
from weft.supernet import Chain, Elastic, extract
from weft.utils.rng import generator


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.from_numpy(generator(seed, "law", *shape).standard_normal(shape)).to(dtype)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return draw(*shape, seed=seed, dtype=torch.float32)


def random_mixture(space: Space, seed: int = 0, dtype: torch.dtype = torch.float32) -> Mixture:
    """Probabilities that are all different."""
    rng = generator(seed, "mixture")
    rows = {name: rng.dirichlet(np.full(len(choice.options or ()), 2.0)) for name, choice in space.choices.items()}
    return Mixture(space, {name: torch.from_numpy(row).to(dtype).requires_grad_() for name, row in rows.items()})


def any_mixture(space: Space, seed: int = 0) -> Mixture:
    return random_mixture(space, seed, torch.float64)


def weighted_subnets(
    space: Space, mixture: Mixture, names: Sequence[str] | None = None
) -> Iterator[tuple[Tensor, Subnet]]:
    """Every combination of options of these choices (of all by default) with its probability."""
    first = {} if names is None else dict(space.first().values)
    for values in combinations(space, list(space.choices) if names is None else list(names)):
        probability = torch.ones((), dtype=torch.float64)
        for name, value in values.items():
            probability = probability * mixture[name][space.choices[name].options.index(value)]
        yield probability, space.subnet({**first, **values})


def padded(small: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor amid zeros, as a subnet's part of a convolution lies: the first channels, the centre of kernels."""
    whole = small.new_zeros(tuple(shape))
    part = whole
    for dim, size in enumerate(small.shape):
        part = part.narrow(dim, 0 if dim < 2 else (shape[dim] - size) // 2, size)
    part.copy_(small)
    return whole


def pad(tensor: Tensor, shape: Sequence[int], value: float = 0.0) -> Tensor:
    """The tensor as the first entries along every dimension."""
    out = torch.full(tuple(shape), value, dtype=tensor.dtype)
    out[tuple(slice(size) for size in tensor.shape)] = tensor
    return out


def near(found: Tensor, wanted: Tensor, tolerance: float, what: str = "") -> None:
    """Every element, relative to the largest."""
    found, wanted = found.detach(), wanted.detach()
    assert found.shape == wanted.shape, (what, found.shape, wanted.shape)
    scale = float(wanted.abs().max()) if wanted.numel() else 0.0
    assert float((found - wanted).abs().max() if wanted.numel() else 0.0) <= tolerance * max(scale, 1.0), what


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Weights of a size that matters everywhere, gains and biases included."""
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(noise(*parameter.shape, seed=seed + index) * 0.5 + (0.3 if parameter.dim() == 1 else 0.0))
    return module


def chain_of(space: Space, module: nn.Module) -> Chain:
    """A chain of one elastic block."""
    return Chain(Elastic(space, "layer", module))


def corners(module: nn.Module, subnet: Subnet, example: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """For each parameter and buffer of the plain module the places of its entries in the elastic module or chain."""
    numbered = copy.deepcopy(module)
    with torch.no_grad():
        for value in numbered.state_dict().values():
            value.copy_(torch.arange(value.numel()).view_as(value))
    plain = extract(numbered, subnet, example) if isinstance(numbered, Chain) else plain_module(numbered, subnet)
    return {name: value.long() for name, value in plain.state_dict().items()}


def check_law(
    chain: Chain,
    subnet: Subnet,
    x: Tensor,
    inputs: int | None = None,
    own_classes: tuple[type, ...] = (),
    *,
    dim: int = 1,
    modes: Sequence[bool] = (True, False),
    garbage: float = 0.0,
) -> None:
    """Trains and evaluates one subnet in all three forms.

    `inputs` is the number of features, along `dim`, of x that the subnet takes; a mixture has `garbage` in the others.
    `own_classes` may stand in the plain module.
    """
    chain.float()
    before = {name: value.clone() for name, value in chain.state_dict().items()}
    inputs = x.shape[dim] if inputs is None else inputs
    is_float = x.is_floating_point()
    try:
        for training in modes:
            chain.train(training)
            taken = (x.float() if is_float else x).narrow(dim, 0, inputs).contiguous()
            _check_plain(chain, subnet, taken, own_classes)
            chain.load_state_dict(before)
            chain.double()
            _check_one_hot(chain, subnet, x.double() if is_float else x, (dim, inputs), garbage)
            chain.float().load_state_dict(before)
    finally:
        chain.load_state_dict(before)


def _check_plain(chain: Chain, subnet: Subnet, taken: Tensor, own_classes: tuple[type, ...]) -> None:
    """The plain module computes, learns and counts the same to the last bit, and the subnet touches nothing else."""
    plain = extract(chain, subnet, {"x": taken}).train(chain.training)
    for module in plain.modules():
        assert not type(module).__module__.startswith("weft") or isinstance(module, own_classes), type(module)
    places = corners(chain, subnet, {"x": taken})
    before = {name: value.clone() for name, value in chain.named_buffers()}
    copies = [taken.clone().requires_grad_(taken.is_floating_point()) for _ in range(2)]
    chain.zero_grad()
    out, same = chain(copies[0], subnet), plain(copies[1])
    assert torch.equal(out, same)
    seed = draw(*out.shape, seed=1, dtype=out.dtype)
    out.backward(seed)
    same.backward(seed)
    assert torch.equal(*(torch.zeros_like(x) if x.grad is None else x.grad for x in copies))

    def wanted(name: str, rest: Tensor, used: dict[str, Tensor]) -> Tensor:
        rest = rest.clone().flatten()
        if name in used:
            rest[places[name].flatten()] = used[name].flatten()
        return rest

    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in plain.named_parameters()}
    for name, weight in chain.named_parameters():
        own = torch.zeros_like(weight) if weight.grad is None else weight.grad
        assert torch.equal(own.flatten(), wanted(name, torch.zeros_like(weight), gradients)), name
    buffers = dict(plain.named_buffers())
    for name, buffer in chain.named_buffers():
        assert torch.equal(buffer.flatten(), wanted(name, before[name], buffers)), name


def _check_one_hot(chain: Chain, subnet: Subnet, x: Tensor, cut: tuple[int, int], garbage: float) -> None:
    """Outputs, gradients and batch statistics of the one-hot mixture are those of the pick, amid zeros."""
    taken, tolerance = x.narrow(cut[0], 0, cut[1]), 1e-10
    before = {name: value.clone() for name, value in chain.state_dict().items()}
    results = []
    certain = Mixture.one_hot(subnet, chain.space)
    mixture = Mixture(chain.space, {name: certain[name].double() for name in chain.space.choices})
    for pick in (subnet, mixture):
        chain.load_state_dict(before)
        chain.zero_grad()
        given = taken if isinstance(pick, Subnet) else pad(taken, x.shape, garbage if x.is_floating_point() else 0)
        given = given.clone().requires_grad_(x.is_floating_point())
        out = chain(given, pick)
        out.backward(pad(draw(*(results[0][0] if results else out).shape, seed=1), out.shape))
        weights = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in chain.named_parameters()}
        back = torch.zeros_like(given) if given.grad is None else given.grad
        results.append((out.detach(), back, weights, {n: b.clone() for n, b in chain.named_buffers()}))
    (out, back, weights, buffers), (mixed, mixed_back, mixed_weights, mixed_buffers) = results
    near(mixed, pad(out, mixed.shape), tolerance)
    near(mixed_back.narrow(cut[0], 0, cut[1]), back, tolerance)
    for name, gradient in weights.items():
        near(mixed_weights[name], gradient, tolerance, name)
    for name, buffer in buffers.items():
        if not torch.equal(buffer, before[name]) and buffer.is_floating_point():
            near(mixed_buffers[name], buffer, tolerance, name)


def agrees_with_the_definition(
    module: nn.Module,
    x: Tensor,
    space: Space,
    literal: Callable[[Tensor, Mixture], Tensor],
    seed: int = 3,
) -> None:
    """Outputs and gradients are those of a slow reference; of probabilities, along what keeps their sum.

    Makes the module one of double precision.
    """
    module.double()
    x = x.double() if x.is_floating_point() else x
    rows = {name: any_mixture(space, seed)[name] for name in space.choices}
    results = []
    for run in (lambda value, pick: module(value, pick=pick), literal):
        module.zero_grad()
        for row in rows.values():
            row.grad = None
        value = x.detach().clone().requires_grad_(x.is_floating_point())
        out = run(value, Mixture(space, rows))
        (out * noise(*out.shape, seed=5).double()).sum().backward()
        along = [torch.zeros_like(row) if row.grad is None else row.grad - row.grad.mean() for row in rows.values()]
        own = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in module.parameters()]
        results.append([out.detach(), *([] if value.grad is None else [value.grad]), *own, *along])
    for ours, theirs in zip(*results, strict=True):
        near(ours, theirs, 1e-10)


def expected(
    leaf: Leaf,
    space: Space,
    mixture: Mixture,
    scale: Callable[[Subnet], float] | None = None,
) -> dict[str, Tensor]:
    """The expectation of the padded corners of a leaf's parameters, straight from the definition."""
    totals = {name: torch.zeros_like(p) for name, p in leaf.named_parameters()}
    for probability, subnet in weighted_subnets(space, mixture, leaf.sizes.names if scale is None else None):
        factor = probability if scale is None else probability * scale(subnet)
        places = corners(leaf, subnet)
        for name, parameter in leaf.named_parameters():
            if name in places:
                inside = torch.zeros(parameter.numel(), dtype=parameter.dtype)
                inside[places[name].flatten()] = 1.0
                totals[name] = totals[name] + factor * inside.view_as(parameter) * parameter
    return totals


@contextmanager
def refusing_values(*others: str) -> Iterator[None]:
    """Within the block nobody may ask for the value of a tensor, for which a GPU would have to wait, or do others."""

    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", *others)
            return func(*args, **(kwargs or {}))

    with Refusing():
        yield


@contextmanager
def saved(module: nn.Module) -> Iterator[list[int]]:
    """The bytes of the tensors that autograd keeps, parameters and repetitions apart."""
    seen = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    sizes: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in seen:
            seen.add(tensor.untyped_storage().data_ptr())
            sizes.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield sizes
