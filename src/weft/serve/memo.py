"""A few values that were costly to make, each kept until what it was made from changes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Memo(Generic[T]):
    """At most `cap` values by key, of which those longest unused are forgotten. Threads may share it."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self._kept: OrderedDict[Hashable, tuple[str, T]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, signature: str, make: Callable[[], T]) -> T:
        """The value of a key, made anew if it was made under another signature."""
        with self._lock:
            before = self._kept.pop(key, None)
            if before is not None and before[0] == signature:
                self._kept[key] = before
                return before[1]
        made = make()  # not under the lock: one that takes long holds up nobody but who asked for it
        with self._lock:
            self._kept[key] = (signature, made)
            while len(self._kept) > self.cap:
                self._kept.popitem(last=False)
        return made
