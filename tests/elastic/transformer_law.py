"""The law of elastic modules: a one-hot mixture is the pick, which is the extracted module; outputs and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from weft.elastic import Leaf, Mixture, Module
from weft.elastic.extract import plain_module
from weft.elastic.sizes import combinations
from weft.utils.rng import generator

Input = Callable[[weft.Subnet], Tensor]
"""The part of an input that a subnet takes."""


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(generator(seed, "noise", *shape).standard_normal(shape).astype(np.float32))


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Weights of a size that matters everywhere, gains and biases included."""
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(noise(*parameter.shape, seed=seed + index) * 0.5 + (0.3 if parameter.dim() == 1 else 0.0))
    return module


def corners(module: Module, subnet: weft.Subnet) -> dict[str, Tensor]:
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


def holds_for_picks(module: Module, part: Input, subnets: list[weft.Subnet]) -> None:
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


def holds_for_one_hots(
    module: Module, part: Input, subnets: list[weft.Subnet], space: weft.Space, garbage: float = 0.0
) -> None:
    """The one-hot mixture is the pick padded by zeros; what lies outside the pick's input does not count."""
    for kind, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        _one_hots(copy.deepcopy(module).to(kind), part, subnets, space, garbage, kind, tolerance)


def _one_hots(
    module: Module,
    part: Input,
    subnets: list[weft.Subnet],
    space: weft.Space,
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
        close(mixed, pad(out, shape), tolerance)
        if dx is not None and mixed_dx is not None:
            close(mixed_dx, pad(dx, largest.shape), tolerance)
        for name, gradient in own.items():
            close(mixed_own[name], gradient, tolerance, name)


def agrees_with_the_definition(
    module: Module,
    x: Tensor,
    space: weft.Space,
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
        close(ours, theirs, 1e-11)


def random_mixture(space: weft.Space, seed: int = 0, kind: torch.dtype = torch.float32) -> Mixture:
    rng = generator(seed, "mixture")
    rows = {}
    for name, choice in space.choices.items():
        assert choice.options is not None
        rows[name] = torch.from_numpy(rng.dirichlet(np.ones(len(choice.options)))).to(kind).requires_grad_()
    return Mixture(space, rows)


def chances(space: weft.Space, mixture: Mixture) -> Iterator[tuple[Tensor, weft.Subnet]]:
    """Every combination of options with its probability, one factor after another."""
    for values in combinations(space, list(space.choices)):
        chance = torch.ones(())
        for name, value in values.items():
            chance = chance * mixture[name][space.choices[name].options.index(value)]
        yield chance, space.subnet(values)


def expected(
    leaf: Leaf,
    space: weft.Space,
    mixture: Mixture,
    scale: Callable[[weft.Subnet], float] | None = None,
):
    """The expectation of the padded corners of a leaf's parameters, straight from the definition."""
    found = {name: torch.zeros_like(p) for name, p in leaf.named_parameters()}
    for chance, subnet in chances(space, mixture):
        factor = chance if scale is None else chance * scale(subnet)
        for name, where in corners(leaf, subnet).items():
            parameter = dict(leaf.named_parameters())[name]
            inside = torch.zeros(parameter.numel(), dtype=parameter.dtype)
            inside[where.flatten()] = 1.0
            found[name] = found[name] + factor * inside.view_as(parameter) * parameter
    return found


def pad(tensor: Tensor, shape: torch.Size | tuple[int, ...], value: float = 0.0) -> Tensor:
    out = torch.full(tuple(shape), value, dtype=tensor.dtype)
    out[tuple(slice(size) for size in tensor.shape)] = tensor
    return out


def close(ours: Tensor, theirs: Tensor, tolerance: float, name: str = "") -> None:
    """Every element, relative to the largest."""
    assert ours.shape == theirs.shape, name
    scale = max(float(theirs.abs().max()), 1.0)
    assert float((ours - theirs).abs().max()) <= tolerance * scale, name


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
