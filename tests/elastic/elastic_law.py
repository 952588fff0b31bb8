"""What elastic layers promise: a one-hot mixture is the subnet, and the subnet is the plain module, bit by bit.

`check_law` holds a chain to it, by prefixes of channels and centres of kernels; `holds_for_subnets` and
`holds_for_one_hots` hold a module to it, by prefixes of features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from weft.elastic import Leaf, Mixture, Module
from weft.elastic.extract import plain_module
from weft.elastic.sizes import combinations
from weft.space import Space, Subnet
from weft.supernet import Chain, Elastic, extract
from weft.utils.rng import generator

Input = Callable[[Subnet], Tensor]
"""The part of an input that a subnet takes."""


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


def part(whole: Tensor, shape: Sequence[int]) -> Tensor:
    """What a subnet uses of a weight or carry: the first of the first two dimensions, the centre of the others."""
    for dim, size in enumerate(shape):
        start = 0 if dim < 2 else (whole.shape[dim] - size) // 2
        whole = whole.narrow(dim, start, size)
    return whole


def padded(small: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor amid zeros, where `part` finds it."""
    whole = small.new_zeros(tuple(shape))
    part(whole, small.shape).copy_(small)
    return whole


def near(found: Tensor, wanted: Tensor, tolerance: float, what: str = "") -> None:
    """Every element, relative to the largest."""
    found, wanted = found.detach(), wanted.detach()
    assert found.shape == wanted.shape, (what, found.shape, wanted.shape)
    scale = float(wanted.abs().max()) if wanted.numel() else 0.0
    assert float((found - wanted).abs().max() if wanted.numel() else 0.0) <= tolerance * max(scale, 1.0), what


def chain_of(space: Space, module: nn.Module) -> Chain:
    """A chain of one elastic block."""
    return Chain(Elastic(space, "layer", module))


def check_law(
    chain: Chain, subnet: Subnet, x: Tensor, inputs: int | None = None, own_classes: tuple[type, ...] = ()
) -> None:
    """Trains and evaluates one subnet in all three forms.

    `inputs` is the number of channels of x that the subnet takes. `own_classes` may stand in the plain module.
    """
    chain.float()
    before = {name: value.clone() for name, value in chain.state_dict().items()}
    try:
        for training in (True, False):
            chain.train(training)
            check_plain(chain, subnet, x.float(), inputs, own_classes)
            chain.load_state_dict(before)
            chain.double()
            check_one_hot(chain, subnet, x.double(), inputs)
            chain.float().load_state_dict(before)
    finally:
        chain.load_state_dict(before)


def check_plain(chain: Chain, subnet: Subnet, x: Tensor, inputs: int | None, own_classes: tuple[type, ...]) -> None:
    """The plain module computes, learns and counts the same to the last bit, and the subnet touches nothing else."""
    taken = x if inputs is None else x[:, :inputs].contiguous()
    plain = extract(chain, subnet, {"x": taken}).train(chain.training)
    for module in plain.modules():
        assert not type(module).__module__.startswith("weft") or isinstance(module, own_classes), type(module)
    before = {name: value.clone() for name, value in chain.named_buffers()}
    given = [taken.clone().requires_grad_() for _ in range(2)]
    chain.zero_grad()
    out, same = chain(given[0], subnet), plain(given[1])
    assert torch.equal(out, same)
    seed = draw(*out.shape, seed=1, dtype=x.dtype)
    out.backward(seed)
    same.backward(seed)
    assert _equal(given[0].grad, given[1].grad)
    theirs = dict(plain.named_parameters())
    for name, weight in chain.named_parameters():
        if name not in theirs:
            assert weight.grad is None or not weight.grad.any(), name
            continue
        own = torch.zeros_like(weight) if weight.grad is None else weight.grad
        other = theirs[name].grad
        assert torch.equal(own, padded(torch.zeros_like(theirs[name]) if other is None else other, own.shape)), name
    counts = dict(plain.named_buffers())
    for name, buffer in chain.named_buffers():
        wanted = before[name].clone()
        if name in counts:
            part(wanted, counts[name].shape).copy_(counts[name])
        assert torch.equal(buffer, wanted), name


