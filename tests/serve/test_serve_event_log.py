"""Following the events of a run: whatever the file goes through, each whole line counts once, in bounded memory."""

from __future__ import annotations

import json
import os
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.runs import Events
from weft.serve.event_log import LONGEST_NAME, NEWEST, SERIES, FollowedFile, RunProgress, SummaryCache

Figures = tuple[int, int, int]


def figures(reduced: RunProgress) -> Figures:
    return reduced.points, reduced.done, reduced.damaged


def drawn(reduced: RunProgress) -> dict[tuple[str, str], dict[str, Any]]:
    return {key: curve.to_json() for key, curve in reduced.curves.items()}


def step(at: int, **more: Any) -> bytes:
    return json.dumps({"event": "step", "time": 100.0 + at, "step": at, "loss": float(at), **more}).encode() + b"\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def append(file: Path, *lines: bytes) -> None:
    with open(file, "ab") as out:
        out.writelines(lines)


def test_a_line_that_a_killed_writer_tore_is_counted_once_the_next_writer_comes(file: Path) -> None:
    append(file, step(0), step(1)[:-9])
    follower = FollowedFile(file, RunProgress)
    assert follower.query(figures) == (1, 1, 0)
    with Events(file) as events:
        events.append("step", step=1, loss=1.0)
    assert follower.query(figures) == (2, 2, 1)


def test_malformed_lines_are_skipped_and_counted(file: Path) -> None:
    wrong = [b"{]\n", b"[1, 2]\n", b"\xff\xfe\n", b'"text"\n', b"NaN\n", b"[" * 100_000 + b"\n"]
    append(file, step(0), *wrong, b"\n", b"  \n", step(1))
    assert FollowedFile(file, RunProgress).query(figures) == (2, 2, len(wrong))


def test_events_that_weft_would_not_write_change_nothing(file: Path) -> None:
    odd: list[dict[str, Any]] = [
        {},
        {"event": ["step"]},
        {"event": "step"},
        *({"event": "step", "step": number, "loss": 1.0} for number in ("7", -1, 1e9, 2**60)),
        {"event": "validation", "step": 1, "scores": 3},
        {"event": "validation", "step": None, "scores": {"a": 1}},
        {"event": "pipeline", "utilisation": 3},
    ]
    append(file, step(0), *(json.dumps(event).encode() + b"\n" for event in odd))
    assert FollowedFile(file, RunProgress).query(figures) == (1, 1, 0)


def test_a_line_longer_than_any_event_is_skipped_and_the_next_one_read(file: Path) -> None:
    follower = FollowedFile(file, RunProgress)
    assert follower.query(figures) == (0, 0, 0)  # there is no file yet
    append(file, step(0), b'{"event": "' + b"x" * (3 << 20))
    assert follower.query(figures) == (1, 1, 0)
    append(file, b'more"}\n', step(1))
    assert follower.query(figures) == (2, 2, 1)


def test_a_resume_that_drops_events_begins_again(file: Path) -> None:
    events = Events(file)
    events.append("started", at=0, steps=9)
    for at in range(6):
        events.append("step", step=at, loss=1.0 + at)
    events.append("stopped", at=6)
    events.flush()
    follower = FollowedFile(file, RunProgress)
    assert follower.query(lambda reduced: (reduced.done, reduced.ended)) == (6, "stopped")
    events.drop_from(3)
    events.append("started", at=3, steps=9)
    events.append("step", step=3, loss=0.5)
    events.close()
    assert follower.query(lambda reduced: (reduced.points, reduced.done, reduced.ended)) == (4, 4, None)
    assert follower.query(lambda reduced: reduced.curves["train", "loss"].to_json()["y"]) == [1.0, 2.0, 3.0, 0.5]


def test_a_file_that_is_cut_off_or_written_anew_begins_again(file: Path) -> None:
    follower = FollowedFile(file, RunProgress)
    append(file, *(step(at) for at in range(5)))
    assert follower.query(figures) == (5, 5, 0)
    os.truncate(file, len(step(0)) * 2)
    assert follower.query(figures) == (2, 2, 0)
    file.write_bytes(b"".join(step(at, accuracy=0.5) for at in range(4)))  # longer than what was read
    assert follower.query(figures) == (4, 4, 0)
    file.unlink()
    assert follower.query(figures) == (0, 0, 0)
    append(file, step(0))
    assert follower.query(figures) == (1, 1, 0)


