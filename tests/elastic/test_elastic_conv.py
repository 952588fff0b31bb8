"""Elastic convolutions and batch norms, against their definition and against plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from elastic_law import (
    agrees_with_the_definition,
    chain_of,
    check_law,
    draw,
    expected,
    near,
    padded,
    random_mixture,
    saved,
)
from torch import Tensor, nn
from torch.nn import functional as F

from weft.elastic import BatchNorm2d, Conv2d, Mixture, Patches, Sequential, SqueezeExcite
from weft.engine.batch_stats import BatchStats
from weft.errors import SupernetError
from weft.space import Space, Subnet
from weft.trainer.evaluate import Calibration
from weft.utils.rng import torch_seeded


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch_seeded("elastic conv"):
        yield


def make_space() -> Space:
    space = Space()
    space.integer("a", [2, 4, 6])
    space.integer("b", [3, 4])
    space.integer("kernel", [1, 3, 5])
    space.categorical("kind", ["small", "large"])
    return space


def make_conv(space: Space, kind: str) -> Conv2d:
    return CONVOLUTIONS[kind](space, *map(space.handle, ("a", "b", "kernel")), space.handle("kind") == "large")


CONVOLUTIONS: dict[str, Callable[..., Conv2d]] = {
    "free": lambda space, a, b, k, large: Conv2d(space, a, b, k),
    "fixed": lambda space, a, b, k, large: Conv2d(space, 3, 4, 3),
    "coupled": lambda space, a, b, k, large: Conv2d(space, a, b + 2 * large, 3 + 2 * large, bias=False),
    "depthwise": lambda space, a, b, k, large: Conv2d(space, a, a, k, groups="depthwise"),
    "depthwise coupled": lambda space, a, b, k, large: Conv2d(
        space, 2 + 4 * large, 2 + 4 * large, 1 + 2 * large, groups="depthwise"
    ),
    "grouped": lambda space, a, b, k, large: Conv2d(space, a, a, k, group_width=2),
    "strided": lambda space, a, b, k, large: Conv2d(space, a, b, k, stride=2),
    "dilated": lambda space, a, b, k, large: Conv2d(space, 3, 3, k, groups="depthwise", dilation=2, bias=False),
    "padded": lambda space, a, b, k, large: Conv2d(space, a, 5, 3, padding=0),
    "patches": lambda space, a, b, k, large: Patches(space, 2, a, 2),
}


def subnets(space: Space, names: tuple[str, ...]) -> list[Subnet]:
    """One for each combination of these choices; the others at their first option."""
    base = dict(space.first().values)
    options = [space.choices[name].options or () for name in names]
    return [space.subnet({**base, **dict(zip(names, values, strict=True))}) for values in product(*options)]


def test_a_kernel_of_three_is_the_centre_of_one_of_five_and_channels_are_the_first() -> None:
    space = Space()
    space.integer("width", [1, 2])
    space.integer("kernel", [3, 5])
    conv = Conv2d(space, 2, space.handle("width"), space.handle("kernel"), bias=False)
    assert conv.weight.shape == (2, 2, 5, 5)
    x = draw(1, 2, 6, 6, dtype=torch.float32)
    out = conv(x, space.subnet(width=1, kernel=3))
    assert torch.equal(out, F.conv2d(x, conv.weight[:1, :, 1:4, 1:4].contiguous(), padding=1))
    quarter = Mixture(space, {"width": torch.tensor([0.75, 0.25]), "kernel": torch.tensor([0.9, 0.1])})
    mask = torch.full((2, 2, 5, 5), 0.1)
    mask[:, :, 1:4, 1:4] = 1.0
    mask[1] *= 0.25
    near(conv(x, quarter), F.conv2d(x, conv.weight * mask, padding=2), 1e-6)


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_a_convolution_keeps_the_law_for_every_pick(kind: str) -> None:
    space = make_space()
    conv = make_conv(space, kind)
    chain = chain_of(space, conv)
    x = draw(2, conv.in_channels, 5, 6)
    for subnet in subnets(space, conv.sizes.names):
        outputs, within, _ = conv.sizes.of(subnet)
        inputs = outputs if conv.group_width else within * conv.groups
        check_law(chain, subnet, x, inputs)


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_under_a_mixture_a_convolution_has_the_expectation_of_its_padded_weights(kind: str) -> None:
    space = make_space()
    conv = make_conv(space, kind)

    def literal(x: Tensor, mixture: Mixture) -> Tensor:
        parts = expected(conv, space, mixture)
        return F.conv2d(x, parts["weight"], parts.get("bias"), conv.stride, conv.padding, conv.dilation, conv.groups)

    agrees_with_the_definition(conv, draw(2, conv.in_channels, 5, 6), space, literal)


def test_the_mixed_convolution_saves_hardly_more_than_a_plain_one() -> None:
    space = make_space()
    conv = Conv2d(space, 16 * space.handle("a"), 16 * space.handle("b"), space.handle("kernel"))
    x = draw(2, conv.in_channels, 6, 6, dtype=torch.float32).requires_grad_()
    mixture = random_mixture(space)
    conv._factors(mixture)

    def bytes_of(run: Callable[[], Tensor]) -> int:
        with saved(nn.Identity()) as sizes:
            assert run().requires_grad
        return sum(sizes)

    plain = bytes_of(lambda: F.conv2d(x, conv.weight, conv.bias, padding=2))
    assert bytes_of(lambda: conv(x, mixture)) <= 1.03 * plain
    assert bytes_of(lambda: F.conv2d(x, conv.weight * torch.rand_like(conv.weight), conv.bias, padding=2)) > 1.5 * plain


def test_under_autocast_gradients_come_back_in_the_types_of_their_weights() -> None:
    space = make_space()
    conv = make_conv(space, "free")
    x = draw(2, 6, 5, 5, dtype=torch.float32).requires_grad_()
    mixture = Mixture.uniform(space)
    with torch.autocast("cpu", torch.bfloat16):
        out = conv(x, mixture)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    wide = [p.grad.clone() for p in (x, *conv.parameters()) if p.grad is not None]
    for p in (x, *conv.parameters()):
        p.grad = None
    conv(x, mixture).sum().backward()
    for rough, leaf in zip(wide, (x, *conv.parameters()), strict=True):
        assert rough.dtype == torch.float32
        near(rough, leaf.grad if leaf.grad is not None else rough, 2e-2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", "a", 3, 1, 2), "groups=2"),
        (("a", "b", 2), "use odd ones"),
        (("a", "b", 3, 1, "depthwise"), "as many outputs as inputs"),
        (("a", "a", 3, 1, 1, 4), "must be multiples of the group's"),
        (("a", "a", 3, 1, "depthwise", 2), "'depthwise' or the width"),
        (("a", "b", "kernel", 1, 1, None, 1, True, 1), "kernels that vary"),
    ],
)
def test_a_convolution_that_cannot_be_is_refused(arguments: tuple[object, ...], message: str) -> None:
    space = make_space()
    sizes = [space.handle(item) if item in space.choices else item for item in arguments]
    with pytest.raises(SupernetError, match=message):
        Conv2d(space, *sizes)  # type: ignore[arg-type]


def make_norm(space: Space) -> BatchNorm2d:
    norm = BatchNorm2d(space, space.handle("a"))
    with torch.no_grad():
        for number, tensor in enumerate((*norm.parameters(), *norm.buffers())):
            if tensor.is_floating_point():
                tensor.copy_(draw(*tensor.shape, seed=number, dtype=tensor.dtype).abs() + 0.5)
    return norm


def test_a_batch_norm_keeps_the_law_for_every_pick() -> None:
    space = make_space()
    chain = chain_of(space, make_norm(space))
    for subnet in subnets(space, ("a",)):
        check_law(chain, subnet, draw(4, 6, 3, 3), int(subnet["a"]))


@pytest.mark.parametrize("training", [True, False])
def test_under_a_mixture_a_batch_norm_has_the_expectation_of_what_the_picks_give(training: bool) -> None:
    space = make_space()
    norm = make_norm(space).train(training)
    norm.momentum = 0.0  # so that the passes leave the running statistics alone

    def literal(x: Tensor, mixture: Mixture) -> Tensor:
        out = torch.zeros_like(x)
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
        if not training:
            mean, var = norm.running_mean, norm.running_var
        for prob, subnet in zip(mixture["a"].unbind(), subnets(space, ("a",)), strict=True):
            mask = padded(torch.ones(4, int(subnet["a"]), 3, 3, dtype=torch.float64), x.shape)
            normal = (x - mean[:, None, None]) / (var[:, None, None] + norm.eps).sqrt()
            out = out + prob * mask * (normal * norm.weight[:, None, None] + norm.bias[:, None, None])
        return out

    agrees_with_the_definition(norm, draw(4, 6, 3, 3), space, literal)


def test_channels_that_a_forward_did_not_see_keep_their_statistics_when_it_is_folded() -> None:
    space = make_space()
    norm = make_norm(space)
    plain = {c: nn.BatchNorm2d(c) for c in (2, 4, 6)}
    mean, var = (norm.running_mean.clone(), norm.running_var.clone())
    statistics = BatchStats("norm", norm, False)
    statistics.attach()
    records = []
    for step, width in enumerate((4, 2, 6, 2)):
        x = draw(5, width, 3, 3, seed=step, dtype=torch.float32)
        norm(x, space.subnet({**dict(space.first().values), "a": width}))
        records.append(statistics.record(copy=True))
        plain[width].running_mean, plain[width].running_var = mean[:width], var[:width]
        plain[width].train()(x)
    for record in records:
        statistics.fold(record)
    statistics.detach()
    for name, wanted in (("running_mean", mean), ("running_var", var)):
        near(getattr(norm, name), wanted, 1e-6)
    assert not norm._forward_pre_hooks


def test_a_mixture_without_a_chance_for_a_channel_leaves_its_statistics_alone() -> None:
    space = make_space()
    for attached in (False, True):
        norm = make_norm(space)
        before = norm.running_var.clone()
        statistics = BatchStats("norm", norm, False)
        if attached:
            statistics.attach()
        rows = {**Mixture.uniform(space)._probabilities, "a": torch.tensor([0.5, 0.5, 0.0])}
        norm(draw(5, 6, 3, 3, dtype=torch.float32), Mixture(space, rows)).sum().backward()
        if attached:
            statistics.fold(statistics.record(copy=False))
            statistics.detach()
        assert torch.equal(norm.running_var[4:], before[4:])
        assert (norm.running_var[:4] != before[:4]).all()


def test_a_calibration_averages_over_the_batches_of_the_pick_and_puts_everything_back() -> None:
    space = make_space()
    norm = make_norm(space)
    before = {name: b.clone() for name, b in norm.named_buffers()}
    subnet = space.subnet({**dict(space.first().values), "a": 4})
    batches = [draw(5, 4, 3, 3, seed=s, dtype=torch.float32) for s in range(3)]
    probe = draw(2, 4, 3, 3, seed=9, dtype=torch.float32)
    with Calibration([norm]) as calibration:
        for batch in batches:
            norm(batch, subnet)
        calibration.freeze()
        found = norm(probe, subnet)
    plain = nn.BatchNorm2d(4, momentum=None)
    for batch in batches:
        plain(batch)
    plain.weight.data, plain.bias.data = norm.weight.data[:4], norm.bias.data[:4]
    assert torch.equal(found, plain.eval()(probe))
    for name, buffer in norm.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_convolution_norm_and_gate_in_a_row_keep_the_law() -> None:
    space = make_space()
    a, b, kernel = (space.handle(name) for name in ("a", "b", "kernel"))
    conv, norm = Conv2d(space, a, 2 * b, kernel, bias=False), BatchNorm2d(space, 2 * b)
    chain = chain_of(space, Sequential(conv, norm, nn.Hardswish(), SqueezeExcite(space, 2 * b, b)))
    rows = subnets(space, ("a", "b", "kernel"))
    for subnet in rows[:: len(rows) // 6]:
        check_law(chain, subnet, draw(3, 6, 5, 5), int(subnet["a"]))
