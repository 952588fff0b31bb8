"""Traces as they are read: all that was written, while they grow and when they are damaged."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import tracefiles
from hypothesis import given, settings
from hypothesis import strategies as st
from traceoracle import read_by_line, rows, same

from weft.errors import RunError
from weft.serve.event_log import LogTail
from weft.serve.views.schedule import load_trace
from weft.trace.reader import STATES, read_traces

times = st.integers(0, 8).map(lambda at: tracefiles.EPOCH + at / 2)
few = st.integers(0, 3)


@st.composite
def line(draw: st.DrawFn) -> bytes:
    """A line of a stage's file, of which some are damaged or unknown."""
    start = draw(times)
    end = start + draw(few)
    kind = draw(st.sampled_from("FBX"))
    own = [draw(few), draw(few)][: draw(st.integers(0, 2))]
    cases: list[Any] = [
        ["op", kind, draw(few), start, end, draw(few), *own],
        ["received", draw(st.sampled_from("FBX")), draw(few), start],
        ["sent", draw(st.sampled_from("FBX")), draw(few), start, 5],
        ["update", 2, draw(few), start, end],
        ["memory", draw(st.sampled_from("ab")), draw(st.sampled_from(STATES)), start, 3, 2, 1, 0],
        ["op", kind, "one", start, end, 1],
        ["op", kind, 1, start, end, 1, 2, 3, 4],
        ["what"],
        {"other": 1},
        {"start": draw(st.integers(0, 1)), "stages": 2, "cut": [1], "microbatches": 2, "time": 0.0},
    ]
    text = json.dumps(draw(st.sampled_from(cases))).encode()
    torn = draw(st.sampled_from([None, None, None, 3, len(text) - 1]))
    return text[:torn] + b"\n"


@settings(max_examples=80)
@given(st.lists(line(), max_size=12), st.lists(line(), max_size=12), st.integers(0, 500), st.integers(0, 500))
def test_however_a_file_grows_it_is_read_as_if_at_once(
    tmp_path_factory: pytest.TempPathFactory, first: list[bytes], second: list[bytes], one: int, two: int
) -> None:
    run = tmp_path_factory.mktemp("run")
    head = b'{"start":0,"stages":2,"cut":[1],"time":0}\n["op","F",0,%f,%f,1]\n' % ((tracefiles.EPOCH,) * 2)
    (run / "traces").mkdir()
    texts = [head + b"".join(own) for own in (first, second)]
    for half in range(2):
        for number, (text, at) in enumerate(zip(texts, (one, two), strict=True)):
            with open(run / "traces" / f"stage{number}.jsonl", "ab") as file:
                file.write(text[at:] if half else text[:at])
        load_trace(run)
    found, expected = load_trace(run), read_by_line(run)
    if expected is None:
        assert found is not None
        assert not any(len(stage.ops) for stage in found.stages)
        with pytest.raises(RunError, match="hold no operation yet"):
            read_traces(run)
        return
    assert same(found, expected)
    assert same(read_traces(run), expected)


def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    tracefiles.write(tmp_path, tracefiles.simulated(1, 3))
    before = load_trace(tmp_path)
    assert before is not None
    assert load_trace(tmp_path) is before, "nothing is read again while nothing changed"
    shutil.rmtree(tmp_path / "traces")
    assert load_trace(tmp_path) is None
    tracefiles.write(tmp_path, tracefiles.simulated(1, 5))
    after = load_trace(tmp_path)
    assert after is not None
    assert len(after.stages[0].ops) == 10


@pytest.mark.parametrize("lost", [(1, 2), (0, 2)])
def test_a_stage_without_a_file_did_nothing_and_the_others_are_shown(tmp_path: Path, lost: tuple[int, int]) -> None:
    tracefiles.write(tmp_path, tracefiles.simulated(3, 2))
    (tmp_path / "traces" / f"stage{lost[0]}.jsonl").unlink()
    (tmp_path / "traces" / f"stage{lost[1]}.jsonl").write_bytes(b"")
    found = load_trace(tmp_path)
    assert found is not None
    assert [len(stage.ops) for stage in found.stages] == [0 if stage in lost else 4 for stage in range(3)]


