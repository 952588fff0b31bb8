"""A file of lines that grows: what was added since it was last looked at, in large pieces of whole lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LONGEST, CHUNK = 64 << 20, 1 << 20
"""Bytes of a line that is still held, since that of a trace may have a whole simulation, and of one reading."""

_TAIL = 64


class Grown:
    """Follows one file. ``offset`` is where the next line begins: a torn last line waits there for its end.

    Lines of more than ``longest`` bytes are damage: they are passed over, held in pieces, and counted in ``skipped``.
    """

    def __init__(self, path: Path, longest: int | None = None, chunk: int | None = None) -> None:
        self.path = path
        self.offset = self.skipped = 0
        self._longest, self._chunk = longest or LONGEST, chunk or CHUNK
        self._seen: tuple[int, int, int] | None = None
        self._before = b""
        self._skipping = False

    def changed(self) -> bool:
        """Whether the file is another than when it was last read, or longer."""
        return self._stat() != self._seen

    def replaced(self) -> bool:
        """Whether what was read is there no longer: the file is gone, shorter, or another. Reading then begins anew."""
        now = self._stat()
        if self._seen is None or now == self._seen:
            return False
        # Whoever appends makes it longer; the same length at another time was written anew.
        gone = now is None or now[0] != self._seen[0] or now[1] <= self._seen[1] or not self._goes_on()
        if gone:
            self.offset, self.skipped, self._seen, self._before, self._skipping = 0, 0, None, b"", False
        return gone

    def read(self) -> Iterator[tuple[int, bytes]]:
        """The new lines in pieces of about a chunk, each with the offset at which it begins; OSError where the file
        vanishes just now."""
        now = self._stat()
        if now is None:
            return
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            held: list[bytes] = []  # the pieces of a line that is longer than a chunk
            long = 0
            while self.offset + long < now[1]:  # what is added meanwhile is for the next time
                data = file.read(min(self._chunk, now[1] - self.offset - long))
                if not data:
                    break
                end = data.rfind(b"\n") + 1
                held.append(data[:end] if end else data)
                long += len(held[-1])
                if end:
                    at, piece = self.offset, b"".join(held)
                    self._move(piece)
                    if self._skipping:
                        self._skipping = False
                        self.skipped += 1
                        piece = piece[piece.find(b"\n") + 1 :]
                        at = self.offset - len(piece)
                    yield at, piece
                    held, long = [data[end:]], len(data) - end
                elif long > self._longest or self._skipping:
                    self._move(b"".join(held))
                    self._skipping, held, long = True, [], 0
        self._seen = now

    def lines(self) -> Iterator[bytes]:
        """The new lines one by one, without their ends."""
        with suppress(OSError):
            for _, piece in self.read():
                for line in piece.split(b"\n")[:-1]:
                    if len(line) <= self._longest:
                        yield line
                    else:
                        self.skipped += 1

    def _goes_on(self) -> bool:
        """Whether what was last read still stands where it stood."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset - len(self._before))
                return file.read(len(self._before)) == self._before
        except OSError:
            return False

    def _move(self, piece: bytes) -> None:
        self.offset += len(piece)
        self._before = (self._before + piece[-_TAIL:])[-_TAIL:]

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns
