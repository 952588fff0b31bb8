from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.runs import ScalarWriter
from weft.runs.tensorboard import crc32c


def bitwise(data: bytes) -> int:
    """The checksum by its definition, bit by bit: the oracle of the table."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    return crc ^ 0xFFFFFFFF


@given(st.binary(max_size=64))
def test_the_table_gives_the_checksum_of_the_definition(data: bytes) -> None:
    assert crc32c(data) == bitwise(data)


def test_tensorboard_reads_every_point(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    points = [
        ("train/loss", 0.5, 0),
        ("train/loss", math.nan, 1),
        ("train/loss", 1e40, 300),
        ("train/loss", -math.inf, 1 << 40),
        ("größe/" + "x" * 300, 3, 7),
    ]
    with ScalarWriter(tmp_path) as writer:
        for tag, value, step in points:
            writer.add(tag, value, step)
    events = accumulator.EventAccumulator(str(tmp_path), purge_orphaned_data=False).Reload()
    assert sorted(events.Tags()["scalars"]) == sorted({tag for tag, _, _ in points})
    read = [
        (tag, struct.pack("<f", scalar.value), scalar.step)
        for tag in events.Tags()["scalars"]
        for scalar in events.Scalars(tag)
    ]
    clipped = [
        (tag, min(value, math.inf) if value < 1e39 or value != value else math.inf, step) for tag, value, step in points
    ]
    assert sorted(read) == sorted((tag, struct.pack("<f", value), step) for tag, value, step in clipped)


def test_two_writers_of_one_folder_use_two_files(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first, second = ScalarWriter(tmp_path), ScalarWriter(tmp_path)
    first.add("a", 1.0, 0)
    second.add("a", 2.0, 1)
    first.close()
    second.flush()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    values = [
        scalar.value for file in files for scalar in accumulator.EventAccumulator(str(file)).Reload().Scalars("a")
    ]
    assert sorted(values) == [1.0, 2.0]
    second.close()
