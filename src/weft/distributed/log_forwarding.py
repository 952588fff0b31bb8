"""The log of stages: what they log is shown by the process that started them, beside its own progress."""

from __future__ import annotations

import json
import logging
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_COUNT = "logs"


class ToParent(logging.Handler):
    """Puts what a stage logs into the store that it shares with its parent; on stderr where that is gone."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store: Store = store.clone()  # type: ignore[attr-defined]

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        try:
            number = self._store.add(_COUNT, 1)
            self._store.set(f"log/{number}", json.dumps([record.name, record.levelno, text]))
        except Exception:
            print(text, file=sys.stderr)


class FromStages:
    """The parent's side: ``read`` logs here what the stages have logged since."""

    def __init__(self) -> None:
        self._read = 0
        self._lock = threading.Lock()

    def read(self, store: Store) -> None:
        with self._lock:
            # A number is taken before its text is there: the next look finds it.
            while self._read < store.add(_COUNT, 0) and store.check([f"log/{self._read + 1}"]):
                self._read += 1
                name, level, text = json.loads(store.get(f"log/{self._read}"))
                logging.getLogger(name).log(level, "%s", text)

    def forget(self) -> None:
        """The store of the next start is a new one."""
        self._read = 0
