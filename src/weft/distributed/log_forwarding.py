"""What stages say to the process that started them, over the store that they share: their log, and the run's events."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.runs.events import Callback, Event
from weft.utils.files import to_json

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

log = logging.getLogger("weft.pipeline")

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


class EventsToParent:
    """A callback of stage 0, the only one that writes events: puts each into the store."""

    def __init__(self, store: Store) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._count = 0

    def __call__(self, event: Event) -> None:
        self._count += 1
        self._store.set(f"event/{self._count}", json.dumps(to_json(event)))


class FromStages:
    """The parent's side: ``read`` logs here what the stages have logged since, and shows their events to callbacks."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._callbacks = list(callbacks)
        self._logs = self._events = 0

    def read(self, store: Store) -> None:
        # A number is taken before its text is there: the next look finds it.
        while self._logs < store.add(_COUNT, 0) and store.check([f"log/{self._logs + 1}"]):
            self._logs += 1
            name, level, text = json.loads(store.get(f"log/{self._logs}"))
            logging.getLogger(name).log(level, "%s", text)
        while self._callbacks and store.check([key := f"event/{self._events + 1}"]):
            self._events += 1
            self._show(json.loads(store.get(key)))
            store.delete_key(key)

    def forget(self) -> None:
        """The store of the next start is a new one."""
        self._logs = self._events = 0

    def _show(self, event: Event) -> None:
        for callback in list(self._callbacks):
            try:
                callback(event)
            except Exception:
                log.exception("a callback failed and sees no more of this run")
                self._callbacks.remove(callback)
