"""Augmentation and its draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.data import Compose, Draws, Normalise, ShiftFlip
from weft.errors import DataError
from weft.utils import rng


@given(st.lists(st.integers(0, rng.MASK), min_size=1, max_size=20))
def test_splitmix64_gives_its_published_numbers_and_the_same_for_arrays(states: list[int]) -> None:
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # for the seed 0
    assert [rng.splitmix64(n * rng.GOLDEN & rng.MASK) for n in (1, 2, 3)] == published
    assert rng.splitmix64(np.array(states, dtype=np.uint64)).tolist() == [rng.splitmix64(state) for state in states]


@given(
    samples=st.lists(st.integers(0, 2**40), min_size=1, max_size=20),
    chosen=st.data(),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 3),
)
def test_a_draw_belongs_to_its_sample_whatever_the_batch(
    samples: list[int], chosen: st.DataObject, seed: int, epoch: int
) -> None:
    at = chosen.draw(st.integers(0, len(samples) - 1))
    together, alone = Draws(seed, np.array(samples), epoch), Draws(seed, np.array(samples[at : at + 1]), epoch)
    assert np.array_equal(together.uniform("u", (2, 3))[at], alone.uniform("u", (2, 3))[0])
    assert together.integers("i", -3, 4)[at] == alone.integers("i", -3, 4)[0]


def test_draws_are_uniform_and_differ_by_seed_sample_epoch_name_and_place() -> None:
    draws = Draws(0, np.arange(20_000), 0)
    uniform, whole = draws.uniform("u"), draws.integers("i", -2, 3)
    assert 0 <= uniform.min() < uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(uniform[1:], uniform[:-1])[0, 1]) < 0.03
    counts = np.bincount(whole + 2)
    assert len(counts) == 5
    assert (abs(counts - 4_000) < 300).all()
    with pytest.raises(DataError, match="low=3, high=3"):
        draws.integers("i", 3, 3)
    others = ((0, 0, "a"), (0, 0, "b"), (1, 0, "a"), (0, 1, "a"))  # seed, epoch and name
    values = [Draws(seed, np.arange(50), epoch).uniform(name, (4,)) for seed, epoch, name in others]
    assert len(np.unique(values)) == 800


def shifted(image: np.ndarray, down: int, right: int, mirrored: bool) -> np.ndarray:
    """One image by loops: pixel (y, x) comes from (y + down, mirrored x + right), zero from outside."""
    _, height, width = image.shape
    out = np.zeros_like(image)
    for y in range(height):
        for x in range(width):
            row, column = y + down, (width - 1 - x if mirrored else x) + right
            if 0 <= row < height and 0 <= column < width:
                out[:, y, x] = image[:, row, column]
    return out


@given(
    padding=st.integers(0, 5),
    flip=st.booleans(),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)),
    epoch=st.integers(0, 3),
)
def test_shift_and_flip_equal_the_loop(padding: int, flip: bool, shape: tuple[int, int, int, int], epoch: int) -> None:
    images = np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)
    augment, draws = ShiftFlip(padding=padding, flip=flip), Draws(0, np.arange(shape[0]), epoch)
    shifts = draws.integers("shift-flip shift", -padding, padding + 1, (2,))
    mirrored = draws.uniform("shift-flip flip") < 0.5
    out = augment({"image": torch.from_numpy(images)}, draws)["image"].numpy()
    for at in range(shape[0]):
        expected = shifted(images[at], int(shifts[at, 0]), int(shifts[at, 1]), flip and bool(mirrored[at]))
        assert np.array_equal(out[at], expected)
    assert images.ravel().tolist() == list(range(1, images.size + 1)), "what is augmented stays as it was"


def test_augmentations_of_one_name_move_together() -> None:
    image = torch.rand(20, 1, 6, 6)
    both = Compose((ShiftFlip("image"), ShiftFlip("mask")))
    out = both({"image": image, "mask": image}, Draws(0, np.arange(20), 0))
    assert torch.equal(out["image"], out["mask"])
    for wrong, message in (({"x": image}, r"no key 'image'; they have \['x'\]"), ({"image": image[0]}, "n, channels")):
        with pytest.raises(DataError, match=message):
            both(wrong, Draws(0, np.arange(20), 0))
    other = ShiftFlip("mask", name="other")({"mask": image}, Draws(0, np.arange(20), 0))
    assert not torch.equal(out["image"], other["mask"])


def test_normalise_by_hand() -> None:
    batch = {"image": torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 2, 1, 2)}
    draws = Draws(0, np.arange(1), 0)
    assert Normalise("image", (1, 2), (1, 2))(batch, draws)["image"].flatten().tolist() == [0, 1, 0.5, 1]
    assert Normalise("image", 1.0, 2.0)(batch, draws)["image"].flatten().tolist() == [0, 0.5, 1, 1.5]
    in_order = Compose((Normalise("image", 1.0, 1.0), Normalise("image", 0.0, 2.0)))
    assert in_order(batch, draws)["image"].flatten().tolist() == [0, 0.5, 1, 1.5]
    with pytest.raises(DataError, match=r"3 numbers .* 2 channels"):
        Normalise("image", (1, 2, 3), 1.0)(batch, draws)
    with pytest.raises(DataError, match="floating-point"):
        Normalise("image", 1.0, 1.0)({"image": batch["image"].byte()}, draws)
