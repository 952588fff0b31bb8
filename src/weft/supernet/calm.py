"""Calm: exporters that print, warn and log nothing in the thread that calls them."""

from __future__ import annotations

import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO

EXPORTERS = ("torch", "onnx", "onnx_ir", "onnxscript")  # whose loggers are silenced


@contextmanager
def calm() -> Iterator[None]:
    """Within the block, drops what this thread prints and warns, and what torch and ONNX log in it.

    Other threads are heard as before, but for their warnings: Python keeps the filters of those for all threads.
    """
    me = threading.get_ident()

    def wanted(record: logging.LogRecord) -> bool:
        return record.thread != me or record.name.partition(".")[0] not in EXPORTERS

    # Handlers are filtered, not loggers, since a logger asks none of the filters of those above it.
    known = [item for item in logging.root.manager.loggerDict.values() if isinstance(item, logging.Logger)]
    handlers = {handler for logger in (logging.root, *known) for handler in logger.handlers}
    out, err = _Muted(sys.stdout), _Muted(sys.stderr)
    for handler in handlers:
        handler.addFilter(wanted)
    try:
        with warnings.catch_warnings(), redirect_stdout(out), redirect_stderr(err):
            warnings.simplefilter("ignore")
            yield
    finally:
        out.thread = err.thread = None
        for handler in handlers:
            handler.removeFilter(wanted)


class _Muted(io.TextIOBase):
    """A stream that drops what this thread writes until `thread` is None: a handler that keeps it then works again."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.thread: int | None = threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self.thread else self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()
