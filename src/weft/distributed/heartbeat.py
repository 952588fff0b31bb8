"""The heartbeats of stages: each says through the store that it lives and what it does, and looks after the others."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

logger = logging.getLogger("weft")

Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Beat:
    """One sign of life: the `count`-th of its stage, which has been doing `op` for `seconds` (None: it waits)."""

    count: int
    op: str | None
    seconds: float
    figures: Figures
    done: bool


def diagnose(rank: int, beat: Beat | None, quiet: float, silence: float, patience: float) -> str | None:
    """What is wrong with a stage that has not moved for `quiet` seconds since its last beat; None if nothing.

    >>> diagnose(2, Beat(5, "2F17", 0.1, {}, False), 21.0, 20.0, 300.0)
    'rank 2 hangs: no sign of life for 21 s; it was doing 2F17'
    >>> diagnose(1, Beat(5, "1B40", 301.0, {}, False), 0.0, 20.0, 300.0)
    'rank 1 hangs: it has been doing 1B40 for 301 s'
    >>> diagnose(1, Beat(5, "1B40", 999.0, {}, True), 999.0, 20.0, 300.0) is None
    True
    """
    if beat is None:
        return f"rank {rank} has not begun after {quiet:.0f} s" if quiet > max(silence, patience) else None
    if beat.done:
        return None
    if quiet > silence:
        doing = f"; it was doing {beat.op}" if beat.op is not None else ""
        return f"rank {rank} hangs: no sign of life for {quiet:.0f} s{doing}"
    if beat.op is not None and beat.seconds > patience:
        return f"rank {rank} hangs: it has been doing {beat.op} for {beat.seconds:.0f} s"
    return None


class Heartbeat:
    """Beats every `period` seconds for this stage and calls `on_lost(rank, message)` once for each other that hangs.

    A stage hangs whose beats have stopped for `silence` seconds, or that has been in one op for `patience` seconds;
    not one that has closed its watch. `on_lost(-1, message)` says that the store is gone, and with it the parent.
    `on_lost` runs in the thread of the watch, which uses a connection of its own. Set `figures` to a new dict of plain
    JSON values at will, and `op` before every op.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        on_lost: Callable[[int, str], None],
        *,
        silence: float = 20.0,
        patience: float = 300.0,
        period: float = 1.0,
    ) -> None:
        self.figures: Figures = {}
        self.op: tuple[str, float] | None = None
        """The op that this stage is busy with, and since when (``time.monotonic``); None while it waits for others, for
        however long."""
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._rank = rank
        self._others = [other for other in range(world) if other != rank]
        self._on_lost = on_lost
        self._silence, self._patience, self._period = silence, patience, period
        self._count = 0
        self._beats: dict[int, Beat] = {}
        self._quiet = dict.fromkeys(self._others, 0.0)
        self._lost: set[int] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-watch", daemon=True)
        self._thread.start()

    def others(self) -> dict[int, Figures]:
        """The newest figures of every other stage that has begun."""
        return {rank: beat.figures for rank, beat in self._beats.items()}

    def close(self, timeout: float = 5.0) -> None:
        """Says goodbye, so that the others do not miss this stage; waits for that `timeout` seconds at most."""
        self._closing.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        last_check = time.monotonic()
        while True:
            done = self._closing.is_set()
            message = self._message(done)
            try:
                self._store.set(f"beat/{self._rank}", message)
                moved = set() if done else self._read()
            except Exception as problem:
                if not self._closing.is_set():
                    logger.debug("the store does not answer", exc_info=True)
                    self._on_lost(-1, f"the process that started the stages is gone: {str(problem).splitlines()[0]}")
                return
            if done:
                return
            now = time.monotonic()
            # Time in which this process did not look, since it was stopped itself, says nothing about the others.
            self._judge(moved, min(now - last_check, 2 * self._period))
            last_check = now
            self._closing.wait(self._period)

    def _message(self, done: bool) -> str:
        self._count += 1
        op = self.op
        name, seconds = (None, 0.0) if op is None else (op[0], time.monotonic() - op[1])
        return json.dumps(asdict(Beat(self._count, name, seconds, dict(self.figures), done)))

    def _read(self) -> set[int]:
        """Takes the newest beats and tells which stages have moved."""
        # A wait for a key that is not there yet would be a wait for a stage that never begins.
        begun = [rank for rank in self._others if rank in self._beats or self._store.check([f"beat/{rank}"])]
        texts = self._store.multi_get([f"beat/{rank}" for rank in begun]) if begun else []
        before, self._beats = self._beats, {r: Beat(**json.loads(text)) for r, text in zip(begun, texts, strict=True)}
        return {rank for rank in begun if rank not in before or before[rank].count != self._beats[rank].count}

    def _judge(self, moved: set[int], elapsed: float) -> None:
        for rank in self._others:
            self._quiet[rank] = 0.0 if rank in moved else self._quiet[rank] + elapsed
            message = diagnose(rank, self._beats.get(rank), self._quiet[rank], self._silence, self._patience)
            if message is not None and rank not in self._lost:
                self._lost.add(rank)
                self._on_lost(rank, message)
