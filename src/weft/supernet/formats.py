"""Formats: safetensors, a torch.export program and ONNX, each written, read again and checked."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weft.errors import SupernetError
from weft.supernet.layer import Carry
from weft.supernet.traced import Traced, identical, outputs_of, reason, trace, trace_fixed

if TYPE_CHECKING:
    import numpy as np

FILES = MappingProxyType({"safetensors": "model.safetensors", "torch": "model.pt2", "onnx": "model.onnx"})


def write(module: nn.Module, example: Carry, folder: Path, formats: Sequence[str]) -> dict[str, str | None]:
    """Writes and checks every format; for each program, why its batch has a fixed size, or None."""
    fixed = {}
    if "safetensors" in formats:
        _write_safetensors(module, folder / FILES["safetensors"])
    if "torch" in formats or "onnx" in formats:
        traced = trace(module, example)
        if "torch" in formats:
            fixed["torch"] = _write_torch(traced, folder / FILES["torch"])
        if "onnx" in formats:
            fixed["onnx"] = _write_onnx(traced, folder / FILES["onnx"])
    return fixed


def input_names(module: nn.Module, count: int) -> list[str]:
    """The names of the first arguments of the module's forward, or numbered ones where it names fewer."""
    names = [
        name
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return names[:count] if len(names) >= count else [f"input_{i}" for i in range(count)]


def output_names(count: int) -> list[str]:
    return ["output"] if count == 1 else [f"output_{i}" for i in range(count)]


def _write_safetensors(module: nn.Module, path: Path) -> None:
    from safetensors.torch import save_file

    state = module.state_dict()
    odd = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if odd:
        raise SupernetError(
            f"the state '{odd[0]}' is not a tensor, and safetensors holds nothing else: make it a buffer"
        )
    # Each entry gets memory of its own, since safetensors refuses the shared memory of tied weights and of views.
    owned = {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    try:
        save_file(owned, path, metadata={"format": "pt"})
    except Exception as error:
        raise SupernetError(f"the weights cannot be written as safetensors: {reason(error)}") from error


def _write_torch(traced: Traced, path: Path) -> str | None:
    from torch.export import load, save

    try:
        save(traced.program, path)
        again = load(path).module()
    except Exception as error:
        raise SupernetError(f"the torch program cannot be written and read again: {reason(error)}") from error
    for case in traced.cases:
        if not identical(outputs_of(again, case), outputs_of(traced.module, case)):
            raise SupernetError(
                "the torch program does not repeat the outputs of the module to the last bit: "
                "is something in the module random in evaluation mode?"
            )
    return traced.fixed


def _write_onnx(traced: Traced, path: Path) -> str | None:
    """A program that ONNX takes with fixed shapes alone is traced once more."""
    if traced.fixed is None:
        try:
            _convert(traced, path)
            return None
        except Exception as error:
            traced = trace_fixed(traced.module, traced.cases[0], reason(error))
    try:
        _convert(traced, path)
    except Exception as error:
        raise SupernetError(f"ONNX cannot hold the module: {reason(error)}; leave 'onnx' out of the formats") from error
    return traced.fixed


def _convert(traced: Traced, path: Path) -> None:
    import onnxruntime

    names = input_names(traced.module, len(traced.batched))
    outputs = output_names(len(outputs_of(traced.module, traced.cases[0])))
    shapes = tuple({0: "batch"} if like else None for like in traced.batched) if any(traced.batched) else None
    # One file, unless it would pass protobuf's limit of 2 GB: then torch puts the weights beside it (model.onnx.data).
    torch.onnx.export(
        traced.program,
        (),
        path,
        input_names=names,
        output_names=outputs,
        dynamic_shapes=shapes,
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    for case in traced.cases:
        found = session.run(outputs, {name: value.numpy() for name, value in zip(names, case, strict=True)})
        for name, one, other in zip(outputs, found, outputs_of(traced.module, case), strict=True):
            _check_near(name, one, other.numpy())


def _check_near(name: str, found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> None:
    """Within 1e-4 of each element and 1e-5 of the largest, or a few roundings; whole numbers must be equal."""
    import numpy as np

    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise SupernetError(f"{name} is {found.dtype}{found.shape}, that of the module {wanted.dtype}{wanted.shape}")
    if not np.issubdtype(wanted.dtype, np.inexact):
        near = np.array_equal(found, wanted)
    else:
        scale = np.abs(wanted, where=np.isfinite(wanted), out=np.zeros_like(wanted)).max(initial=0.0)
        rounding = 4 * float(np.finfo(wanted.dtype).eps)
        atol = max(1e-5, rounding) * (float(scale) or 1.0)
        near = np.allclose(found, wanted, rtol=max(1e-4, rounding), atol=atol, equal_nan=True)
    if not near:
        raise SupernetError(f"{name} as computed by onnxruntime differs from that of the module")
