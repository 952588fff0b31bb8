"""Links between real processes, and stages that look after each other: who hangs is named, who says goodbye is not."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from processes import processes, wait_for
from torch.distributed import HashStore, TCPStore

from weft.distributed.env import DistEnv, read_env
from weft.distributed.heartbeat import Beat, Heartbeat, diagnose
from weft.distributed.launcher import launch
from weft.distributed.remote_call import Call
from weft.distributed.store import connect
from weft.distributed.transport import PeerLost, Transport
from weft.errors import TrainError
from weft.pipeline.message import Message

CPU = torch.device("cpu")
SIZES = (1, 50, 3, 200_000, 7, 7, 7, 1_000_000, 0, *([2] * 40), 90_000)


def tensor(n: int, size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32) + n


def exchange(file: str) -> None:
    """Three stages; each sends messages of many sizes to both neighbours and checks what comes: through the host, and
    with a payload that travels over a backend of its own. Then stage 2 dies without a word, and stage 1 must hear of it
    while it waits."""
    me = read_env()
    assert me is not None
    dist.init_process_group("gloo", store=connect(), rank=me.rank, world_size=me.world)
    for backend in (None, "gloo"):
        exchange_over(Transport(me.rank, me.world, CPU, backend), me)
    Path(f"{file}{me.rank}").write_text("all right")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the one that elastic sends when it finds stage 2 dead
    transport = Transport(me.rank, me.world, CPU)
    if me.rank == 2:
        time.sleep(0.2)
        os._exit(9)
    try:
        transport.take()
    except PeerLost as lost:
        Path(f"{file}-lost{me.rank}").write_text(str(lost.stage))
    os._exit(9)


def exchange_over(transport: Transport, me: DistEnv) -> None:
    neighbours = [other for other in (me.rank - 1, me.rank + 1) if 0 <= other < me.world]
    for n, size in enumerate(SIZES):
        for other in neighbours:
            kind = "F" if other > me.rank else "B"
            report = torch.tensor([float(n)], dtype=torch.float64) if kind == "B" else None
            transport.send(other, Message(kind, n, (tensor(n, size), None), (True, False), report))
    seen: dict[str, list[int]] = {"F": [], "B": []}
    for _ in range(len(SIZES) * len(neighbours)):
        arrived = transport.take()
        assert arrived is not None
        message = arrived.message
        assert message.tensors[1] is None
        assert message.tensors[0] is not None
        assert torch.equal(message.tensors[0], tensor(message.microbatch, SIZES[message.microbatch]))
        assert (message.report is not None) == (message.kind == "B")
        seen[message.kind].append(message.microbatch)
    assert transport.take(0) is None
    order = list(range(len(SIZES)))
    assert seen["F"] == (order if me.rank > 0 else [])
    assert seen["B"] == (order if me.rank < me.world - 1 else [])
    transport.close()


def test_messages_of_any_size_arrive_whole_both_ways_and_a_neighbour_that_dies_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="exit code 9"):
        launch(3, Call(exchange, (str(tmp_path / "said"),)), restarts=0)
    assert [(tmp_path / f"said{rank}").read_text() for rank in range(3)] == ["all right"] * 3
    assert (tmp_path / "said-lost1").read_text() == "2"


# Stages that look after each other: who hangs is named, who says goodbye is not.


PERIOD = 0.05
FOREVER = 3600.0


class Lost(list[tuple[int, str]]):
    """What a watch reported."""

    def __call__(self, rank: int, message: str) -> None:
        self.append((rank, message))


@pytest.fixture
def lost() -> Lost:
    return Lost()


@pytest.fixture
def watch() -> Iterator[Callable[..., Heartbeat]]:
    started: list[Heartbeat] = []

    def begin(*arguments: Any, **options: Any) -> Heartbeat:
        started.append(Heartbeat(*arguments, **{"period": PERIOD, "silence": FOREVER, "patience": FOREVER, **options}))
        return started[-1]

    yield begin
    for each in started:
        each.close()


# What is wrong with a stage

BEATS = st.builds(Beat, st.integers(1), st.none() | st.just("2F17"), st.floats(0, 1e4), st.just({}), st.booleans())


@pytest.mark.parametrize(
    ("beat", "quiet", "expected"),
    [
        (Beat(9, "2F17", 0.5, {}, False), 21.4, "rank 2 hangs: no sign of life for 21 s; it was doing 2F17"),
        (Beat(9, None, 0.0, {}, False), 21.4, "rank 2 hangs: no sign of life for 21 s"),
        (Beat(9, "2B40", 301.0, {}, False), 0.5, "rank 2 hangs: it has been doing 2B40 for 301 s"),
        (Beat(9, "2B40", 299.0, {}, False), 19.0, None),
        (Beat(9, None, 0.0, {}, False), 0.0, None),
        (Beat(9, "2B40", 301.0, {}, True), 1e6, None),
        (None, 299.0, None),
        (None, 301.0, "rank 2 has not begun after 301 s"),
    ],
)
def test_a_complaint_names_what_the_stage_did_and_for_how_long(beat, quiet, expected):
    assert diagnose(2, beat, quiet, 20.0, 300.0) == expected


@given(BEATS, st.floats(0, 1e4), st.floats(0, 1e4))
def test_longer_silence_never_makes_a_stage_look_better(beat, quiet, more):
    if diagnose(0, beat, quiet, 20.0, 300.0) is not None:
        assert diagnose(0, beat, quiet + more, 20.0, 300.0) is not None


@given(BEATS, st.floats(0, 19), st.floats(0, 299))
def test_a_stage_that_beats_and_gets_on_is_left_alone(beat, quiet, seconds):
    assert diagnose(0, Beat(beat.count, beat.op, seconds, {}, beat.done), quiet, 20.0, 300.0) is None


# Several watches over one store


def test_figures_reach_all_others_and_goodbyes_are_no_loss(watch, lost):
    store = HashStore()
    three = [watch(store, rank, 3, lost, silence=0.5) for rank in range(3)]
    for rank, each in enumerate(three):
        each.figures = {"utilisation": rank / 4, "in_flight": rank}
    expected = {rank: {"utilisation": rank / 4, "in_flight": rank} for rank in range(3)}
    for rank, each in enumerate(three):
        wait_for(lambda each=each, rank=rank: each.others() == {r: f for r, f in expected.items() if r != rank})
    three[1].close()
    time.sleep(1.0)  # twice the silence, in which stage 1 says nothing and the others go on
    assert lost == []


def test_a_stage_that_stays_in_one_op_is_named_once_and_one_that_waits_is_not(watch, lost):
    store = HashStore()
    watch(store, 0, 3, lost, patience=0.5)
    busy, idle = (watch(store, rank, 3, Lost()) for rank in (1, 2))
    busy.op = ("1B40", time.monotonic())
    idle.op = ("2F3", time.monotonic())
    idle.op = None
    wait_for(lambda: lost)
    time.sleep(10 * PERIOD)
    assert [rank for rank, _ in lost] == [1]
    assert lost[0][1].startswith("rank 1 hangs: it has been doing 1B40 for ")


def test_a_stage_that_never_begins_is_named(watch, lost):
    watch(HashStore(), 0, 2, lost, silence=0.1, patience=0.3)
    wait_for(lambda: lost)
    assert lost[0][0] == 1
    assert lost[0][1].startswith("rank 1 has not begun after ")


# Real processes

SERVING = """
import socket, sys
from torch.distributed import TCPStore
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
print(port, flush=True)
sys.stdin.read()
"""


def test_the_end_of_the_store_is_reported_once(watch, lost):
    with processes() as start:
        process = start("-c", SERVING, stdin=subprocess.PIPE)
        port = int(process.stdout.readline())
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        one = watch(store, 0, 1, lost)
        wait_for(lambda: store.check(["beat/0"]))
        process.kill()
        wait_for(lambda: lost)
    one._thread.join(60)
    assert [rank for rank, _ in lost] == [-1]
    assert lost[0][1].startswith("the process that started the stages is gone: ")
