"""Sources, subsets and text windows."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data import Data, Source, Subset, Tensors, Text, split
from weft.data.dataset import apportion, evenly_spaced
from weft.errors import DataError


def labelled(labels: list[int]) -> Tensors:
    return Tensors(x=torch.arange(len(labels)), label=torch.tensor(labels))


def test_take_gives_the_asked_samples_in_the_asked_order() -> None:
    source = Tensors(x=torch.arange(8.0).view(4, 2), y=torch.tensor([7, 8, 9, 10]))
    batch = source.take(np.array([3, 0, 3]))
    assert batch["x"].tolist() == [[6, 7], [0, 1], [6, 7]]
    assert batch["y"].tolist() == [10, 7, 10]
    batch["x"].fill_(5)  # what is taken is a copy
    assert source.take(np.array([0]))["x"].tolist() == [[0, 1]]
    assert isinstance(source, Source)
    assert len(source) == 4
    for wrong, message in (
        ({"x": torch.zeros(3), "y": torch.zeros(4)}, r"'x': 3, 'y': 4"),
        ({}, "at least one tensor"),
    ):
        with pytest.raises(DataError, match=message):
            Tensors(**wrong)


@pytest.mark.parametrize("bad", [[-1], [3], [0, 99]])
@pytest.mark.parametrize(
    "source",
    [Tensors(x=torch.zeros(3)), Subset(Tensors(x=torch.zeros(9)), [1, 2, 3]), Text(torch.arange(10), 3)],
    ids=["tensors", "subset", "text"],
)
def test_a_sample_number_out_of_range_is_refused(source: Source, bad: list[int]) -> None:
    with pytest.raises(DataError, match="from 0 to 2"):
        source.take(np.array(bad))


def test_the_fingerprint_depends_on_names_types_shapes_and_every_value() -> None:
    x = torch.arange(6, dtype=torch.float32)
    sources = [
        Tensors(x=x),
        Tensors(y=x),
        Tensors(x=x.double()),
        Tensors(x=x.view(6, 1)),
        Tensors(x=x.view(3, 2)),
        Tensors(x=x + torch.eye(6)[5] * 1e-6),
        Tensors(x=x, y=x),
        Tensors(x=x.bfloat16()),
        Subset(Tensors(x=x), [0, 1]),
        Subset(Tensors(x=x), [1, 0]),
    ]
    prints = [source.fingerprint() for source in sources]
    assert len(set(prints)) == len(prints)
    assert Tensors(x=x.clone()).fingerprint() == prints[0]
    again = [pickle.loads(pickle.dumps(source)) for source in sources]
    assert [source.fingerprint() for source in again] == prints
    a, b = sources[:2]
    assert Data("n", a, b).fingerprint() == Data("m", a, b).fingerprint()
    prints = {Data("n", a, b).fingerprint(), Data("n", b, a).fingerprint(), Data("n", a, None, b).fingerprint()}
    assert len(prints) == 3


def test_a_subset_of_a_subset_counts_from_its_own_zero() -> None:
    inner = Subset(Subset(Tensors(x=torch.arange(10)), [9, 7, 5, 3]), [3, 1])
    assert inner.take(np.array([0, 1]))["x"].tolist() == [3, 7]
    assert inner.column("x").tolist() == [3, 7]
    with pytest.raises(DataError, match="from 0 to 9"):
        Subset(Tensors(x=torch.arange(10)), [10])


def test_moved_parts_share_one_copy_and_keep_values_and_fingerprint() -> None:
    source = Tensors(x=torch.arange(6))
    data = Data("d", Subset(source, [0, 1, 2]), Subset(source, [3, 4]))
    there = data.to("meta")
    assert isinstance(there.train, Subset)
    assert isinstance(there.validation, Subset)
    assert there.train.source is there.validation.source
    assert there.train.device.type == "meta"
    assert data.to("cpu").train.fingerprint() == data.train.fingerprint()


@given(length=st.integers(2, 40), context=st.integers(1, 12), stride=st.integers(1, 12))
def test_text_holds_every_window_that_fits_and_no_other(length: int, context: int, stride: int) -> None:
    tokens = (torch.arange(length) * 3).to(torch.uint8)
    expected = [
        (tokens[at : at + context].tolist(), tokens[at + 1 : at + 1 + context].tolist())
        for at in range(0, length, stride)
        if at + context + 1 <= length
    ]
    if not expected:
        with pytest.raises(DataError, match=f"at least {context + 1} tokens"):
            Text(tokens, context, stride)
        return
    source = Text(tokens, context, stride)
    batch = source.take(np.arange(len(source)))
    assert list(zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True)) == expected
    assert batch["tokens"].dtype == torch.int64
    assert len(Text(tokens, context)) == (length - 1) // context


fractions = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(lambda weights: [w / sum(weights) for w in weights])


@given(labels=st.lists(st.integers(-1, 4), min_size=1, max_size=80), fractions=fractions, seed=st.integers(0, 5))
def test_splits_are_disjoint_cover_everything_and_are_stratified(
    labels: list[int], fractions: list[float], seed: int
) -> None:
    source = labelled(labels)
    if len(labels) * min(fractions) < 2:  # parts of fewer than two may be rounded away
        return
    parts = split(source, fractions, seed, stratify="label")
    assert sorted(np.concatenate([part.indices for part in parts]).tolist()) == list(range(len(labels)))
    for part, fraction in zip(parts, fractions, strict=True):
        of_part = part.column("label").tolist()
        for label in set(labels):
            assert abs(of_part.count(label) - fraction * labels.count(label)) < 1 + 1e-6
    again = split(source, fractions, seed, stratify="label")
    assert all(np.array_equal(a.indices, b.indices) for a, b in zip(parts, again, strict=True))
    orders = {tuple(split(labelled([0] * 100), (0.5, 0.5), other)[0].indices.tolist()) for other in (seed, seed + 1)}
    assert len(orders) == 2


@given(totals=st.lists(st.integers(0, 30), min_size=1, max_size=12), fractions=fractions)
def test_two_parts_are_also_right_in_their_sums(totals: list[int], fractions: list[float]) -> None:
    counts = apportion(np.array(totals), fractions)
    assert counts.sum(axis=1).tolist() == totals
    assert (counts >= 0).all()
    if len(fractions) == 2:
        assert (abs(counts.sum(axis=0) - sum(totals) * np.array(fractions)) < 1 + 1e-6).all()


@pytest.mark.parametrize(
    ("source", "fractions", "stratify", "message"),
    [
        *((labelled([0, 1, 2]), bad, None, "add up to 1") for bad in ((), (0.5,), (0.5, 0.6), (1.5, -0.5), (1.0, 0.0))),
        (labelled([0, 1]), (0.9, 0.05, 0.05), None, "2 samples are too few"),
        (Tensors(label=torch.rand(4)), (0.5, 0.5), "label", "one integer a sample"),
        (labelled([0, 1]), (0.5, 0.5), "lable", "no key 'lable'"),
    ],
)
def test_fractions_and_labels_that_make_no_split_are_refused(
    source: Source, fractions: tuple[float, ...], stratify: str | None, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        split(source, fractions, 0, stratify)


@settings(max_examples=50)
@given(length=st.integers(0, 50), limit=st.none() | st.integers(1, 60))
def test_a_limit_spreads_distinct_samples_over_the_whole(length: int, limit: int | None) -> None:
    chosen = evenly_spaced(length, limit).tolist()
    assert len(chosen) == (length if limit is None else min(length, limit))
    assert len(set(chosen)) == len(chosen)
    gaps = np.diff([*chosen, length])
    assert not chosen or (chosen[0] == 0 and gaps.max() - gaps.min() <= 1)
