"""SwinIR: what it computes, by hand and by a slow oracle, and where it runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from swinir_network import Layer, SwinIR, shift_mask
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from weft.errors import SupernetError
from weft.plan.capture import capture


def small(**sizes):
    torch.manual_seed(0)
    return SwinIR(**{"scale": 2, "embed": 8, "depths": (2, 2), "heads": 2, "window": 4, **sizes})


def moved(model):
    """With weights that are large enough for every part to matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def test_the_mask_of_four_windows_drawn_by_hand():
    # Rolled by one, the last row and column of the image lie beside the first ones.
    mask = shift_mask(4, 4, 2, torch.device("cpu"))
    assert mask.shape == (4, 1, 4, 4)
    seen = mask[:, 0] == 0
    assert seen[0].all()
    assert seen[1].tolist() == [[i % 2 == j % 2 for j in range(4)] for i in range(4)]  # left and right are strangers
    assert seen[2].tolist() == [[i // 2 == j // 2 for j in range(4)] for i in range(4)]  # above and below are
    assert seen[3].tolist() == [[i == j for j in range(4)] for i in range(4)]
    assert shift_mask(4, 2, 2, torch.device("cpu")) is None


def attended(layer, x):
    """What a layer's attention gives, place by place: who sees whom is said in the unrolled image."""
    _, height, width, embed = x.shape
    m, heads = layer.window, layer.attention.heads
    shift = layer.shift if min(height, width) > m else 0
    q, k, v = layer.attention.qkv(layer.norm1(x)).chunk(3, -1)
    out = torch.zeros_like(x)

    def window(i, j):
        return (i + m - shift) // m, (j + m - shift) // m

    places = [(i, j) for i in range(height) for j in range(width)]
    for i, j in places:
        near = [(a, b) for a, b in places if window(a, b) == window(i, j)]
        for head in range(heads):
            part = slice(head * embed // heads, (head + 1) * embed // heads)
            keys = torch.stack([k[:, a, b, part] for a, b in near], 1)
            values = torch.stack([v[:, a, b, part] for a, b in near], 1)
            bias = torch.stack(
                [layer.attention.bias[(i - a + m - 1) * (2 * m - 1) + (j - b + m - 1), head] for a, b in near]
            )
            scores = (keys @ q[:, i, j, part, None])[..., 0] / (embed // heads) ** 0.5 + bias
            out[:, i, j, part] = (scores.softmax(1)[..., None] * values).sum(1)
    return layer.attention.out(out)


@settings(max_examples=5, deadline=None)
@given(st.sampled_from([(4, 4), (4, 8), (8, 8), (12, 8)]), st.booleans(), st.sampled_from([1, 2]))
def test_a_layer_attends_within_shifted_windows_as_an_oracle_does_place_by_place(size, shifted, heads):
    torch.manual_seed(1)
    layer, x = moved(Layer(4, heads, 4, 2.0, shifted)), torch.randn(2, *size, 4)
    expected = x + attended(layer, x)
    expected = expected + layer.mlp(layer.norm2(expected))
    found = layer(x, shift_mask(*size, 4, x.device))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=5, deadline=None)
@given(st.integers(4, 11), st.integers(4, 11), st.sampled_from([2, 3]))
def test_images_of_any_size_come_out_as_many_times_as_large(height, width, scale):
    with torch.no_grad():
        assert small(scale=scale)(torch.rand(2, 3, height, width)).shape == (2, 3, height * scale, width * scale)


def test_an_image_is_continued_by_its_mirror_image():
    model, image = moved(small()), torch.rand(1, 3, 5, 6)
    padded = torch.cat([image, image[:, :, 1:4].flip(2)], 2)
    padded = torch.cat([padded, padded[..., 3:5].flip(3)], 3)
    assert padded.shape == (1, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(model(image), model(padded)[:, :, :10, :12])


def test_an_anchored_network_begins_as_bicubic_interpolation():
    image = torch.rand(2, 3, 8, 8)
    expected = F.interpolate(image, scale_factor=2, mode="bicubic")
    with torch.no_grad():
        assert torch.equal(small(anchored=True)(image), expected)
        assert not torch.allclose(small()(image), expected, atol=0.1)


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(SupernetError, match="heads divide"):
        small(embed=9)
    with pytest.raises(SupernetError, match="sizes of 1 or more"):
        small(depths=())
    with pytest.raises(SupernetError, match="3 x 9 is smaller than a window of 4"):
        small()(torch.rand(1, 3, 3, 9))


def test_the_papers_light_network_has_the_weights_counted_by_hand():
    c = 60
    layer = 2 * 2 * c + (3 * c * c + 3 * c) + (c * c + c) + 15 * 15 * 6 + 2 * (2 * c * c) + 3 * c
    conv = 9 * c * c + c
    expected = (9 * 3 * c + c) + 4 * (6 * layer + conv) + conv + (9 * c * 12 + 12)
    assert sum(p.numel() for p in SwinIR(2, 60, (6, 6, 6, 6), 6).parameters()) == expected == 909_912


def test_it_is_captured_and_traced_without_data():
    model, image = small(depths=(2,)), torch.rand(2, 3, 8, 8)
    captured = capture(model, image)
    assert captured.method == "export"
    assert all(operator.known for operator in captured.graph.operators)
    torch.testing.assert_close(captured.program.module()(input_0=image), model(image))
    with FakeTensorMode():
        small()(torch.rand(2, 3, 10, 8)).sum().backward()
    with torch.device("meta"):
        assert isinstance(small(), nn.Module)
