"""Scores that outlive the process: one JSON line each, keyed by the subnet and by what it was scored with."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import SearchError
from weft.runs.appender import Appender
from weft.runs.files import plain
from weft.space import Subnet


class Cache:
    """An append-only file of scores; each is on disk before `put` returns.

    `context` identifies all that scores depend on besides the subnet: weights, data, batch count. Scores of other
    contexts may lie in the same file and are not seen. A last line that a crash cut short is dropped; damage
    anywhere else raises SearchError. One process writes at a time.
    """

    def __init__(self, path: Path | str, context: str | Mapping[str, Any] = "") -> None:
        self.path = Path(path)
        text = context if isinstance(context, str) else json.dumps(context, sort_keys=True)
        self.context = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self._scores: dict[str, dict[str, float]] = {}
        self._told: dict[str, frozenset[str]] = {}
        self._file = Appender(self.path)
        self._load()

    def __len__(self) -> int:
        return len(self._scores)

    def get(self, subnet: Subnet) -> dict[str, float] | None:
        """The scores of this subnet in this context, the newest ones."""
        found = self._scores.get(subnet.id)
        return None if found is None else dict(found)

    def put(self, subnet: Subnet, scores: Mapping[str, float], costs: Mapping[str, float] | None = None) -> None:
        """Keeps the scores, in memory and on disk; for whoever shows the file, beside the subnet's values and costs."""
        kept = {name: float(value) for name, value in scores.items()}
        found = {"subnet": subnet.id, "context": self.context, "scores": kept, "values": dict(subnet.values)}
        line = json.dumps(plain({**found, "costs": dict(costs)} if costs else found), allow_nan=False)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file.add(line.encode() + b"\n")
        self._file.close()  # on disk, and no handle left open between two scores
        self._scores[subnet.id] = kept
        self._told[subnet.id] = frozenset(costs or ())

    def tell(self, subnet: Subnet, costs: Mapping[str, float]) -> None:
        """Writes known scores once more where the file lacks the subnet's values or some of these costs."""
        told = self._told.get(subnet.id)
        if subnet.id in self._scores and (told is None or not told.issuperset(costs)):
            self.put(subnet, self._scores[subnet.id], costs)

    def _load(self) -> None:
        if not self.path.exists():
            return
        whole, good = self.path.read_bytes(), 0
        lines = whole.splitlines(keepends=True)
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                scores = {str(name): float(value) for name, value in record["scores"].items()}
                subnet, context = record["subnet"], record["context"]
                if not line.endswith(b"\n"):
                    raise ValueError("cut short")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                if number < len(lines):
                    raise SearchError(f"{self.path}, line {number}: no scores ({error}); delete it") from error
                break
            good += len(line)
            if context == self.context:
                self._scores[subnet] = scores
                if "values" in record:
                    self._told[subnet] = frozenset(record.get("costs") or ())
        if good < len(whole):
            # Else the next line would be glued to the half one.
            os.truncate(self.path, good)
