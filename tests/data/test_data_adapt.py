"""Foreign datasets and loaders, with torch's real ones."""

from __future__ import annotations

import multiprocessing
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from weft.data import Data, IterableLoader, Source, Tensors, adapt, as_data
from weft.errors import DataError


class Squares(Dataset[Any]):
    """Items of any shape, made from their number."""

    def __init__(self, make: Callable[[int], Any], length: int = 10) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> Any:
        return self.make(number)


class Count(IterableDataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class Noisy(Dataset[Any]):
    """A transform of its own that draws from torch's global generator."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> Any:
        return number, torch.rand(())


Pair = namedtuple("Pair", ["image", "label"])


def source_of(obj: Any, keys: Any = None) -> Source:
    source = adapt(obj, keys)
    assert isinstance(source, Source)
    return source


def loader_of(obj: Any, keys: Any = None, **options: Any) -> IterableLoader:
    loader = adapt(obj, keys, **options)
    assert isinstance(loader, IterableLoader)
    return loader


def values(loader: IterableLoader, start: int, stop: int, key: str = "x") -> list[list[int]]:
    return [batch[key].tolist() for batch in loader.iterate(start, stop)]


@pytest.mark.parametrize(
    ("make", "keys", "expected"),
    [
        (lambda n: (n, n * n), None, {"x": [3, 1], "y": [9, 1]}),
        (lambda n: [torch.tensor(n), np.int64(n)], ("a", "b"), {"a": [3, 1], "b": [3, 1]}),
        (lambda n: {"p": n, "q": np.array([n, n])}, None, {"p": [3, 1], "q": [[3, 3], [1, 1]]}),
        (lambda n: {"p": n, "q": "text"}, ("p",), {"p": [3, 1]}),
        (lambda n: torch.tensor([n, -n]), None, {"x": [[3, -3], [1, -1]]}),
        (lambda n: n / 2, ("half",), {"half": [1.5, 0.5]}),
        (lambda n: Pair(n, n + 1), None, {"image": [3, 1], "label": [4, 2]}),
    ],
)
def test_items_of_every_shape_become_named_tensors(make: Any, keys: Any, expected: dict[str, Any]) -> None:
    source = source_of(Squares(make), keys)
    batch = source.take(np.array([3, 1]))
    assert {name: tensor.tolist() for name, tensor in batch.items()} == expected


def test_torchs_own_datasets_and_lists_are_sources() -> None:
    x, y = torch.rand(10, 2), torch.arange(10)
    whole = TensorDataset(x, y)
    assert torch.equal(source_of(whole).take(np.array([4, 4, 0]))["x"], x[[4, 4, 0]])
    part, _ = random_split(whole, [5, 5], torch.Generator().manual_seed(0))
    assert source_of(part).take(np.arange(5))["y"].tolist() == list(part.indices)
    assert source_of([1, 2, 3]).take(np.array([2]))["x"].tolist() == [3]
    tensors = Tensors(x=x)
    assert adapt(tensors) is tensors


def test_the_fingerprint_of_a_dataset_is_that_of_its_content() -> None:
    prints = {source_of(Squares(lambda n: n, length)).fingerprint() for length in (299, 300, 300)}
    assert len(prints) == 2
    assert source_of(Squares(lambda n: n + (n == 299), 300)).fingerprint() not in prints


@pytest.mark.parametrize(
    ("make", "keys", "message"),
    [
        (lambda n: "text", None, "'x' collates to list"),
        (lambda n: (1, 2, 3), None, "3 values, and 2 keys"),
        (lambda n: {"a": 1}, ("b",), r"no key 'b'; they have \['a'\]"),
        (lambda n: object(), None, "cannot be collated"),
        (lambda n: torch.zeros(n + 1), None, "same keys and shapes"),
    ],
)
def test_items_that_make_no_batch_are_refused(make: Any, keys: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        source_of(Squares(make), keys).take(np.array([0, 1]))


def test_what_holds_no_samples_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    for odd in (3, "digits", {"a": 1}, None, iter([1])):
        with pytest.raises(DataError, match="cannot make data of"):
            adapt(odd)
    with pytest.raises(DataError, match="no samples"):
        adapt([])
    with pytest.raises(DataError, match="no batches"):
        adapt(DataLoader(TensorDataset(torch.zeros(3)), batch_size=4, drop_last=True))
    with pytest.raises(DataError, match="gave no batch in epoch 0"):
        next(loader_of(Count(0), batch_size=2).iterate())
    source_of(Noisy())
    assert "two reads of sample 0" in caplog.text


def test_a_plain_dataloader_goes_round_with_its_short_last_batch() -> None:
    loader = loader_of(DataLoader(TensorDataset(torch.arange(5)), batch_size=2))
    assert values(loader, 0, 5) == [[0, 1], [2, 3], [4], [0, 1], [2, 3]]
    assert values(loader, 4, 6) == [[2, 3], [4]]
    assert [batch["x"].tolist() for batch in loader.all()] == [[0, 1], [2, 3], [4]]
    other = loader_of(DataLoader(TensorDataset(torch.arange(1, 6)), batch_size=2))
    assert loader.fingerprint() == loader.fingerprint() != other.fingerprint()
    own = DataLoader(TensorDataset(torch.arange(10)), batch_size=5, sampler=range(9, -1, -1))
    assert values(loader_of(own), 0, 2) == [[9, 8, 7, 6, 5], [4, 3, 2, 1, 0]]


def shuffling(kind: str, workers: int = 0) -> DataLoader[Any]:
    options: dict[str, dict[str, Any]] = {
        "random": {"shuffle": True},
        "own generator": {"shuffle": True, "generator": torch.Generator().manual_seed(1)},
        "weighted": {"sampler": WeightedRandomSampler([1.0] * 10, 10)},
        "subset": {"sampler": SubsetRandomSampler(range(10))},
    }
    return DataLoader(TensorDataset(torch.arange(10)), batch_size=3, num_workers=workers, **options[kind])


@pytest.mark.parametrize("kind", ["random", "own generator", "weighted", "subset"])
def test_a_shuffling_dataloader_is_reseeded_and_so_repeats_and_resumes(kind: str) -> None:
    first = values(loader_of(shuffling(kind), seed=4), 0, 12)
    torch.rand(7)
    again = loader_of(shuffling(kind), seed=4)
    assert values(again, 6, 12) == first[6:]
    assert [again.batch(i)["x"].tolist() for i in (0, 1, 7, 8, 2)] == [first[i] for i in (0, 1, 7, 8, 2)]
    assert first[:4] != first[4:8], "epochs differ"
    assert values(loader_of(shuffling(kind), seed=5), 0, 12) != first


def test_a_dataloader_leaves_the_global_generator_alone_and_its_draws_are_keyed() -> None:
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    loader = loader_of(DataLoader(Noisy(), batch_size=5), seed=1)
    first = values(loader, 0, 4, "y")
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(1)
    assert values(loader, 0, 4, "y") == first
    assert values(loader, 3, 4, "y") == first[3:]
    assert len({value for batch in first for value in batch}) == 20


def test_a_dataloader_with_workers_gives_the_same_and_leaves_none_behind() -> None:
    expected = values(loader_of(shuffling("random"), seed=4), 0, 6)
    loader = loader_of(shuffling("random", workers=2), seed=4)
    assert values(loader, 0, 6) == expected
    assert [loader.batch(i)["x"].tolist() for i in (0, 1)] == expected[:2]
    loader.close()
    assert not multiprocessing.active_children()


def test_an_iterable_dataset_needs_a_batch_size_and_replays_from_the_start() -> None:
    with pytest.raises(DataError, match="batch_size="):
        adapt(Count(5))
    loader = loader_of(Count(5), ("n",), batch_size=2)
    assert values(loader, 0, 5, "n") == [[0, 1], [2, 3], [4], [0, 1], [2, 3]]
    assert values(loader, 4, 5, "n") == [[2, 3]]
    assert loader.per_epoch is None


def test_what_a_user_has_becomes_the_training_part_of_data() -> None:
    data = Data("mine", Tensors(x=torch.arange(3)))
    assert as_data(data) is data
    assert as_data({"x": torch.arange(3)}).fingerprint() == data.fingerprint()
    assert as_data(TensorDataset(torch.arange(3))).train.take(np.array([2]))["x"].tolist() == [2]
    assert isinstance(as_data(DataLoader(TensorDataset(torch.arange(3)))).train, IterableLoader)
