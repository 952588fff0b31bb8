"""torch's own data: a Dataset becomes a source, a DataLoader or an IterableDataset a loader of batches by number."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from weft.data.dataset import Data
from weft.data.source import Batch, Indices, Source, Tensors, check_indices, hash_batch, hash_samples
from weft.errors import DataError
from weft.utils.rng import key, torch_seeded

log = logging.getLogger("weft.data")

_END = object()


class IterableLoader:
    """Batches of a DataLoader by number, epoch after epoch, in the DataLoader's batch sizes.

    Before each epoch its generator, and that of its sampler if that has one, is replaced by one keyed by (seed,
    "epoch", e); each batch is fetched with torch's global generator seeded by (seed, "batch", i), which is restored
    afterwards. A batch out of order is reached by replaying: its epoch where the length of one is known, else all.

    Not repeatable are: a sampler or IterableDataset that gives another order every time, transforms that draw from
    NumPy or ``random``, and the random states of persistent workers.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        keys: Sequence[str] | None = None,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        self.loader, self.seed = loader, seed
        self.keys = None if keys is None else tuple(keys)
        self.device = None if device is None else torch.device(device)
        self.per_epoch = None if isinstance(loader.dataset, IterableDataset) else len(loader)
        self._sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        self._cursor: tuple[int, Generator[Batch, None, None]] | None = None
        if self.per_epoch == 0:
            raise DataError("the DataLoader has no batches: its data is smaller than a batch, or empty")

    def batch(self, i: int) -> Batch:
        """Batch i; cheap only where i follows the batch asked for before."""
        if self._cursor is None or self._cursor[0] != i:
            self.close()
            self._cursor = (i, self.iterate(i))
        batches, self._cursor = self._cursor[1], None  # kept no longer if this fails
        batch = next(batches)
        self._cursor = (i + 1, batches)
        return batch

    def iterate(self, start: int = 0, stop: int | None = None) -> Generator[Batch, None, None]:
        """Batches from `start` on, in order; those that must be replayed to get there are read and dropped."""
        if start < 0:
            raise DataError(f"batches are numbered from 0; got {start}")
        epoch = start // self.per_epoch if self.per_epoch else 0
        number = epoch * (self.per_epoch or 0)
        while stop is None or number < stop:
            before = number
            for batch in self._epoch(epoch, number):
                if stop is not None and number >= stop:
                    return
                if number >= start:
                    yield self._deliver(batch)
                number += 1
            if number == before:
                raise DataError(f"the {type(self.loader.dataset).__name__} gave no batch in epoch {epoch}")
            epoch += 1

    def all(self) -> Generator[Batch, None, None]:
        """The batches of epoch 0."""
        for batch in self._epoch(0, 0):
            yield self._deliver(batch)

    def fingerprint(self) -> str:
        """SHA-256 of the first batch, since the rest cannot be read out of order."""
        batches = self.iterate(0, 1)
        hasher = hashlib.sha256(f"{self.per_epoch};".encode())
        for batch in batches:
            hash_batch(hasher, batch)
        batches.close()
        return hasher.hexdigest()

    def close(self) -> None:
        """Ends what `batch` keeps open, with the DataLoader's workers."""
        if self._cursor is not None:
            self._cursor[1].close()
            self._cursor = None

    def _epoch(self, epoch: int, number: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(key(self.seed, "epoch", epoch))
        self.loader.generator = generator
        if hasattr(self._sampler, "generator"):
            self._sampler.generator = generator
        for part in (self.loader.dataset, self._sampler):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        items = iter(self.loader)
        while True:
            with torch_seeded(self.seed, "batch", number):
                item = next(items, _END)
            if item is _END:
                return
            yield name_values(item, self.keys, tensors=True)
            number += 1

    def _deliver(self, batch: Batch) -> Batch:
        if self.device is None:
            return batch
        return {name: tensor.to(self.device, non_blocking=tensor.is_pinned()) for name, tensor in batch.items()}


def name_values(item: Any, keys: Sequence[str] | None, tensors: bool = False) -> dict[str, Any]:
    """A sample or batch as a mapping; with `tensors`, every value must be one."""
    if isinstance(item, tuple) and hasattr(item, "_asdict"):
        item = item._asdict()
    if isinstance(item, Mapping):
        absent = [name for name in keys or () if name not in item]
        if absent:
            raise DataError(f"samples have no key '{absent[0]}'; they have {sorted(map(str, item))}")
        result = {str(name): item[name] for name in (keys or item)}
    else:
        values = list(item) if isinstance(item, tuple | list) else [item]
        names = tuple(keys) if keys is not None else ("x", "y")[: len(values)]
        if len(names) != len(values):
            raise DataError(f"samples have {len(values)} values, and {len(names)} keys were given: {', '.join(names)}")
        result = dict(zip(names, values, strict=True))
    if tensors:
        for name, value in result.items():
            if not isinstance(value, torch.Tensor):
                raise DataError(
                    f"'{name}' collates to {type(value).__name__}, not to a tensor; samples must hold tensors, arrays "
                    "or numbers (leave others out with keys=)"
                )
    return result


def adapt(
    obj: object,
    keys: Sequence[str] | None = None,
    *,
    seed: int = 0,
    batch_size: int | None = None,
    device: torch.device | str | None = None,
) -> Source | IterableLoader:
    """Makes a source or a loader of what a user has.

    A map-style Dataset (`len` and `[i]`; a list will do) becomes a Source, a DataLoader an IterableLoader, and an
    IterableDataset an IterableLoader of batches of `batch_size`. Tuples are named by `keys`, else "x", "y"; of mappings
    the `keys` are picked. `seed` and `device` are for loaders.
    """
    if isinstance(obj, DataLoader):
        return IterableLoader(obj, keys, seed=seed, device=device)
    if isinstance(obj, IterableDataset):
        if batch_size is None:
            raise DataError("an IterableDataset has samples and no batches: give adapt(..., batch_size=)")
        return IterableLoader(DataLoader(obj, batch_size=batch_size), keys, seed=seed, device=device)
    if isinstance(obj, Source):
        return obj
    if hasattr(obj, "__getitem__") and hasattr(obj, "__len__") and not isinstance(obj, Mapping | str | bytes):
        return Mapped(obj, keys)
    raise DataError(
        f"cannot make data of {type(obj).__name__}: give a torch Dataset, an IterableDataset, a DataLoader, or "
        "anything with len() and [i]"
    )


def as_data(obj: object, seed: int = 0) -> Data:
    """Data as it is, or what a user has (a mapping of tensors, or what `adapt` takes) as its training part.

    A function is called for it: then each of several stages loads the data, and nothing has to be sent to them.
    """
    if isinstance(obj, Data):
        return obj
    if callable(obj) and not hasattr(obj, "__getitem__") and not isinstance(obj, DataLoader | IterableDataset):
        return as_data(obj(), seed)
    if isinstance(obj, Mapping):
        return Data("tensors", Tensors(**obj))
    # A loader may stand where a source does: whoever reads the part asks which of the two it is.
    return Data(type(obj).__name__, cast(Source, adapt(obj, seed=seed)))


class Mapped:
    """A map-style dataset as a source: samples are read one by one and collated by torch's `default_collate`.

    ``dataset[i]`` must give the same sample every time; a warning is logged where two reads of sample 0 differ.
    """

    def __init__(self, dataset: Any, keys: Sequence[str] | None = None) -> None:
        self.dataset, self.keys = dataset, None if keys is None else tuple(keys)
        self._digest: str | None = None
        if len(dataset) == 0:
            raise DataError(f"the {type(dataset).__name__} has no samples")
        first = np.zeros(1, dtype=np.int64)
        once, twice = self.take(first), self.take(first)
        if not all(torch.equal(torch.nan_to_num(once[name]), torch.nan_to_num(twice[name])) for name in once):
            log.warning(
                "two reads of sample 0 of the %s differ, so runs cannot be repeated: augment in the Loader instead",
                type(dataset).__name__,
            )

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, indices: Indices) -> Batch:
        numbers = check_indices(indices, len(self)).tolist()
        if hasattr(self.dataset, "__getitems__"):  # torch's own way to read many at once
            items = self.dataset.__getitems__(numbers)
        else:
            items = [self.dataset[number] for number in numbers]
        samples = [name_values(item, self.keys) for item in items]
        try:
            collated = default_collate(samples)
        except (TypeError, RuntimeError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(
                f"samples of {type(self.dataset).__name__} cannot be collated ({reason}); each must hold tensors, "
                "arrays or numbers of the same keys and shapes"
            ) from error
        return name_values(collated, None, tensors=True)

    def fingerprint(self) -> str:
        """Reads every sample once."""
        if self._digest is None:
            self._digest = hash_samples(self)
        return self._digest
