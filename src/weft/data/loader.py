"""Batches by number: what batch i holds depends on the seed and on i, never on who prepares it or when."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count, islice
from typing import Protocol

import numpy as np
import torch

from weft.data.augment import Augment, Draws
from weft.data.source import Batch, Indices, Source, device_of, in_memory
from weft.errors import DataError, TrainError
from weft.utils.rng import generator


class Loader:
    """Batches of a source, shuffled anew in every epoch; samples that do not fill a batch are left out of that epoch.

    Epoch e holds the batches `e * per_epoch` to `(e + 1) * per_epoch - 1`, in the order of a permutation keyed by
    (seed, "epoch", e). `augment` is called with draws keyed by (seed, sample, epoch). `iterate` prepares `ahead`
    batches in one background thread, or in `workers` threads. A source that is kept on a device is read when batches
    are asked for, without blocking.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        seed: int,
        *,
        augment: Augment | None = None,
        ahead: int = 2,
        workers: int = 0,
        device: torch.device | str | None = None,
        shuffle: bool = True,
    ) -> None:
        if batch_size < 1 or ahead < 0 or workers < 0:
            raise DataError(f"need batch_size >= 1, ahead, workers >= 0; got {batch_size}, {ahead}, {workers}")
        self.source, self.batch_size, self.seed, self.augment, self.shuffle = source, batch_size, seed, augment, shuffle
        self.ahead, self.workers = ahead, workers
        self.device = None if device is None else torch.device(device)
        if self.device is not None and self.device.type == "cuda" and not torch.cuda.is_available():
            raise DataError(f"batches were asked for on {device}, but torch sees no CUDA device")
        self.per_epoch = len(source) // batch_size
        if shuffle:
            self._check_size()
        self._orders: tuple[tuple[int, Indices], ...] = ()

    def samples(self, i: int) -> Indices:
        """The numbers, in the source, of the samples of batch i."""
        self._check_size()
        if i < 0:
            raise DataError(f"batches are numbered from 0; got {i}")
        epoch, place = divmod(i, self.per_epoch)
        return self._order(epoch)[place * self.batch_size : (place + 1) * self.batch_size].copy()

    def batch(self, i: int) -> Batch:
        """Batch i, prepared here and now."""
        return self._deliver(self._prepare(i))

    def iterate(self, start: int = 0, stop: int | None = None) -> Generator[Batch, None, None]:
        """Batches from `start` on, in order, prepared ahead; without `stop`, for ever. Close it when done early."""
        self.samples(start)
        return self._read(self._prepare, count(start) if stop is None else range(start, stop))

    def all(self) -> Generator[Batch, None, None]:
        """Every sample once, in the order of the source, the last batch as short as it comes; draws are of epoch 0."""
        return self._read(self._prepare_plain, range(-(-len(self.source) // self.batch_size)))

    def _read(self, task: Callable[[int], Batch], numbers: Iterable[int]) -> Generator[Batch, None, None]:
        # Kernels launched by another thread go to that thread's stream: a source on a device is read by its user.
        # Indexing memory takes less time than handing the batch from thread to thread, so a plain source in memory is
        # too.
        plain = self.workers == 0 and self.augment is None and in_memory(self.source)
        if device_of(self.source).type != "cpu" or (plain and (self.device is None or self.device.type == "cpu")):
            prepared = prefetch(task, numbers, ahead=0)
        else:
            prepared = prefetch(lambda number: self._pin(task(number)), numbers, ahead=self.ahead, workers=self.workers)
        try:
            for batch in prepared:
                yield self._deliver(batch)
        finally:
            prepared.close()

    def _prepare(self, i: int) -> Batch:
        return self._take(self.samples(i), i // self.per_epoch)

    def _prepare_plain(self, i: int) -> Batch:
        start = i * self.batch_size
        return self._take(np.arange(start, min(start + self.batch_size, len(self.source))), 0)

    def _take(self, samples: Indices, epoch: int) -> Batch:
        batch = self.source.take(samples)
        if self.augment is not None:
            batch = self.augment(batch, Draws(self.seed, samples, epoch))
        return batch

    def _pin(self, batch: Batch) -> Batch:
        if self.device is None or self.device.type != "cuda":
            return batch
        return {name: tensor.pin_memory() if tensor.device.type == "cpu" else tensor for name, tensor in batch.items()}

    def _deliver(self, batch: Batch) -> Batch:
        # The copy is issued by the consumer, so that it lies on the consumer's stream, before the work that needs it.
        if self.device is None:
            return batch
        onto = self.device.type == "cuda"  # a copy back to the host must block: nothing would wait for it
        return {name: tensor.to(self.device, non_blocking=onto) for name, tensor in self._pin(batch).items()}

    def _order(self, epoch: int) -> Indices:
        for number, order in self._orders:
            if number == epoch:
                return order
        length = len(self.source)
        order = generator(self.seed, "epoch", epoch).permutation(length) if self.shuffle else np.arange(length)
        # Two are kept, since batches prepared ahead straddle the end of an epoch; a race draws one of them twice.
        self._orders = ((epoch, order), *self._orders[:1])
        return order

    def _check_size(self) -> None:
        if self.per_epoch == 0:
            raise DataError(
                f"a batch of {self.batch_size} is larger than the data, which has {len(self.source)} samples; "
                "use a smaller batch size"
            )


# Results of a function in order, prepared ahead by threads that never outlive their reader.


def prefetch(
    task: Callable[[int], Batch], numbers: Iterable[int], *, ahead: int = 2, workers: int = 0
) -> Generator[Batch, None, None]:
    """Yields `task(n)` for each number in order, with up to `max(ahead, workers)` of them under way.

    Without workers one thread works ahead; with `ahead=0` as well, none does. What a task raises comes out here as a
    DataError that names the batch. Closing the generator waits for the tasks under way and ends all its threads.
    """
    if not ahead and not workers:
        for number in numbers:
            yield _result(number, partial(task, number))
        return
    upcoming = iter(numbers)
    waiting: deque[tuple[int, Future[Batch]]] = deque()
    pool = ThreadPoolExecutor(max(workers, 1), thread_name_prefix="weft-data")
    try:
        for number in islice(upcoming, max(ahead, workers, 1)):
            waiting.append((number, pool.submit(task, number)))
        while waiting:
            number, future = waiting.popleft()
            batch = _result(number, future.result)
            for following in islice(upcoming, 1):
                waiting.append((following, pool.submit(task, following)))
            yield batch
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _result(number: int, get: Callable[[], Batch]) -> Batch:
    try:
        return get()
    except Exception as error:
        raise DataError(f"batch {number} could not be prepared: {type(error).__name__}: {error}") from error


def split_batch(batch: Batch, m: int) -> list[Batch]:
    """The batch as m micro-batches of equal size, in order."""
    if m == 1:
        return [batch]
    sizes = {key: len(value) if value.dim() else 0 for key, value in batch.items()}
    size = next(iter(sizes.values()))
    if len(set(sizes.values())) > 1:
        raise TrainError(
            f"the entries of a batch must have as many rows to be split into micro-batches; these have {sizes}"
        )
    if size % m:
        raise TrainError(
            f"a batch of {size} cannot be split into {m} micro-batches of equal size: use a multiple of {m}"
        )
    part = size // m
    return [{key: value[j * part : (j + 1) * part] for key, value in batch.items()} for j in range(m)]


class Batches(Protocol):
    """What gives the batches of steps in order."""

    def iterate(self, start: int, stop: int) -> Generator[Batch, None, None]: ...


class MicroBatches:
    """The micro-batches of a stage by number, each given out once: batches are read in order, schedules differ."""

    def __init__(self, loader: Batches, first: int, steps: int, m: int, split: Callable[[Batch], list[Batch]]) -> None:
        self._batches = loader.iterate(first, steps)
        self._split = split
        self._m = m
        self._next = first
        self._held: dict[int, Batch] = {}

    def __call__(self, n: int) -> Batch:
        while self._next <= n // self._m:
            self._held |= enumerate(self._split(next(self._batches)), start=self._next * self._m)
            self._next += 1
        if n not in self._held:
            raise TrainError(f"micro-batch {n} was asked for twice")
        return self._held.pop(n)

    def close(self) -> None:
        self._batches.close()