def check_one_hot(chain: Chain, subnet: Subnet, x: Tensor, inputs: int | None, tolerance: float = 1e-9) -> None:
    """Outputs, gradients and batch statistics of the one-hot mixture are those of the pick, amid zeros."""
    taken = x if inputs is None else x[:, :inputs]
    before = {name: value.clone() for name, value in chain.state_dict().items()}
    found = []
    for pick in (subnet, Mixture.one_hot(subnet, chain.space)):
        chain.load_state_dict(before)
        chain.zero_grad()
        given = taken if isinstance(pick, Subnet) else padded(taken, x.shape)
        given = given.clone().requires_grad_()
        out = chain(given, pick)
        out.backward(padded(draw(*(found[0][0] if found else out).shape, seed=1), out.shape))
        weights = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in chain.named_parameters()}
        back = torch.zeros_like(given) if given.grad is None else given.grad
        found.append((out.detach(), back, weights, {n: b.clone() for n, b in chain.named_buffers()}))
    (out, back, weights, buffers), (mixed, mixed_back, mixed_weights, mixed_buffers) = found
    near(mixed, padded(out, mixed.shape), tolerance)
    near(part(mixed_back, back.shape), back, tolerance)
    for name, gradient in weights.items():
        near(mixed_weights[name], gradient, tolerance, name)
    for name, buffer in buffers.items():
        if not torch.equal(buffer, before[name]) and buffer.is_floating_point():
            near(mixed_buffers[name], buffer, tolerance, name)


def check_agree(
    first: tuple[Tensor, Sequence[Tensor]],
    second: tuple[Tensor, Sequence[Tensor]],
    mixture: Mixture,
    names: Sequence[str],
    tolerance: float = 1e-10,
) -> None:
    """Two computations, each with its output and leaves, give the same values and the same gradients."""
    gradients = []
    for out, leaves in (first, second):
        chances = [mixture[name] for name in names]
        seed = draw(*out.shape, seed=2)
        gradients.append(torch.autograd.grad(out, [*leaves, *chances], seed, allow_unused=True, retain_graph=True))
    near(first[0], second[0], tolerance)
    for index, (own, other) in enumerate(zip(*gradients, strict=True)):
        assert own is not None or other is None
        if own is None or other is None:
            assert own is None or not own.any()
            continue
        if index >= len(first[1]):
            own, other = own - own.mean(), other - other.mean()
        near(own, other, tolerance)


def _equal(some: Tensor | None, other: Tensor | None) -> bool:
    if some is None or other is None:
        return all(t is None or not t.any() for t in (some, other))
    return torch.equal(some, other)


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Weights of a size that matters everywhere, gains and biases included."""
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(noise(*parameter.shape, seed=seed + index) * 0.5 + (0.3 if parameter.dim() == 1 else 0.0))
    return module


def corners(module: Module, subnet: Subnet) -> dict[str, Tensor]:
    """For each parameter of the extracted module the places of its entries in the elastic one."""
    numbered = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in numbered.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter))
    return {name: p.detach().long() for name, p in plain_module(numbered, subnet).named_parameters()}


def gradients(
    module: nn.Module, x: Tensor, weights: Tensor | None, **pick: object
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """The output, and the gradients of its weighted sum (random weights if not given) by input and parameters."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    out = module(x, **pick)
    weights = noise(*out.shape, seed=77).to(out.dtype) if weights is None else weights
    (out * weights).sum().backward()
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
    return out.detach(), x.grad, found


