"""Photographs: which there are, how pairs are made of them, and what a PSNR is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from photographs import TRAIN, VALIDATION, Psnr, pair, super_resolution

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


def test_the_psnr_of_a_known_error_in_decibels():
    target = torch.full((2, 3, 8, 8), 0.5)
    outputs = target.clone()
    outputs[1] += 0.1  # of luma 219/255 of it
    outputs[1, :, :2], outputs[1, :, :, -2:] = 9.0, 9.0  # in the border
    total, count = Psnr(2)(outputs, {"targets": target})
    assert count == 2
    assert total.item() == pytest.approx(100.0 - 20 * math.log10(0.1 * 219 / 255), abs=1e-3)
