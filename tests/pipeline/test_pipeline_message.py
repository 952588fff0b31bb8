"""Messages: whatever travels arrives with its bits, its layout and its alignment; what is no message is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.errors import PipelineError
from weft.pipeline.message import PREFIX, Message, pack, pack_with_payload, prefix, unpack

CPU = torch.device("cpu")
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool, torch.uint8)


def assert_same(sent: Tensor | None, found: Tensor | None) -> None:
    assert (sent is None) == (found is None)
    if sent is None or found is None:
        return
    assert (sent.dtype, sent.shape, sent.stride()) == (found.dtype, found.shape, found.stride())
    if sent.numel():
        assert sent.data_ptr() % 64 == found.data_ptr() % 64
    assert torch.equal(sent, found)


def both_ways(message: Message) -> list[Message]:
    payload, block = pack_with_payload(message, CPU)
    return [unpack(pack(message), CPU), unpack(block(), CPU, payload)]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Dense, turned, cut out of a larger one, or one row shown several times."""
    sizes = draw(st.lists(st.integers(0, 4), max_size=4))
    kind = draw(st.sampled_from(TYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    found = torch.randint(0, 2 if kind is torch.bool else 100, [size + 2 for size in sizes], generator=generator).to(
        kind
    )
    for axis, size in enumerate(sizes):
        found = found.narrow(axis, draw(st.integers(0, 2)), size)
    if draw(st.booleans()):
        found = found.contiguous()
    if found.dim() > 1 and draw(st.booleans()):
        found = found.transpose(0, draw(st.integers(1, found.dim() - 1)))
    if draw(st.booleans()):
        found = found.unsqueeze(0).expand(draw(st.integers(1, 3)), *found.shape)
    return found


@settings(suppress_health_check=list(HealthCheck), max_examples=300)
@given(
    st.lists(st.one_of(st.none(), tensors()), max_size=4), st.integers(0, 2**40), st.booleans(), st.text(max_size=20)
)
def test_every_tensor_arrives_as_it_lay(parts: list[Any], n: int, reports: bool, note: str) -> None:
    report = torch.tensor([0.1, 1.0, float("nan")], dtype=torch.float64) if reports else None
    message = Message("F", n, tuple(parts), tuple(x is not None for x in parts), report, note)
    for found in both_ways(message):
        assert (found.kind, found.microbatch, found.needs_grad, found.note) == ("F", n, message.needs_grad, note)
        assert len(found.tensors) == len(parts)
        for sent, arrived in zip(parts, found.tensors, strict=True):
            assert_same(sent, arrived)
        if report is not None:
            assert found.report is not None
            assert report.view(torch.int64).tolist() == found.report.view(torch.int64).tolist()


@pytest.mark.parametrize(
    "layout",
    ['["float32",[4],[1],0]', '["float32",[4],[-1],0]', '["object",[1],[1],0]', '["float32",[1],[1],99]', "7", "{}"],
)
def test_a_header_that_lies_is_refused(layout: str) -> None:
    header = b'{"k":"F","n":1,"w":[],"t":[' + layout.encode() + b',null],"x":""}'
    length = PREFIX + len(header)
    block = torch.frombuffer(bytearray(prefix(len(header), length, 0) + header), dtype=torch.uint8)
    with pytest.raises(PipelineError, match="not a message"):
        unpack(block, CPU)


@given(st.binary(min_size=PREFIX, max_size=200))
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(PipelineError, match="not a message"):
        unpack(torch.frombuffer(bytearray(data), dtype=torch.uint8), CPU)
