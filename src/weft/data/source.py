"""Sources of samples: they give any samples by number, the same ones every time."""

from __future__ import annotations

import hashlib
import weakref
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from weft.errors import DataError

Batch = dict[str, torch.Tensor]
Indices = npt.NDArray[np.int64]

CHUNK = 256
"""Samples read at a time where all of a source is walked; part of the fingerprint of sources that are read so."""


@runtime_checkable
class Source(Protocol):
    """Samples by number. `take` must not change anything, and must give equal batches for equal indices."""

    def __len__(self) -> int: ...
    def take(self, indices: Indices) -> Batch: ...
    def fingerprint(self) -> str: ...


class Tensors:
    """A source in memory; the first dimension of every tensor counts the samples.

    The tensors are not copied and must not be changed afterwards.

    >>> Tensors(x=torch.arange(6).view(3, 2)).take(np.array([2, 0]))["x"].tolist()
    [[4, 5], [0, 1]]
    """

    def __init__(self, /, **named: torch.Tensor) -> None:
        if not named or any(tensor.dim() == 0 for tensor in named.values()):
            raise DataError("a source needs at least one tensor, and each a first dimension that counts the samples")
        lengths = {name: len(tensor) for name, tensor in named.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"all tensors of a source must have as many samples; these have {lengths}")
        devices = {tensor.device for tensor in named.values()}
        if len(devices) > 1:
            raise DataError(f"all tensors of a source must be on one device; these are on {sorted(map(str, devices))}")
        self._named = named
        self._length = next(iter(lengths.values()))
        self.device = devices.pop()
        self._digest: str | None = None
        self._moved: weakref.WeakValueDictionary[torch.device, Tensors] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return self._length

    def take(self, indices: Indices) -> Batch:
        where = to_device(check_indices(indices, self._length), self.device)
        return {name: tensor.index_select(0, where) for name, tensor in self._named.items()}

    def column(self, name: str) -> torch.Tensor:
        """All samples of one tensor, without a copy."""
        return _pick_key(self._named, name)

    def to(self, device: torch.device | str) -> Tensors:
        """The same samples on a device, where `take` then indexes; asked twice, the copy is shared while it lives."""
        device = torch.device(device)
        if device == self.device:
            return self
        moved = self._moved.get(device)
        if moved is None:
            moved = Tensors(**{name: tensor.to(device) for name, tensor in self._named.items()})
            moved._digest = self._digest
            self._moved[device] = moved
        return moved

    def fingerprint(self) -> str:
        if self._digest is None:
            hasher = hashlib.sha256()
            hash_batch(hasher, self._named)
            self._digest = hasher.hexdigest()
        return self._digest

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Tensors, **self._named), ()


class Subset:
    """Some samples of a source, in the order of `indices`; `.to(device)` moves the source, once for all its subsets."""

    def __init__(self, source: Source, indices: npt.ArrayLike) -> None:
        self.source = source
        self.indices = check_indices(np.array(indices, dtype=np.int64), len(source))
        self.indices.setflags(write=False)
        self._digest: str | None = None

    @property
    def device(self) -> torch.device:
        return device_of(self.source)

    def __len__(self) -> int:
        return len(self.indices)

    def take(self, indices: Indices) -> Batch:
        return self.source.take(self.indices[check_indices(indices, len(self.indices))])

    def column(self, name: str) -> torch.Tensor:
        values = column(self.source, name)
        return values[torch.from_numpy(self.indices.copy()).to(values.device)]

    def to(self, device: torch.device | str) -> Subset:
        return Subset(move_source(self.source, device), self.indices)

    def fingerprint(self) -> str:
        if self._digest is None:
            self._digest = hashlib.sha256(self.source.fingerprint().encode() + self.indices.tobytes()).hexdigest()
        return self._digest


