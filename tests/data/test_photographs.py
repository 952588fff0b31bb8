"""Photographs: which there are, how pairs are made of them, and what a PSNR is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from photographs import (
    TRAIN,
    VALIDATION,
    Psnr,
    pair,
    reduced,
    super_resolution,
)

from weft.errors import DataError

pytest.importorskip("skimage")
pytest.importorskip("sklearn")


def test_parts_are_split_by_photograph():
    assert not set(TRAIN) & set(VALIDATION)
    with pytest.raises(DataError, match="'china' is in training and in validation"):
        super_resolution(train=("china",), validation=("flower", "china"))


def test_patches_are_cut_from_the_whole_pair():
    low, high = pair("chelsea", 2)
    data = super_resolution(2, 24, 12, train=("chelsea",), validation=("coffee",))
    across = (low.shape[-1] - 24) // 12 + 1
    assert len(data.train) == across * ((low.shape[-2] - 24) // 12 + 1)
    for place in (0, 1, across, len(data.train) - 1):
        row, column = 12 * (place // across), 12 * (place % across)
        found = data.train.take(np.array([place]))
        assert torch.equal(found["image"], low[..., row : row + 24, column : column + 24])
        assert torch.equal(found["targets"], high[..., 2 * row : 2 * row + 48, 2 * column : 2 * column + 48])


def test_validation_patches_lie_end_to_end_whatever_the_stride():
    few = super_resolution(3, 16, 8, train=("rocket",), validation=("flower",))
    low, _ = pair("flower", 3)
    assert len(few.validation) == (low.shape[-2] // 16) * (low.shape[-1] // 16)
    assert few.info["shape"] == (3, 16, 16)
    assert few.validation.take(np.array([0]))["targets"].shape == (1, 3, 48, 48)


def test_smaller_images_keep_what_is_flat_and_have_256_levels():
    assert torch.allclose(reduced(torch.full((1, 3, 12, 12), 51 / 255), 2), torch.full((1, 3, 6, 6), 51 / 255))
    low, high = pair("rocket", 2)
    assert low.shape[-1] * 2 == high.shape[-1]
    assert torch.equal((low * 255).round() / 255, low)
    assert 0.0 <= low.min() <= low.max() <= 1.0


def test_the_psnr_of_a_known_error_in_decibels():
    target = torch.full((2, 3, 8, 8), 0.5)
    outputs = target.clone()
    outputs[1] += 0.1  # of luma 219/255 of it
    outputs[1, :, :2], outputs[1, :, :, -2:] = 9.0, 9.0  # in the border
    total, count = Psnr(2)(outputs, {"targets": target})
    assert count == 2
    assert total.item() == pytest.approx(100.0 - 20 * math.log10(0.1 * 219 / 255), abs=1e-3)


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 3))
def test_psnr_adds_up_over_batches(first, second, border):
    drawn = torch.Generator().manual_seed(first * 10 + second)
    outputs, targets = (torch.rand(first + second, 3, 10, 10, generator=drawn) for _ in range(2))
    metric = Psnr(border)
    whole, count = metric(outputs, {"targets": targets})
    parts = [metric(outputs[part], {"targets": targets[part]}) for part in (slice(first), slice(first, None))]
    torch.testing.assert_close(whole, parts[0][0] + parts[1][0])
    assert count == parts[0][1] + parts[1][1] == first + second
