"""Messages between stages: tensors with their exact layout, behind a header of plain JSON.

One message is one block of bytes:

    lengths | header (JSON) | tensor | tensor | ...         each tensor at an address with the alignment that it had

or two, where tensors go from device to device and not through the host: the header's block, and a payload of tensors.

The layout is part of the message because a kernel may sum in another order over another layout: a tensor must lie in
memory after the cut as it would have without one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from weft.errors import PipelineError

Kind = Literal["F", "B", "norm", "total", "tie", "end"]
ALIGNMENT = 64
_LENGTHS = struct.Struct("<3Q")
PREFIX = _LENGTHS.size
_TYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


@dataclass(frozen=True, slots=True)
class Message:
    """Activations for the next stage (F), gradients for the one before (B), sums, or the end of the run.

    ``needs_grad`` says of each activation whether a gradient comes back. ``report`` goes with a backward: the loss,
    whether it counts, and sum and count of every metric. ``note`` names the cause of a loss that is not a number.
    """

    kind: Kind
    microbatch: int
    tensors: tuple[Tensor | None, ...] = ()
    needs_grad: tuple[bool, ...] = ()
    report: Tensor | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor without its values: type, sizes, strides, and where it lay relative to a 64-byte line."""

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    line: int

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLayout:
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in _TYPES or tensor.layout is not torch.strided:
            raise PipelineError(
                f"a tensor of type {name}, layout {tensor.layout} cannot travel between stages: use a dense tensor"
            )
        return cls(name, tuple(tensor.shape), tuple(tensor.stride()), tensor.data_ptr() % ALIGNMENT)

    @property
    def extent(self) -> int:
        """Elements from the first to the last in memory, those between that do not belong to it included."""
        if 0 in self.sizes:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))

    @property
    def type(self) -> torch.dtype:
        return _TYPES[self.dtype]


def pack(message: Message, pinned: bool = False) -> Tensor:
    """The message as a block of bytes. With ``pinned`` memory copies from a device are issued and not waited for."""
    parts = _parts((*message.tensors, message.report))
    return _block(message, parts, parts, 0, pinned)


def pack_with_payload(message: Message, device: torch.device) -> tuple[Tensor, Callable[[], Tensor]]:
    """The payload, packed on its device, and a function that makes the block that goes before it.

    The function waits for the report: do not call it in the thread that issues work to the device.
    """
    parts = _parts(message.tensors)
    starts, length = _offsets(0, [layout for layout, _ in parts if layout is not None])
    payload = torch.empty(length, dtype=torch.uint8, device=device)
    _pack(payload, starts, parts)

    def block() -> Tensor:
        report = _parts((None if message.report is None else message.report.cpu(),))
        return _block(message, [*parts, *report], report, length)

    return payload, block


def prefix(header: int, length: int, payload: int) -> bytes:
    """The first bytes of a block: the lengths of its header, of the block and of the payload."""
    return _LENGTHS.pack(header, length, payload)


def read_lengths(block: Tensor) -> tuple[int, int, int]:
    """The lengths in the first bytes of a block."""
    header, length, payload = _LENGTHS.unpack(bytes(block[:PREFIX].numpy()))
    return header, length, payload