class Text:
    """A source of windows over a row of tokens, `stride` apart (by default end to end).

    Sample k is `tokens[k * stride :][:context]`, and `targets` the same moved on by one.

    >>> Text(torch.arange(7), context=3).take(np.array([1]))
    {'tokens': tensor([[3, 4, 5]]), 'targets': tensor([[4, 5, 6]])}
    """

    def __init__(self, tokens: torch.Tensor, context: int, stride: int | None = None) -> None:
        stride = context if stride is None else stride
        if tokens.dim() != 1 or context < 1 or stride < 1:
            shape = tuple(tokens.shape)
            raise DataError(f"text needs one row of tokens and context, stride >= 1; got {shape}, {context}, {stride}")
        if len(tokens) <= context:
            raise DataError(f"a context of {context} needs at least {context + 1} tokens; the text has {len(tokens)}")
        self.tokens, self.context, self.stride = tokens, context, stride
        self.device = tokens.device
        self._length = (len(tokens) - 1 - context) // stride + 1
        self._digest: str | None = None

    def __len__(self) -> int:
        return self._length

    def take(self, indices: Indices) -> Batch:
        where = to_device(check_indices(indices, self._length), self.device)
        windows = (self.tokens[shift:].unfold(0, self.context, self.stride) for shift in (0, 1))
        tokens, targets = (window.index_select(0, where).long() for window in windows)
        return {"tokens": tokens, "targets": targets}

    def to(self, device: torch.device | str) -> Text:
        return Text(self.tokens.to(device), self.context, self.stride)

    def fingerprint(self) -> str:
        if self._digest is None:
            hasher = hashlib.sha256(f"text {self.context} {self.stride}".encode())
            hash_batch(hasher, {"tokens": self.tokens})
            self._digest = hasher.hexdigest()
        return self._digest


def check_indices(indices: Indices, length: int) -> Indices:
    """The indices as torch can use them (int64, writable), or a DataError for one that is out of range."""
    indices = np.asarray(indices, dtype=np.int64)
    if indices.size and indices.view(np.uint64).max() >= length:  # a negative one is huge without its sign
        raise DataError(f"sample numbers run from 0 to {length - 1}; got {indices.min()} to {indices.max()}")
    return indices if indices.flags.writeable else indices.copy()


def to_device(numbers: Indices, device: torch.device) -> torch.Tensor:
    """Indices as a tensor on the device. A copy from ordinary memory would wait until the device has done all its
    work."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def column(source: Source, name: str) -> torch.Tensor:
    """All samples' values of one key; a source with a `column` method does not read the other keys."""
    if hasattr(source, "column"):
        return cast(torch.Tensor, source.column(name))
    chunks = np.split(np.arange(len(source)), range(CHUNK, len(source), CHUNK))
    return torch.cat([_pick_key(source.take(chunk), name) for chunk in chunks])


def device_of(source: Source) -> torch.device:
    """Where `take` leaves its tensors; the CPU unless the source says otherwise."""
    return cast(torch.device, getattr(source, "device", torch.device("cpu")))


def in_memory(source: Source) -> bool:
    """Whether `take` is no more than indexing tensors."""
    return in_memory(source.source) if isinstance(source, Subset) else isinstance(source, Tensors)


def move_source(source: Source, device: torch.device | str) -> Source:
    """The source on a device, where it can be kept on one; else as it is."""
    return cast(Source, source.to(device)) if hasattr(source, "to") else source


def hash_batch(hasher: Any, batch: Batch) -> None:
    """Adds names, types, shapes and every byte."""
    for name, tensor in sorted(batch.items()):
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        hasher.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())


def hash_samples(source: Source) -> str:
    """The fingerprint of a source by reading every sample once."""
    hasher = hashlib.sha256(f"{len(source)};".encode())
    for start in range(0, len(source), CHUNK):
        hash_batch(hasher, source.take(np.arange(start, min(start + CHUNK, len(source)))))
    return hasher.hexdigest()


def _pick_key(batch: Batch, name: str) -> torch.Tensor:
    if name not in batch:
        raise DataError(f"samples have no key '{name}'; they have {sorted(batch)}")
    return batch[name]
