"""Foreign data: a torch Dataset becomes a source, a DataLoader a loader that says what it cannot do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from weft.data.dataset import Data
from weft.data.iterable import IterableLoader, named
from weft.data.source import Batch, Indices, Promise, Source, Tensors, checked, hash_samples
from weft.errors import DataError


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
    the `keys` are picked. `seed` and `device` are for loaders. The promise of the result says what can be relied on.
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

    A function is called for it: on several stages each then loads its own, and nothing has to be sent to them.
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
    """A map-style dataset as a source: samples are read one by one and collated by torch's `default_collate`."""

    def __init__(self, dataset: Any, keys: Sequence[str] | None = None) -> None:
        self.dataset, self.keys = dataset, None if keys is None else tuple(keys)
        self._digest: str | None = None
        if len(dataset) == 0:
            raise DataError(f"the {type(dataset).__name__} has no samples")
        first = np.zeros(1, dtype=np.int64)
        once, again = self.take(first), self.take(first)
        equal = all(torch.equal(torch.nan_to_num(once[name]), torch.nan_to_num(again[name])) for name in once)
        note = "taken to be pure: dataset[i] must give the same sample every time"
        if not equal:
            note = "not pure: two reads of sample 0 differ, so runs cannot be repeated; augment in the Loader instead"
        self.promise = Promise(random_access=True, pure=equal, note=note)

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, indices: Indices) -> Batch:
        numbers = checked(indices, len(self)).tolist()
        if hasattr(self.dataset, "__getitems__"):  # torch's own way to read many at once
            items = self.dataset.__getitems__(numbers)
        else:
            items = [self.dataset[number] for number in numbers]
        samples = [named(item, self.keys) for item in items]
        try:
            collated = default_collate(samples)
        except (TypeError, RuntimeError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise DataError(
                f"samples of {type(self.dataset).__name__} cannot be collated ({reason}); each must hold tensors, "
                "arrays or numbers of the same keys and shapes"
            ) from error
        return named(collated, None, tensors=True)

    def fingerprint(self) -> str:
        """Reads every sample once."""
        if self._digest is None:
            self._digest = hash_samples(self)
        return self._digest
