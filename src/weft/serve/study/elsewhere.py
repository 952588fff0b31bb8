"""A study whose storage lies elsewhere, shown beside the runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from weft.serve.documents import Absent, encode, told
from weft.serve.events.thin import number

AGAIN = 3.0
"""Seconds after which the storage is asked again: another machine may be where it lies."""

OVER = frozenset({"complete", "pruned", "failed", "fail"})


class Elsewhere:
    """The study in a storage, by its URL; threads may share it. The URL may hold a password, and is never shown."""

    def __init__(self, address: str, name: str | None = None, again: float = AGAIN) -> None:
        self._again = again
        self._address = address
        self._name = name
        self._lock = threading.Lock()
        self._asked: float | None = None
        self._found: dict[str, Any] = {}
        self._tag = ""

    @property
    def name(self) -> str:
        return str(self.document()["study"])

    def document(self) -> dict[str, Any]:
        with self._lock:
            if self._asked is None or time.monotonic() - self._asked >= self._again:
                from weft.serve.study.document import from_storage

                with told("the study"):
                    self._found = from_storage(self._address, self._name)
                self._tag, self._asked = encode(self._found).tag, time.monotonic()
            return self._found

    def signature(self) -> str:
        self.document()
        return self._tag

    def summary(self, name: str) -> dict[str, Any]:
        found = self.document()
        trials, aims = found["trials"], found["objectives"]
        best: dict[str, float] = {}
        for place, aim in enumerate(aims):
            values = [y for trial in trials if trial["values"] and (y := number(trial["values"][place])) is not None]
            if values:
                best[aim["name"]] = max(values) if aim["maximize"] else min(values)
        over = sum(str(trial["state"]).lower() in OVER for trial in trials)
        return {
            "name": name,
            "kind": "tune",
            "state": "running" if over < len(trials) else "finished",
            "created": _created(found.get("began")),
            "seconds": None,
            "done": over,
            "steps": len(trials),
            "left_s": None,
            "loss": None,
            "metrics": best,
            "fingerprint": None,
            "same": [],
            "stages": 1,
            "device": None,
            "damaged": 0,
            "reason": None,
            "views": ["tune"],
        }

    def details(self) -> dict[str, Any]:
        return {"config": {}, "manifest": {}}

    def view(self, view: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        if view != "tune":
            raise Absent(f"a study that lies elsewhere has no {view}")
        return self.document()


def _created(began: object) -> str | None:
    at = number(began)
    return None if at is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
