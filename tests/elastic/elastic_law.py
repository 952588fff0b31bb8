"""The law of elastic layers, element by element: a one-hot mixture is the pick, the pick is the plain module."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from weft.elastic import Mixture
from weft.space import Space, Subnet
from weft.supernet import Chain, Elastic, extract
from weft.utils.rng import generator


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.from_numpy(generator(seed, "law", *shape).standard_normal(shape)).to(dtype)


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


def any_mixture(space: Space, seed: int = 0) -> Mixture:
    """Probabilities, in double, that are none of them equal."""
    rng = generator(seed, "mixture")
    rows = {name: rng.dirichlet(np.full(len(choice.options or ()), 2.0)) for name, choice in space.choices.items()}
    return Mixture(space, {name: torch.from_numpy(row).requires_grad_() for name, row in rows.items()})


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


def near(found: Tensor, wanted: Tensor, tolerance: float, what: str = "") -> None:
    """Every element, relative to the largest."""
    found, wanted = found.detach(), wanted.detach()
    assert found.shape == wanted.shape, (what, found.shape, wanted.shape)
    scale = float(wanted.abs().max()) if wanted.numel() else 0.0
    assert float((found - wanted).abs().max() if wanted.numel() else 0.0) <= tolerance * max(scale, 1.0), what


def _equal(some: Tensor | None, other: Tensor | None) -> bool:
    if some is None or other is None:
        return all(t is None or not t.any() for t in (some, other))
    return torch.equal(some, other)


def chain_of(space: Space, module: nn.Module) -> Chain:
    """A chain of one elastic block."""
    return Chain(Elastic(space, "layer", module))
