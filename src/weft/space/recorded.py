"""A stream that was written down: one line of JSON a step."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from weft.errors import SpaceError, StreamError
from weft.space.space import Space
from weft.space.stream import Stream
from weft.space.subnet import Subnet


class FromFile(Stream):
    """The steps of a file.

    A line holds a subnet as `Subnet.to_json` writes it, or a list of them, one for each micro-batch. All lines are
    read and checked at once; a mistake names its line.
    """

    name = "file"
    bits = 0.0

    def __init__(self, space: Space, path: str | os.PathLike[str], seed: int = 0) -> None:
        super().__init__(space, seed)
        self.path = Path(path)
        try:
            text = self.path.read_bytes()
        except OSError as error:
            raise StreamError(f"cannot read the stream '{self.path}': {error.strerror}") from None
        self.sha256 = hashlib.sha256(text).hexdigest()
        lines = text.rstrip(b"\n").split(b"\n") if text.strip() else []
        self._steps = [self._read(line, number) for number, line in enumerate(lines, start=1)]
        if not self._steps:
            raise StreamError(f"the stream '{self.path}' is empty; write one subnet a line")
        self.length = len(self._steps)
        self.summary = f"{self.length} steps of '{self.path}'"

    def options(self) -> dict[str, object]:
        return {"path": str(self.path), "sha256": self.sha256}

    def _read(self, line: bytes, number: int) -> tuple[Subnet, ...]:
        where = f"line {number} of '{self.path}'"
        try:
            data = json.loads(line)
            subnets = tuple(self.space.load_subnet(item) for item in (data if isinstance(data, list) else [data]))
        except (ValueError, RecursionError) as error:
            raise StreamError(f"{where} is not JSON: {error}") from None
        except SpaceError as error:
            raise StreamError(f"{where}: {error}") from None
        if not subnets:
            raise StreamError(f"{where} holds no subnet")
        if len(subnets) > 1:
            if self.microbatches not in (None, len(subnets)):
                raise StreamError(f"{where} has {len(subnets)} micro-batches, lines before it {self.microbatches}")
            self.microbatches = len(subnets)
        return subnets

    def _step(self, index: int) -> tuple[Subnet, ...]:
        return self._steps[index]
