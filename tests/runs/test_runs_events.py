from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.runs import Events
from weft.runs.events import final_event, head, tail

FIELDS = st.dictionaries(
    st.text(min_size=1).filter(lambda name: name not in ("event", "time")),
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    max_size=4,
)


def names(path: Path) -> list[str]:
    return [event["event"] for event in Events(path).read()]


def without_time(events: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in event.items() if name != "time"} for event in events]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.text(), FIELDS), max_size=8), st.integers(0, 8))
def test_what_is_appended_is_read_in_order(records: list[tuple[str, dict[str, Any]]], reopen: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        events = Events(Path(folder) / "e.jsonl")
        for number, (name, fields) in enumerate(records):
            if number == reopen:
                events.close()
                events = Events(Path(folder) / "e.jsonl")
            events.append(name, **fields)
        assert without_time(events.read()) == [{"event": name, **fields} for name, fields in records]
        assert events.damaged == 0
        events.close()


def test_an_event_waits_in_the_buffer_until_its_time_or_a_flush(tmp_path: Path) -> None:
    slow = Events(tmp_path / "slow.jsonl", every=math.inf)
    slow.append("a")
    assert not slow.path.exists()
    assert list(Events(slow.path).read()) == []
    slow.flush()
    assert names(slow.path) == ["a"]
    quick = Events(tmp_path / "quick.jsonl", every=0)
    quick.append("step", loss=math.nan, rate=-math.inf)
    (line,) = quick.path.read_text().splitlines()
    event = json.loads(line)
    assert isinstance(event.pop("time"), float)
    assert event == {"event": "step", "loss": "nan", "rate": "-inf"}


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_bytes(b'{"event":"a"}\n\n{"event":\n[1]\n\xff\xfe\n' + b"[" * 99_999 + b'\n{"event":"b"}\n{"eve')
    events = Events(path)
    assert [event["event"] for event in events.read()] == ["a", "b"]
    assert events.damaged == 5
    assert [event["event"] for event in events.read()] == ["a", "b"]
    assert events.damaged == 5


def test_a_file_cut_at_any_byte_loses_only_the_event_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    whole = b"".join(b'{"step": %d}\n' % step for step in range(3))
    ends = [index for index, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        left = [step for step, end in enumerate(ends) if end <= cut]  # without its newline an event is still whole
        with Events(path) as events:
            events.append("step", step=9)
            assert [event["step"] for event in events.read()] == [*left, 9]
        path.write_bytes(whole[:cut])
        with Events(path) as events:
            events.drop_from(2)
            assert [event["step"] for event in events.read()] == [step for step in left if step < 2]
            assert events.damaged == 0
            events.append("step", step=2)
            assert [event["step"] for event in events.read()] == [step for step in left if step < 2] + [2]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.none() | st.integers(0, 9)), st.integers(0, 10))
def test_a_resume_drops_exactly_the_events_of_its_steps_and_later(steps: list[int | None], step: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        events = Events(Path(folder) / "e.jsonl")
        for number, at in enumerate(steps):
            events.append("e", number=number, **({} if at is None else {"step": at}))
        events.flush()
        before = list(events.read())
        events.drop_from(step)
        assert list(events.read()) == [event for event in before if "step" not in event or event["step"] < step]
        events.append("after")
        assert [event["event"] for event in events.read()][-1] == "after"
        assert [path.name for path in Path(folder).iterdir()] in (["e.jsonl"], [])
        events.close()


def test_the_end_is_found_however_much_follows_it_and_a_resume_forgets_it(tmp_path: Path) -> None:
    with Events(tmp_path / "e.jsonl") as events:
        events.append("step", step=0)
        events.append("finished")
        for number in range(2000):
            events.append("note", number=number, text="x" * 60, word="failed to be an end")
    assert events.path.stat().st_size > 2 * 65536
    assert final_event(events.path) == "finished"
    events.drop_from(5)
    assert final_event(events.path) is None
    assert names(events.path) == ["step", *["note"] * 2000]


@pytest.mark.parametrize("window", [10, 100, 1000, 10_000])
def test_head_and_tail_are_the_whole_events_in_their_windows(tmp_path: Path, window: int) -> None:
    path = tmp_path / "e.jsonl"
    lines = [json.dumps({"event": "e", "step": step, "x": "y" * (step % 50)}).encode() + b"\n" for step in range(60)]
    path.write_bytes(b"".join(lines))
    ends = [sum(map(len, lines[: step + 1])) for step in range(60)]
    # a cut just before the newline leaves a whole event, hence ends - 1
    assert [event["step"] for event in head(path, window)] == [step for step in range(60) if ends[step] - 1 <= window]
    first = ends[-1] - window
    assert [event["step"] for event in tail(path, window)] == [
        step for step in range(60) if ends[step] - len(lines[step]) > first or first <= 0
    ]
