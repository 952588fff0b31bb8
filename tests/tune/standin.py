"""A recorder for the CPU: it replays by calling the function again, so that all but CUDA itself is tested."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Undone(TorchDispatchMode):
    """Afterwards the tensors that were there before are as they were, as after a capture, where nothing runs."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._new: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and _place(value) not in self._before and not self.made(value):
                whole = value.detach()
                self._before[_place(value)] = whole, whole.untyped_storage().clone()
        found = func(*args, **(kwargs or {}))
        self._new += [t.untyped_storage() for t in tree_leaves(found) if isinstance(t, Tensor)]
        return found

    def made(self, tensor: Tensor) -> bool:
        """Whether it was not there before."""
        return _place(tensor) not in self._before and any(_place(tensor) == s.data_ptr() for s in self._new)

    def undo(self) -> None:
        for tensor, before in self._before.values():
            tensor.untyped_storage().copy_(before)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Standin:
    aligned = 64
    keeps = 0
    """Tensors that stay of what is done beside."""

    def __init__(self) -> None:
        self.captures = self.replays = self._kept = 0
        self.closed = False
        self.fails: Exception | None = None

    @contextmanager
    def warm_up(self) -> Iterator[list[str]]:
        yield []

    def capture(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        self.captures += 1
        if self.fails is not None:
            raise self.fails
        drawn, undone = torch.default_generator.get_state(), Undone()
        with undone:
            loss, gradients = function()
        undone.undo()
        torch.default_generator.set_state(drawn)
        for tensor in (loss, *gradients):  # nothing has run: who reads it now reads nonsense
            if tensor is not None and undone.made(tensor):
                tensor.fill_(float("nan"))

        def replay() -> None:
            self.replays += 1
            again, found = function()
            for mine, its in zip((loss, *gradients), (again, *found), strict=True):
                if mine is not its and mine is not None:
                    mine.copy_(its)

        return (loss, gradients), replay

    def pooled(self) -> AbstractContextManager[None]:
        return nullcontext()

    def held(self) -> int:
        self._kept += self.keeps
        return self._kept

    def close(self) -> None:
        self.closed = True
