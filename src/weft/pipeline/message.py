"""What travels between stages: tensors with their exact layout, behind a header of plain text that nothing evaluates.

One message is one block of bytes:

    two lengths | header (JSON) | tensor | tensor | ...     each tensor at an address with the alignment that it had

The layout is part of the message because a kernel may sum in another order over another layout: a tensor must lie in
memory after the cut as it would have without one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from weft.errors import PipelineError

Kind = Literal["F", "B", "end"]
ALIGNED = 64
PREFIX = 16
_TYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


@dataclass(frozen=True, slots=True)
class Message:
    """Activations for the next stage (F), gradients for the one before (B), or word that the run ends.

    ``wanted`` says of each activation whether a gradient comes back. ``report`` goes with a backward: the loss, whether
    it counts, and sum and count of every metric; ``note`` says what is wrong with a loss that is not a number.
    """

    kind: Kind
    microbatch: int
    tensors: tuple[Tensor | None, ...] = ()
    wanted: tuple[bool, ...] = ()
    report: Tensor | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor without its values: type, sizes, strides, and where it lay relative to a 64-byte line."""

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    line: int

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in _TYPES or tensor.layout is not torch.strided:
            raise PipelineError(
                f"a tensor of type {name}, layout {tensor.layout} cannot travel between stages: use a dense tensor"
            )
        return cls(name, tuple(tensor.shape), tuple(tensor.stride()), tensor.data_ptr() % ALIGNED)

    @property
    def extent(self) -> int:
        """Elements from the first to the last in memory, those between that do not belong to it included."""
        if 0 in self.sizes:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))

    @property
    def type(self) -> torch.dtype:
        return _TYPES[self.dtype]


def assemble(message: Message, pinned: bool = False) -> Tensor:
    """The message as a block of bytes; copies from a device are issued and not waited for, if it is pinned memory."""
    parts: list[tuple[Layout, Tensor]] = []
    places: list[list[Any] | None] = []
    for tensor in (*message.tensors, message.report):
        if tensor is None:
            places.append(None)
            continue
        layout = Layout.of(tensor.detach())
        parts.append((layout, tensor.detach()))
        places.append([layout.dtype, layout.sizes, layout.strides, layout.line])
    head = {"k": message.kind, "n": message.microbatch, "w": message.wanted, "t": places, "x": message.note}
    header = json.dumps(head, separators=(",", ":")).encode()
    starts, length = _offsets(PREFIX + len(header), [layout for layout, _ in parts])
    block = torch.empty(length, dtype=torch.uint8, pin_memory=pinned)
    begin = length_prefix(len(header), length) + header
    block[: len(begin)].copy_(torch.frombuffer(bytearray(begin), dtype=torch.uint8))
    for (layout, tensor), start in zip(parts, starts, strict=True):
        if layout.extent:
            _copy(tensor, _view(block, start, layout), layout)
    return block


def length_prefix(header: int, length: int) -> bytes:
    """The first bytes of a block: how long its header is, and how long it is itself."""
    return header.to_bytes(8, "little") + length.to_bytes(8, "little")


def lengths_of(block: Tensor) -> tuple[int, int]:
    """What the first bytes of a block say."""
    begin = bytes(block[:PREFIX].numpy())
    return int.from_bytes(begin[:8], "little"), int.from_bytes(begin[8:], "little")


def disassemble(block: Tensor, device: torch.device) -> Message:
    """The message in a block; its tensors are parts of the block, or copies on another device, in the same layout.

    Raises PipelineError for bytes that are not a message.
    """
    try:
        header, length = lengths_of(block)
        if not 0 < header <= length - PREFIX <= block.numel() - PREFIX:
            raise ValueError(f"lengths of {header} and {length} in {block.numel()} bytes")
        head = json.loads(bytes(block[PREFIX : PREFIX + header].numpy()))
        kind, n, note = str(head["k"]), int(head["n"]), str(head["x"])
        layouts = [
            None if p is None else Layout(str(p[0]), tuple(map(int, p[1])), tuple(map(int, p[2])), int(p[3]))
            for p in head["t"]
        ]
        there = [layout for layout in layouts if layout is not None]
        starts, end = _offsets(PREFIX + header, there)
        sound = all(min((*x.sizes, *x.strides, x.line), default=0) >= 0 and x.line < ALIGNED for x in there)
        if end > length or not sound or kind not in ("F", "B", "end"):
            raise ValueError(f"{length} bytes of kind {kind!r}")
        wanted = tuple(bool(flag) for flag in head["w"])
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as problem:
        raise PipelineError(f"what arrived is not a message of a stage: {problem}") from problem
    found = iter([_view(block, start, layout) for start, layout in zip(starts, there, strict=True)])
    tensors = [None if layout is None else next(found) for layout in layouts]
    report = tensors.pop()  # stays on the host: it is for people
    placed = tuple(
        None if x is None or layout is None else _placed(x, layout, device)
        for x, layout in zip(tensors, layouts[:-1], strict=True)
    )
    return Message(kind, n, placed, wanted, report, note)  # type: ignore[arg-type]


def _offsets(begin: int, layouts: Sequence[Layout]) -> tuple[list[int], int]:
    """Where in the block each tensor begins, and how long the block is."""
    found = []
    end = begin
    for layout in layouts:
        start = -(-end // ALIGNED) * ALIGNED + layout.line
        found.append(start)
        end = start + layout.extent * layout.type.itemsize
    return found, end


def _view(block: Tensor, start: int, layout: Layout) -> Tensor:
    flat = block[start : start + layout.extent * layout.type.itemsize].view(layout.type)
    return torch.as_strided(flat, layout.sizes, layout.strides, flat.storage_offset())


def _copy(tensor: Tensor, target: Tensor, layout: Layout) -> None:
    # A size with stride 0 is one row shown several times: it is written once.
    for axis, (size, stride) in enumerate(zip(layout.sizes, layout.strides, strict=True)):
        if stride == 0 and size > 1:
            target, tensor = target.narrow(axis, 0, 1), tensor.narrow(axis, 0, 1)
    target.copy_(tensor, non_blocking=True)


def _placed(tensor: Tensor, layout: Layout, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return tensor
    # Strides as they were, also where a row is shown several times or rows do not touch.
    storage = torch.empty(layout.extent, dtype=layout.type, device=device)
    flat = torch.as_strided(tensor, (layout.extent,), (1,), tensor.storage_offset())
    storage.copy_(flat, non_blocking=True)
    return torch.as_strided(storage, layout.sizes, layout.strides)
