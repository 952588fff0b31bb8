"""Results of a pure function in order, prepared ahead by threads or processes that never outlive their reader."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any

import torch

from weft.data.source import Batch
from weft.errors import DataError

Task = Callable[[int], Batch]


def in_order(
    task: Task, numbers: Iterable[int], *, ahead: int = 2, workers: int = 0, processes: bool = False
) -> Generator[Batch, None, None]:
    """Yields `task(n)` for each number in order, with up to `max(ahead, workers)` of them under way.

    Without workers one thread works ahead; with `ahead=0` as well, nothing does. What a task raises comes out here as
    a DataError that names the batch. Closing the generator waits for the tasks under way and ends all its threads and
    processes.
    """
    if not ahead and not workers and not processes:
        for number in numbers:
            try:
                batch = task(number)
            except Exception as error:
                raise _failed(number, f"{type(error).__name__}: {error}") from error
            yield batch
        return
    upcoming = iter(numbers)
    waiting: deque[tuple[int, Future[Any]]] = deque()
    pool, call = _processes(task, max(workers, 1)) if processes else _threads(task, max(workers, 1))
    try:
        for number in islice(upcoming, max(ahead, workers, 1)):
            waiting.append((number, _submit(pool, call, number)))
        while waiting:
            number, future = waiting.popleft()
            batch = _result(number, future)
            for following in islice(upcoming, 1):
                waiting.append((following, _submit(pool, call, following)))
            yield batch
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _threads(task: Task, workers: int) -> tuple[Executor, Callable[[int], Any]]:
    return ThreadPoolExecutor(workers, thread_name_prefix="weft-data"), task


def _processes(task: Task, workers: int) -> tuple[Executor, Callable[[int], Any]]:
    # The task travels once, when a process starts; torch shares the tensors it holds rather than copying them.
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=spawn, initializer=_begin, initargs=(task,)), _work


def _submit(pool: Executor, call: Callable[[int], Any], number: int) -> Future[Any]:
    try:
        return pool.submit(call, number)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise DataError(
            f"processes=True needs a source and an augmentation that can be pickled ({error}); use threads instead"
        ) from error
    except BrokenProcessPool as error:
        raise _failed(number, _BROKEN) from error


def _result(number: int, future: Future[Any]) -> Batch:
    try:
        result = future.result()
    except BrokenProcessPool as error:
        raise _failed(number, _BROKEN) from error
    except Exception as error:
        raise _failed(number, f"{type(error).__name__}: {error}") from error
    if isinstance(result, bytes):
        from safetensors.torch import load

        return load(result)
    if isinstance(result, _Failure):
        failed = _failed(number, result.what)
        failed.add_note(result.trace)
        raise failed
    batch: Batch = result
    return batch


def _failed(number: int, what: str) -> DataError:
    return DataError(f"batch {number} could not be prepared: {what}")


_BROKEN = "a worker process ended early (a script that uses processes=True needs `if __name__ == '__main__':`)"


class _Failure:
    """What went wrong in a process, as text, since not every exception can be pickled."""

    def __init__(self, what: str, trace: str) -> None:
        self.what, self.trace = what, trace


_task: Task | None = None


def _begin(task: Task) -> None:
    global _task
    _task = task
    torch.set_num_threads(1)


def _work(number: int) -> bytes | _Failure:
    # Batches come back as safetensors bytes: torch's shared memory would need this process to outlive its reader.
    from safetensors.torch import save

    assert _task is not None
    try:
        batch = _task(number)
        return save({name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in batch.items()})
    except Exception as error:
        return _Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
