"""Loaders: batches by number, whoever prepares them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data import Batch, Compose, Draws, Loader, Normalise, ShiftFlip, Subset, Tensors, digits
from weft.errors import DataError
from weft.utils.rng import generator


def equal(a: Batch, b: Batch) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def numbers(length: int) -> Tensors:
    return Tensors(x=torch.arange(length))


def jittered(batch: Batch, draws: Draws) -> Batch:
    """Takes longer for some batches, so that workers finish out of order."""
    time.sleep(float(draws.uniform("pause")[0]) / 500)
    return {**batch, "draw": torch.from_numpy(draws.uniform("draw"))}


def broken_at_five(batch: Batch, draws: Draws) -> Batch:
    if 5 in batch["x"]:
        raise ValueError("five is not allowed")
    return batch


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("weft-data")]


def test_a_batch_is_a_slice_of_the_keyed_permutation_of_its_epoch() -> None:
    loader = Loader(numbers(10), 3, seed=7)
    assert loader.per_epoch == 3
    order = generator(7, "epoch", 2).permutation(10)
    assert loader.batch(7)["x"].tolist() == order[3:6].tolist()
    assert loader.samples(7).tolist() == order[3:6].tolist()
    loader.batch(7)["x"].zero_()
    loader.samples(7)[:] = 0
    assert loader.batch(7)["x"].tolist() == order[3:6].tolist()
    part = Loader(Subset(numbers(30), np.arange(5, 25)), 4, 1)
    asked = [17, 0, 3, 17, 40, 3, 0]  # whatever was asked before
    assert all(equal(part.batch(i), Loader(part.source, 4, 1).batch(i)) for i in asked)
    orders = {tuple(Loader(numbers(50), 50, seed).batch(epoch)["x"].tolist()) for seed in (0, 1) for epoch in range(3)}
    assert len(orders) == 6


@given(length=st.integers(1, 40), size=st.integers(1, 40), seed=st.integers(0, 9), epoch=st.integers(0, 3))
def test_every_epoch_is_a_permutation_less_what_does_not_fill_a_batch(
    length: int, size: int, seed: int, epoch: int
) -> None:
    if size > length:
        with pytest.raises(DataError, match=rf"batch of {size} .* {length} samples"):
            Loader(numbers(length), size, seed)
        return
    loader = Loader(numbers(length), size, seed)
    start = epoch * loader.per_epoch
    seen = torch.cat([loader.batch(i)["x"] for i in range(start, start + loader.per_epoch)]).tolist()
    assert len(seen) == length // size * size
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(range(length))


@settings(max_examples=25, deadline=None)
@given(ahead=st.integers(0, 5), workers=st.integers(0, 4), start=st.integers(0, 9), count=st.integers(0, 9))
def test_iterating_equals_asking_by_number_under_any_ahead_and_workers(
    ahead: int, workers: int, start: int, count: int
) -> None:
    plain = Loader(numbers(11), 4, seed=3, augment=jittered)
    loader = Loader(numbers(11), 4, seed=3, augment=jittered, ahead=ahead, workers=workers)
    batches = list(loader.iterate(start, start + count))
    assert len(batches) == count
    assert all(equal(batch, plain.batch(start + at)) for at, batch in enumerate(batches))
    assert not own_threads()


@pytest.mark.parametrize(("ahead", "workers"), [(0, 0), (2, 0), (1, 3)])
def test_an_error_surfaces_at_its_own_batch_after_all_before_it(ahead: int, workers: int) -> None:
    loader = Loader(numbers(8), 2, 0, augment=broken_at_five, ahead=ahead, workers=workers, shuffle=False)
    batches = loader.iterate()
    assert [next(batches)["x"].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(DataError, match=r"batch 2 .*ValueError: five is not allowed") as caught:
        next(batches)
    assert isinstance(caught.value.__cause__, ValueError)
    assert not own_threads()


def test_work_goes_ahead_of_the_consumer_but_no_further_than_asked() -> None:
    prepared: list[int] = []
    three, gate = threading.Event(), threading.Event()

    def note(batch: Batch, draws: Draws) -> Batch:
        prepared.append(int(batch["x"][0]))
        if len(prepared) == 3:
            three.set()
        if len(prepared) > 3:
            gate.set()
        return batch

    batches = Loader(numbers(20), 1, 0, augment=note, ahead=2, shuffle=False).iterate()
    next(batches)
    assert three.wait(10), "batches 1 and 2 are prepared while the consumer holds batch 0"
    assert not gate.wait(0.05), "batch 3 is not, until batch 1 is asked for"
    next(batches)
    assert gate.wait(10)
    assert own_threads()
    batches.close()
    assert not own_threads()


def test_all_gives_everything_once_in_order_with_a_short_last_batch() -> None:
    loader = Loader(numbers(7), 3, 0, shuffle=False)
    for one in (loader, Loader(numbers(7), 3, 0)):
        assert [batch["x"].tolist() for batch in one.all()] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [batch["x"].tolist() for batch in loader.iterate(0, 4)] == [[0, 1, 2], [3, 4, 5]] * 2
    small = Loader(numbers(2), 3, 0, shuffle=False)
    assert [batch["x"].tolist() for batch in small.all()] == [[0, 1]]
    with pytest.raises(DataError, match=r"batch of 3 .* 2 samples"):
        small.iterate()


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"ahead": -1}, {"workers": -1}, {"start": -1}], ids=str)
def test_numbers_that_are_too_small_are_refused(options: dict[str, int]) -> None:
    start = options.pop("start", 0)
    with pytest.raises(DataError, match="got"):
        Loader(numbers(5), **{"batch_size": 1, "seed": 0, **options}).batch(start)


def test_batches_reach_a_cuda_device_whole(require: Callable[[str, bool, str], None]) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(DataError, match="no CUDA device"):
            Loader(numbers(8), 2, 0, device="cuda")
    require("cuda", torch.cuda.is_available(), "torch sees no CUDA device")
    data = digits()
    augment = Compose((ShiftFlip(padding=1), Normalise("image", (0.5,), (0.25,))))
    host = Loader(data.train, 32, 0, augment=augment)
    for loader in (
        Loader(data.train, 32, 0, augment=augment, device="cuda"),
        Loader(data.train, 32, 0, augment=augment, device="cuda", workers=2),
        Loader(data.to("cuda").train, 32, 0, augment=augment),
    ):
        batches = loader.iterate(30)
        for i in range(30, 36):
            batch, expected = next(batches), host.batch(i)
            assert all(batch[name].is_cuda and torch.equal(batch[name].cpu(), expected[name]) for name in expected)
        batches.close()
