"""The bytes of tensor storages that are alive, followed operator by operator."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block, adds a storage to `now` when an operator first returns it and takes it off when it dies.

    `held` are the tensors that are there from the start to the end; `peak` is the largest `now`. Both are in bytes.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, int] = {}
        self.now: int = 0
        self.peak: int = 0
        for tensor in held:
            self._see(tensor, watch=False)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors(result):
            self._see(tensor, watch=True)
        return result

    def _see(self, tensor: Tensor, watch: bool) -> None:
        if is_lazy(tensor):  # a weight that has no shape before its first batch
            return
        if is_traceable_wrapper_subclass(tensor):  # a DTensor: it takes what its local part takes
            for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
                if isinstance(part, Tensor):
                    self._see(part, watch)
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = storage.nbytes()
            self.now += self._alive[key]
            self.peak = max(self.peak, self.now)
            if watch:
                # PyTorch keeps the Python object of a storage for as long as the storage itself: they end together.
                weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self.now -= self._alive.pop(key)


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors(one)
