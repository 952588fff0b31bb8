"""Links between real processes: order, sizes that change, both directions at once, and a neighbour that dies."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from weft.distributed.env import read_env
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


def exchange(apart: str | None, file: str) -> None:
    """Three stages; each sends messages of many sizes to both neighbours and checks what comes."""
    me = read_env()
    assert me is not None
    dist.init_process_group("gloo", store=connect(), rank=me.rank, world_size=me.world)
    transport = Transport(me.rank, me.world, CPU, apart)
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
    Path(f"{file}{me.rank}").write_text("all right")


@pytest.mark.parametrize("apart", [None, "gloo"], ids=["through the host", "payload apart"])
def test_messages_of_any_size_arrive_whole_and_in_order_both_ways(tmp_path: Path, apart: str | None) -> None:
    launch(3, Call(exchange, (apart, str(tmp_path / "said"))), restarts=0)
    assert [(tmp_path / f"said{rank}").read_text() for rank in range(3)] == ["all right"] * 3


def bereaved(file: str) -> None:
    """Stage 1 dies without a word; stage 0 must hear of it while it waits."""
    me = read_env()
    assert me is not None
    dist.init_process_group("gloo", store=connect(), rank=me.rank, world_size=me.world)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the one that elastic sends when it finds stage 1 dead
    transport = Transport(me.rank, me.world, CPU)
    if me.rank == 1:
        time.sleep(0.5)
        os._exit(9)
    began = time.monotonic()
    try:
        transport.take()
    except PeerLost as lost:
        Path(file).write_text(json.dumps({"stage": lost.stage, "seconds": time.monotonic() - began}))
    os._exit(9)


def test_a_neighbour_that_dies_is_noticed_at_once(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="exit code 9"):
        launch(2, Call(bereaved, (str(tmp_path / "said"),)), restarts=0)
    said = json.loads((tmp_path / "said").read_text())
    assert said["stage"] == 1
    assert said["seconds"] < 30