@given(st.lists(st.one_of(st.integers(0, 30), st.sampled_from([b"{]", b"", b"[]"])), max_size=20), st.data())
def test_however_the_file_grows_the_end_is_the_same(lines: list[int | bytes], data: st.DataObject) -> None:
    whole = b"".join(step(line) if isinstance(line, int) else line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "events.jsonl"
        follower = FollowedFile(file, RunProgress)
        for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            append(file, whole[start:end])
            follower.query(figures)
        steps = [line for line in lines if isinstance(line, int)]
        wrong = sum(line in (b"{]", b"[]") for line in lines)
        assert follower.query(figures) == (len(steps), max(steps, default=-1) + 1, wrong)
        assert follower.query(drawn) == FollowedFile(file, RunProgress).query(drawn)


def test_a_large_file_is_read_in_little_memory(file: Path) -> None:
    with open(file, "wb") as out:
        out.write(b'{"event": "started", "time": 0.0, "at": 0, "steps": 20000}\n')
        for at in range(20_000):
            out.write(step(at, accuracy=0.5))
            if at % 5000 == 0:  # lines of a megabyte that are events, and holes that are none
                out.write(step(at, note="x" * 1_000_000))
                out.seek(15 << 20, os.SEEK_CUR)
                out.write(b"\n")
    assert file.stat().st_size > 60 << 20
    follower = FollowedFile(file, RunProgress)
    tracemalloc.start()
    try:
        assert follower.query(figures) == (20_004, 20_000, 4)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 3 << 20
    assert peak < 16 << 20


def test_an_event_file_with_countless_names_keeps_a_few(file: Path) -> None:
    append(file, *(step(at, **{f"metric{at}": 1.0}) for at in range(500)), step(500, **{"x" * (LONGEST_NAME + 1): 1.0}))
    assert FollowedFile(file, RunProgress).query(lambda reduced: len(reduced.curves)) == SERIES
    assert FollowedFile(file, RunProgress).query(lambda reduced: len(reduced.newest)) <= SERIES


def test_seconds_are_those_of_training_and_not_between_two_sessions() -> None:
    reduced = RunProgress()
    for start, times in ((1000.0, (1001.0, 1003.0)), (9000.0, (9002.0, 9003.0))):
        reduced.add_event({"event": "started", "time": start, "at": reduced.done, "steps": 4})
        for time in times:
            reduced.add_event({"event": "step", "time": time, "step": reduced.done, "loss": 3.0 - reduced.done})
    reduced.add_event({"event": "finished", "time": 9004.0, "steps": 4, "fingerprint": "ab"})
    reduced.add_event({"event": "test", "time": 9999.0, "name": "chosen"})
    assert (reduced.seconds, reduced.done, reduced.ended, reduced.fingerprint) == (7.0, 4, "finished", "ab")
    assert reduced.curves["progress", "seconds"].to_json()["y"] == [1.0, 3.0, 5.0, 6.0]
    assert reduced.smooth("loss") == 1.5


def test_the_time_left_follows_the_newest_steps() -> None:
    reduced = RunProgress()
    reduced.add_event({"event": "started", "time": 0.0, "at": 0, "steps": 1000})
    assert reduced.seconds_left() is None
    for at in range(300):
        time = 10.0 * min(at, 100) + 0.5 * max(0, at - 100)
        reduced.add_event({"event": "step", "time": time, "step": at, "loss": 1.0})
    assert reduced.seconds_left() == pytest.approx(700 * 0.5)
    assert reduced.smooth("loss") == 1.0
    assert len(reduced.newest["loss"]) == NEWEST


def test_a_study_counts_its_trials_and_keeps_the_best() -> None:
    reduced = RunProgress()
    reduced.add_event({"event": "started", "time": 0.0, "at": 0, "steps": 5, "trials": []})
    for number, values in enumerate(([0.5, 9.0], [0.7, 2.0], None, ["nan", 1.0])):
        reduced.add_event({"event": "ended", "time": 2.0 * number, "trials": [number], "values": values})
    assert (reduced.done, reduced.steps, reduced.values[1]) == (4, 5, (1.0, 9.0))
    assert reduced.values[0] == (0.5, 0.7)
    assert reduced.seconds_left() == pytest.approx(2.0)


def test_a_cache_reads_each_file_once_and_keeps_them_apart(tmp_path: Path) -> None:
    cache, one, other = SummaryCache(RunProgress), tmp_path / "one", tmp_path / "other"
    append(one, step(0), step(1))
    append(other, step(0))
    kept = cache.query(one, lambda reduced: reduced)
    assert cache.query(other, figures) == (1, 1, 0)
    append(one, step(2))
    assert cache.query(one, figures) == (3, 3, 0)
    assert cache.query(one, lambda reduced: reduced) is kept
