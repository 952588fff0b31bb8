"""Files that are either complete or absent: atomic writes, JSON, hashes, append-only files, and clear disk errors."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from weft.errors import RunError

FULL = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "raise the quota or remove files",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
}


def write_atomic(path: Path | str, data: bytes | str) -> None:
    """Replace the file by `data` in one step that survives a crash; a failure leaves the old file untouched."""
    raw = data.encode() if isinstance(data, str) else data
    with replacing(Path(path), len(raw)) as file:
        file.write(raw)


def write_json(path: Path | str, obj: Any) -> None:
    """Write `to_json(obj)` atomically, with sorted keys and an indent of 2."""
    write_atomic(path, json.dumps(to_json(obj), sort_keys=True, indent=2, allow_nan=False) + "\n")


def read_json(path: Path | str) -> Any:
    """The value in a JSON file; `RunError` that names the file if it is missing or malformed."""
    try:
        return json.loads(Path(path).read_bytes())
    except OSError as error:
        raise RunError(f"cannot read '{path}': {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RunError(
            f"'{path}' is not valid JSON ({error}); it was damaged or edited: restore it or remove it"
        ) from error


def sha256_file(path: Path | str) -> str:
    """The SHA-256 of a file's content, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def to_json(value: Any) -> Any:
    """The same value in the types of JSON; numbers that JSON lacks become the strings "nan", "inf" and "-inf".

    >>> to_json({"loss": float("inf"), 3: (1, 2.5)})
    {'loss': 'inf', '3': [1, 2.5]}
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((to_json(item) for item in value), key=repr)
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):  # NumPy and torch, scalars and arrays
        return to_json(value.tolist())
    raise RunError(f"cannot write {type(value).__name__} {value!r} as JSON; use numbers, strings, lists or mappings")


@contextmanager
def replacing(path: Path, wanted: int) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends well, and is removed when it does not."""
    temp = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    with disk_errors(path, wanted):
        try:
            with open(temp, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temp, path)
            sync_folder(path.parent)
        except BaseException:
            temp.unlink(missing_ok=True)
            raise


@contextmanager
def replacing_files(folder: Path, last: Sequence[str] = ()) -> Iterator[Path]:
    """A hidden folder inside `folder`, whose files move into `folder` when the block ends well.

    They move one by one, each complete and on the disk, those named in `last` after the others. When the block fails,
    `folder` is as it was.
    """
    is_new = not folder.exists()
    try:
        with disk_errors(folder, 0):
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix=".new-", dir=folder, ignore_cleanup_errors=True) as temp:
                yield Path(temp)
                order = {name: place for place, name in enumerate(last, 1)}
                for path in sorted(Path(temp).iterdir(), key=lambda path: (order.get(path.name, 0), path.name)):
                    with open(path, "rb+") as file:
                        os.fsync(file.fileno())
                    os.replace(path, folder / path.name)
                sync_folder(folder)
    finally:
        if is_new:
            with suppress(OSError):  # a folder that holds files stays
                folder.rmdir()


@contextmanager
def disk_errors(path: Path, wanted: int) -> Iterator[None]:
    """Turns a failed write of `wanted` bytes to `path` into a `RunError`; for a full disk it gives the numbers."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise RunError(f"cannot write '{path}': {error.strerror or error}") from error
        raise RunError(
            f"no room for '{path}' ({error.strerror}): {wanted} bytes needed, {_free(path.parent)} bytes free; "
            f"nothing finished was lost: {FULL[error.errno]} and resume"
        ) from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: a rename that is not synced may be undone by a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder, and need not
            raise
    finally:
        os.close(handle)


def _free(folder: Path) -> int | str:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return "unknown"


# An append-only file of buffered records, which never holds part of a record after the disk was full.


class AppendFile:
    """Appends records to a file, reaching the operating system at most once in `every` seconds.

    A record that could not be written stays in the buffer and is tried again by the next flush. Threads may share it.
    """

    def __init__(self, path: Path, every: float = 1.0) -> None:
        self.path = path
        self.every = every
        self._records: list[bytes] = []
        self._handle: int | None = None
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def add(self, record: bytes) -> None:
        with self._lock:
            self._records.append(record)
            if time.monotonic() - self._last >= self.every:
                self._write()

    def flush(self, sync: bool = True) -> None:
        """Write what is buffered; with `sync`, return once it would survive a power cut."""
        with self._lock:
            self._write()
            if sync and self._handle is not None:
                with disk_errors(self.path, 0):
                    os.fsync(self._handle)

    def close(self) -> None:
        """Flush and close the file; a later record opens it again."""
        try:
            self.flush()
        finally:
            with self._lock:
                if self._handle is not None:
                    os.close(self._handle)
                    self._handle = None

    def _write(self) -> None:
        if not self._records:
            return
        self._last = time.monotonic()
        data = b"".join(self._records)
        with disk_errors(self.path, len(data)):
            if self._handle is None:
                self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            start, written = os.fstat(self._handle).st_size, 0
            try:
                while written < len(data):
                    written += os.write(self._handle, data[written:])
            except OSError:
                # Take the torn part back, unless somebody else has written behind it.
                if written and os.fstat(self._handle).st_size == start + written:
                    os.ftruncate(self._handle, start)
                raise
        self._records.clear()
