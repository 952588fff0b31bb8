"""Scalars for TensorBoard, written without TensorBoard: the few bytes of its file format that a scalar needs."""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

from weft.runs.appender import Appender
from weft.runs.files import room

_numbers = count()


class ScalarWriter:
    """One event file in a folder; TensorBoard shows all files of a folder as one run."""

    def __init__(self, folder: Path | str, every: float = 5.0) -> None:
        folder = Path(folder)
        with room(folder, 0):
            folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._appender = Appender(folder / name, every)
        # Event { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5; }
        self._appender.add(record(_double(1, time.time()) + _block(3, b"brain.Event:2")))

    def add(self, tag: str, value: float, step: int) -> None:
        """Add a point; NaN and infinity are shown by TensorBoard as such. Kept with the precision of float32."""
        # Summary { repeated Value value = 1; }    Value { string tag = 1; float simple_value = 2; }
        point = _block(1, tag.encode()) + _single(2, float(value))
        self._appender.add(record(_double(1, time.time()) + _number(2, step) + _block(5, _block(1, point))))

    def flush(self) -> None:
        self._appender.flush()

    def close(self) -> None:
        self._appender.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def record(data: bytes) -> bytes:
    """A TFRecord: length, its checksum, data, its checksum."""
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def crc32c(data: bytes) -> int:
    """The checksum of Castagnoli.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _table()


def _masked(data: bytes) -> bytes:
    """The checksum rotated and shifted, as TFRecord wants it, so that data may hold checksums itself."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


# Protocol buffers: a key (field * 8 + wire type), then a varint (0), 8 bytes (1), length and bytes (2) or 4 bytes (5).


def _varint(value: int) -> bytes:
    value &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field * 8) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field * 8 + 1) + struct.pack("<d", value)


def _block(field: int, value: bytes) -> bytes:
    return _varint(field * 8 + 2) + _varint(len(value)) + value


def _single(field: int, value: float) -> bytes:
    try:
        raw = struct.pack("<f", value)
    except OverflowError:
        raw = struct.pack("<f", math.copysign(math.inf, value))
    return _varint(field * 8 + 5) + raw