def holds_for_subnets(module: Module, part: Input, subnets: list[Subnet]) -> None:
    """The pick has the bits of the extracted module, gradients included, and nothing else gets a gradient."""
    for subnet in subnets:
        x = part(subnet)
        plain = plain_module(module, subnet)
        assert not any(isinstance(piece, Module) for piece in plain.modules())
        out, dx, own = gradients(module, x, None, pick=subnet)
        plain_out, plain_dx, plain_own = gradients(plain, x, None)
        assert torch.equal(out, plain_out)
        assert dx is None or torch.equal(dx, plain_dx)
        where = corners(module, subnet)
        assert where.keys() == plain_own.keys()
        for name, gradient in own.items():
            expected = torch.zeros_like(gradient).flatten()
            if name in where:
                expected[where[name].flatten()] = plain_own[name].flatten()
            assert torch.equal(gradient.flatten(), expected), name


def holds_for_one_hots(module: Module, part: Input, subnets: list[Subnet], space: Space, garbage: float = 0.0) -> None:
    """The one-hot mixture is the pick padded by zeros; what lies outside the pick's input does not count."""
    for kind, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        _one_hots(copy.deepcopy(module).to(kind), part, subnets, space, garbage, kind, tolerance)


def _one_hots(
    module: Module,
    part: Input,
    subnets: list[Subnet],
    space: Space,
    garbage: float,
    kind: torch.dtype,
    tolerance: float,
) -> None:
    largest = part(space.last())
    for subnet in subnets:
        x = part(subnet).to(kind) if largest.is_floating_point() else part(subnet)
        padded = pad(x, largest.shape, garbage if x.is_floating_point() else 0)
        out, dx, own = gradients(module, x, None, pick=subnet)
        weights = noise(*out.shape, seed=77).to(kind)
        certain = Mixture.one_hot(subnet, space)
        mixture = Mixture(space, {name: certain[name].to(kind) for name in space.choices})
        with torch.no_grad():
            shape = module(padded, pick=mixture).shape
        mixed, mixed_dx, mixed_own = gradients(module, padded, pad(weights, shape), pick=mixture)
        near(mixed, pad(out, shape), tolerance)
        if dx is not None and mixed_dx is not None:
            near(mixed_dx, pad(dx, largest.shape), tolerance)
        for name, gradient in own.items():
            near(mixed_own[name], gradient, tolerance, name)


def agrees_with_the_definition(
    module: Module,
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
    rows = {name: random_mixture(space, seed, torch.float64)[name] for name in space.choices}
    results = []
    for run in (lambda value, pick: module(value, pick=pick), literal):
        module.zero_grad()
        for row in rows.values():
            row.grad = None
        value = x.detach().clone().requires_grad_(x.is_floating_point())
        out = run(value, Mixture(space, rows))
        (out * noise(*out.shape, seed=5).double()).sum().backward()
        along = [torch.zeros_like(row) if row.grad is None else row.grad - row.grad.mean() for row in rows.values()]
        own = [p.grad.clone() for p in module.parameters()]
        results.append([out.detach(), *([] if value.grad is None else [value.grad]), *own, *along])
    for ours, theirs in zip(*results, strict=True):
        near(ours, theirs, 1e-11)


def expected(
    leaf: Leaf,
    space: Space,
    mixture: Mixture,
    scale: Callable[[Subnet], float] | None = None,
):
    """The expectation of the padded corners of a leaf's parameters, straight from the definition."""
    totals = {name: torch.zeros_like(p) for name, p in leaf.named_parameters()}
    for probability, subnet in weighted_subnets(space, mixture):
        factor = probability if scale is None else probability * scale(subnet)
        for name, where in corners(leaf, subnet).items():
            parameter = dict(leaf.named_parameters())[name]
            inside = torch.zeros(parameter.numel(), dtype=parameter.dtype)
            inside[where.flatten()] = 1.0
            totals[name] = totals[name] + factor * inside.view_as(parameter) * parameter
    return totals


def pad(tensor: Tensor, shape: torch.Size | tuple[int, ...], value: float = 0.0) -> Tensor:
    out = torch.full(tuple(shape), value, dtype=tensor.dtype)
    out[tuple(slice(size) for size in tensor.shape)] = tensor
    return out


@contextmanager
def refusing_values() -> Iterator[None]:
    """Within the block nobody may ask for the value of a tensor, for which a GPU would have to wait."""

    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
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
