"""What waits, in the order in which it should start: the largest first, and before it whoever waited too long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.errors import TuneError
from weft.tune.load import Load

SMALL = 0.2


class Waiting:
    """Loads by size, as ``_size`` has it; those of one size in the order in which they came.

    A load is overtaken by every one that came later and started sooner; after more than ``patience`` of them it is due.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.round = 0
        self._loads: dict[str, Load] = {}
        self._sorted: list[Load] | None = None
        self._longest: list[Load] | None = None
        self._work = 0.0
        self._came: dict[str, int] = {}
        self._starts: dict[int, int] = {}

    def __contains__(self, id: str) -> bool:
        return id in self._loads

    def add(self, load: Load) -> None:
        if load.id in self._loads:
            raise TuneError(f"load '{load.id}' waits already: give every attempt an id of its own")
        self._loads[load.id] = load
        self._came[load.id] = self.round
        self._sorted = self._longest = None
        self._work += load.work

    def set(self, loads: Iterable[Load]) -> None:
        """These wait, and no others; those that waited before keep their turn."""
        given = {load.id: load for load in loads}
        for id, load in list(self._loads.items()):
            if id not in given:
                self.remove(id)
            elif given[id] != load:
                self._work += given[id].work - load.work
                self._loads[id], self._sorted, self._longest = given[id], None, None
        for id, load in given.items():
            if id not in self._loads:
                self.add(load)

    def remove(self, id: str, started: bool = False) -> None:
        load = self._loads.pop(id, None)
        if load is not None:
            self._work -= load.work
            came = self._came.pop(id)
            if started:
                self._starts[came] = self._starts.get(came, 0) + 1

    def due(self) -> list[str]:
        """Those that too many later ones overtook, in the order in which they came."""
        oldest = min(self._came.values(), default=self.round)
        self._starts = {came: count for came, count in self._starts.items() if came > oldest}
        if sum(self._starts.values()) <= self.patience:
            return []
        return [id for id, came in self._came.items() if self._later(came) > self.patience]

    def work(self) -> float:
        """Seconds of a device's time that all of them take, as far as that can be said."""
        return self._work

    def pressing(self, seconds: float, most: int) -> list[str]:
        """Those that take no less than this, the longest first; so many at most."""
        if self._longest is None:
            known = (load for load in self._loads.values() if load.seconds is not None)
            self._longest = sorted(known, key=lambda load: (load.seconds or 0.0, load.memory or 0))
        while self._longest and self._longest[-1].id not in self._loads:
            self._longest.pop()  # it went since the list was sorted
        found: list[str] = []
        for load in reversed(self._longest):
            if (load.seconds or 0.0) < seconds or len(found) == most:
                break
            if load.id in self._loads:
                found.append(load.id)
        return found

    def order(self, due: Iterable[str]) -> Iterator[Load]:
        """These first, then the largest."""
        if self._sorted is None:
            known = [load.seconds for load in self._loads.values() if load.seconds is not None]
            usual = sum(known) / len(known) if known else 1.0
            most = max((load.memory or 0 for load in self._loads.values()), default=0)
            self._sorted = sorted(self._loads.values(), key=lambda load: -_size(load, usual, most))
        if len(self._sorted) > 2 * len(self._loads):
            self._sorted = [load for load in self._sorted if load.id in self._loads]
        first = {id: self._loads[id] for id in due}
        yield from first.values()
        # Those that went since the list was sorted are passed over.
        yield from (load for load in self._sorted if load.id in self._loads and load.id not in first)

    def _later(self, came: int) -> int:
        return sum(count for other, count in self._starts.items() if other > came)


def _size(load: Load, usual: float, most: int) -> float:
    """Seconds x devices x memory, and a fifth of the most memory that any asks for: what is small but long should not
    begin last. Of unknown length, as long as others; of unknown memory, as large as the largest."""
    memory = max(most, 1) if load.memory is None else load.memory
    return (memory + SMALL * max(most, 1)) * (usual if load.seconds is None else load.seconds) * load.degree
