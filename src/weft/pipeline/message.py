"""What travels between stages: tensors with their exact layout, behind a header of plain text that nothing evaluates.

One message is one block of bytes:

    header (JSON) | tensor | tensor | ...        each tensor at an address with the alignment that it had before

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


def encode(message: Message) -> tuple[bytes, list[tuple[Layout, Tensor]]]:
    """The header, and the tensors that follow it in this order."""
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
    return json.dumps(head, separators=(",", ":")).encode(), parts


def offsets(header: int, layouts: Sequence[Layout]) -> tuple[list[int], int]:
    """Where in the block each tensor begins, and how long the block is."""
    found = []
    end = header
    for layout in layouts:
        start = -(-end // ALIGNED) * ALIGNED + layout.line
        found.append(start)
        end = start + layout.extent * layout.type.itemsize
    return found, end


def view(block: Tensor, start: int, layout: Layout) -> Tensor:
    """The tensor of a layout that begins at a place of a block of bytes; no copy."""
    flat = block[start : start + layout.extent * layout.type.itemsize].view(layout.type)
    return torch.as_strided(flat, layout.sizes, layout.strides, flat.storage_offset())


def pack(header: bytes, parts: Sequence[tuple[Layout, Tensor]], block: Tensor, places: Sequence[int]) -> None:
    """Writes header and tensors into a block of bytes; copies from a device are issued and not waited for."""
    block[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
    for (layout, tensor), start in zip(parts, places, strict=True):
        if not layout.extent:
            continue
        target = view(block, start, layout)
        # A size with stride 0 is one row shown several times: it is written once.
        for axis, (size, stride) in enumerate(zip(layout.sizes, layout.strides, strict=True)):
            if stride == 0 and size > 1:
                target, tensor = target.narrow(axis, 0, 1), tensor.narrow(axis, 0, 1)
        target.copy_(tensor, non_blocking=True)


def decode(block: Tensor, header: int, device: torch.device) -> Message:
    """The message in a block; its tensors are parts of the block, or copies on another device, in the same layout.

    Raises PipelineError for bytes that are not a message.
    """
    try:
        head = json.loads(bytes(block[:header].numpy()))
        kind, n, note = str(head["k"]), int(head["n"]), str(head["x"])
        layouts = [
            None if p is None else Layout(str(p[0]), tuple(map(int, p[1])), tuple(map(int, p[2])), int(p[3]))
            for p in head["t"]
        ]
        there = [layout for layout in layouts if layout is not None]
        places, end = offsets(header, there)
        sound = all(min((*x.sizes, *x.strides, x.line), default=0) >= 0 and x.line < ALIGNED for x in there)
        if end > block.numel() or not sound or kind not in ("F", "B", "end"):
            raise ValueError(f"{block.numel()} bytes of kind {kind!r}")
        wanted = tuple(bool(flag) for flag in head["w"])
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as problem:
        raise PipelineError(f"what arrived is not a message of a stage: {problem}") from problem
    found = iter([view(block, start, layout) for start, layout in zip(places, there, strict=True)])
    tensors = [None if layout is None else next(found) for layout in layouts]
    report = tensors.pop()  # stays on the host: it is for people
    placed = tuple(
        None if x is None or layout is None else _placed(x, layout, device)
        for x, layout in zip(tensors, layouts[:-1], strict=True)
    )
    return Message(kind, n, placed, wanted, report, note)  # type: ignore[arg-type]


def _placed(tensor: Tensor, layout: Layout, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return tensor
    # Strides as they were, also where a row is shown several times or rows do not touch.
    storage = torch.empty(layout.extent, dtype=layout.type, device=device)
    flat = torch.as_strided(tensor, (layout.extent,), (1,), tensor.storage_offset())
    storage.copy_(flat, non_blocking=True)
    return torch.as_strided(storage, layout.sizes, layout.strides)