def test_what_a_stage_did_before_the_last_start_belongs_to_an_older_one(tmp_path: Path) -> None:
    tracefiles.write(tmp_path, tracefiles.simulated(2, 2))
    later = json.dumps({"start": 0, "stages": 2, "cut": [1], "time": tracefiles.EPOCH + 1e6}) + "\n"
    with open(tmp_path / "traces" / "stage0.jsonl", "a") as file:
        file.write(later + json.dumps(["op", "F", 0, tracefiles.EPOCH + 2e6, tracefiles.EPOCH + 2e6 + 1, 1]) + "\n")
    found, expected = load_trace(tmp_path), read_by_line(tmp_path)
    assert expected is not None
    assert same(found, expected)
    assert found is not None
    assert [len(stage.ops) for stage in found.stages] == [1, 0]


GOOD = b'{"start":0,"stages":1,"cut":[]}\n["op","F",0,1.0,2.0,1]\n'
HEADS = (b'"start": 0, "stages": 1000000000', b'"start": "x", "stages": 2', b'"start": 0, "stages": 0')
ROWS = (b"1e400,1", b"99999999999999999999999,1", b"0,NaN", b"-1,1")
NO_TRACES = [b"", b"\n\n", b"\xff\xfe\x00", b"[" * 100_000 + b"\n", *(b'{%s, "cut": []}\n' % own for own in HEADS)]
NO_ROWS = [GOOD + b'["op","F",%s,2,1]\n' % own for own in ROWS]


@pytest.mark.parametrize(("text", "ops"), [*((text, 0) for text in NO_TRACES), *((text, 1) for text in NO_ROWS)])
def test_what_no_stage_writes_is_skipped(tmp_path: Path, text: bytes, ops: int) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "stage0.jsonl").write_bytes(text)
    found = load_trace(tmp_path)
    assert (0 if found is None else len(found.stages[0].ops)) == ops
    assert (found is None) == (ops == 0)


def test_traces_of_few_runs_are_kept_and_others_are_read_again(tmp_path: Path) -> None:
    for number in range(6):
        tracefiles.write(tmp_path / str(number), tracefiles.simulated(1, 1))
    first = load_trace(tmp_path / "0")
    for number in range(1, 6):
        load_trace(tmp_path / str(number))
    again = load_trace(tmp_path / "0")
    assert again is not None is not first
    assert again is not first
    assert rows(again.stages[0]) == rows(first.stages[0])


def test_a_line_that_is_absurdly_long_is_skipped_and_the_next_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\n" + b"x" * 5000 + b"\ntwo\n" + b"y" * 200 + b"\nth")
    file = LogTail(path, longest=256, chunk=64)
    assert b"".join(piece for _, piece in file.read()).split() == [b"one", b"two", b"y" * 200]
    with open(path, "ab") as end:
        end.write(b"ree\n")
    assert not file.replaced()
    assert [piece for _, piece in file.read()] == [b"three\n"]


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=40).map(lambda raw: raw.replace(b"\n", b"")), max_size=20), st.data())
def test_every_line_is_given_once_and_at_its_offset(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("lines") / "file"
    path.touch()
    text, file, found, at = b"".join(own + b"\n" for own in lines), LogTail(path), b"", 0
    while at < len(text):
        more = data.draw(st.integers(1, 60))
        with open(path, "ab") as end:
            end.write(text[at : at + more])
        at += more
        os.utime(path, ns=(at, at))
        assert file.changed()
        assert not file.replaced()
        for offset, piece in file.read():
            assert text[offset : offset + len(piece)] == piece
            assert offset == len(found)
            assert piece.endswith(b"\n")
            found += piece
    assert found == text