def unpack(block: Tensor, device: torch.device, payload: Tensor | None = None) -> Message:
    """The message in a block; its tensors are parts of the payload or of the block, or copies of those on another
    device, in the same layout.

    Raises PipelineError for bytes that are not a message.
    """
    try:
        header, length, payload_bytes = read_lengths(block)
        if not 0 < header <= length - PREFIX <= block.numel() - PREFIX:
            raise ValueError(f"lengths of {header} and {length} in {block.numel()} bytes")
        if payload_bytes != (0 if payload is None else payload.numel()):
            raise ValueError(f"a payload of {payload_bytes} bytes is missing")
        head = json.loads(bytes(block[PREFIX : PREFIX + header].numpy()))
        kind, n, note = str(head["k"]), int(head["n"]), str(head["x"])
        *layouts, last = [
            None if p is None else TensorLayout(str(p[0]), tuple(map(int, p[1])), tuple(map(int, p[2])), int(p[3]))
            for p in head["t"]
        ]
        present = [layout for layout in layouts if layout is not None]
        reported = [] if last is None else [last]
        all_layouts = (*present, *reported)
        sound = all(min((*x.sizes, *x.strides, x.line), default=0) >= 0 and x.line < ALIGNMENT for x in all_layouts)
        starts, end = _offsets(PREFIX + header, all_layouts if payload is None else reported)
        inside, payload_end = ([], 0) if payload is None else _offsets(0, present)
        if end > length or payload_end > payload_bytes or not sound or kind not in get_args(Kind):
            raise ValueError(f"{length} bytes of kind {kind!r}")
        needs_grad = tuple(bool(flag) for flag in head["w"])
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as problem:
        raise PipelineError(f"what arrived is not a message of a stage: {problem}") from problem
    report = None if last is None else _view(block, starts.pop(), last)  # stays on the host, where it is logged
    if payload is not None:
        tensors_present = iter([_view(payload, start, layout) for start, layout in zip(inside, present, strict=True)])
    else:
        views = [(_view(block, start, layout), layout) for start, layout in zip(starts, present, strict=True)]
        tensors_present = iter([_placed(tensor, layout, device) for tensor, layout in views])
    tensors = tuple(None if layout is None else next(tensors_present) for layout in layouts)
    return Message(kind, n, tensors, needs_grad, report, note)  # type: ignore[arg-type]


Parts = list[tuple[TensorLayout | None, Tensor | None]]


def _parts(tensors: Sequence[Tensor | None]) -> Parts:
    return [(None, None) if x is None else (TensorLayout.of(x.detach()), x.detach()) for x in tensors]


def _block(message: Message, parts: Parts, inside: Parts, payload: int, pinned: bool = False) -> Tensor:
    """The header of all parts, and behind it those that go in this block."""
    places = [None if x is None else [x.dtype, x.sizes, x.strides, x.line] for x, _ in parts]
    head = {"k": message.kind, "n": message.microbatch, "w": message.needs_grad, "t": places, "x": message.note}
    header = json.dumps(head, separators=(",", ":")).encode()
    starts, length = _offsets(PREFIX + len(header), [layout for layout, _ in inside if layout is not None])
    block = torch.empty(length, dtype=torch.uint8, pin_memory=pinned)
    begin = prefix(len(header), length, payload) + header
    block[: len(begin)].copy_(torch.frombuffer(bytearray(begin), dtype=torch.uint8))
    _pack(block, starts, inside)
    return block


def _pack(block: Tensor, starts: Sequence[int], parts: Parts) -> None:
    places = iter(starts)
    for layout, tensor in parts:
        if layout is not None and tensor is not None:
            start = next(places)
            if layout.extent:
                _copy(tensor, _view(block, start, layout), layout)


def _offsets(begin: int, layouts: Sequence[TensorLayout]) -> tuple[list[int], int]:
    """Where in the block each tensor begins, and how long the block is."""
    starts = []
    end = begin
    for layout in layouts:
        start = -(-end // ALIGNMENT) * ALIGNMENT + layout.line
        starts.append(start)
        end = start + layout.extent * layout.type.itemsize
    return starts, end


def _view(block: Tensor, start: int, layout: TensorLayout) -> Tensor:
    flat = block[start : start + layout.extent * layout.type.itemsize].view(layout.type)
    return torch.as_strided(flat, layout.sizes, layout.strides, flat.storage_offset())


def _copy(tensor: Tensor, target: Tensor, layout: TensorLayout) -> None:
    # A size with stride 0 is one row shown several times: it is written once.
    for axis, (size, stride) in enumerate(zip(layout.sizes, layout.strides, strict=True)):
        if stride == 0 and size > 1:
            target, tensor = target.narrow(axis, 0, 1), tensor.narrow(axis, 0, 1)
    target.copy_(tensor, non_blocking=True)


def _placed(tensor: Tensor, layout: TensorLayout, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return tensor
    # Strides as they were, also where a row is shown several times or rows do not touch.
    storage = torch.empty(layout.extent, dtype=layout.type, device=device)
    flat = torch.as_strided(tensor, (layout.extent,), (1,), tensor.storage_offset())
    storage.copy_(flat, non_blocking=True)
    return torch.as_strided(storage, layout.sizes, layout.strides)
