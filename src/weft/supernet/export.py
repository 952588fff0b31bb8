"""Export: a folder with a plain module as files that run without weft, and a description of how to call it."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch import Tensor, nn

from weft.errors import SupernetError, install_extra, nearest
from weft.space import Subnet
from weft.supernet.layer import Activations, as_activations

if TYPE_CHECKING:
    import numpy as np
    from torch.export import ExportedProgram


# Traced: a module as an exported program, for batches of any size where the module allows it.


@dataclass(frozen=True, slots=True)
class ExportedModule:
    """A program, the inputs that it is checked with (first the example), and which of them are a batch of any size.

    Where none is, `fixed` says why.
    """

    module: nn.Module
    program: ExportedProgram
    cases: tuple[Activations, ...]
    batched: tuple[bool, ...]
    fixed: str | None = None


def trace(module: nn.Module, example: Activations) -> ExportedModule:
    """The program for any batch, else for that of the example; raises SupernetError if there is neither."""
    try:
        return _trace_any(module, example)
    except Exception as error:
        return trace_fixed(module, example, reason(error))


def trace_fixed(module: nn.Module, example: Activations, why: str) -> ExportedModule:
    """The program for the shapes of the example alone, which is what `why` gives the reason for."""
    from torch.export import export

    try:
        program = _without_sources(export(module, _copies(example), strict=False))
    except Exception as error:
        raise SupernetError(
            f"torch.export cannot trace the module: {reason(error)}; formats=('safetensors',) writes its weights alone"
        ) from error
    return ExportedModule(module, program, (example,), (False,) * len(example), why)


@contextmanager
def export_mode() -> Iterator[None]:
    """Within the block, modules compute what is traced of them, whatever the mode of the caller."""
    # nn.MultiheadAttention has a fused path for evaluation, of other rounding, that no exported program contains.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def outputs_of(module: nn.Module, inputs: Activations) -> Activations:
    """What the module gives for copies of these inputs."""
    return as_activations(module(*_copies(inputs)), "the module")


def identical(some: Activations, others: Activations) -> bool:
    """Whether the tensors are the same in number, type, shape and every bit."""

    def raw(value: Tensor) -> Tensor:  # bytes, since not-a-number does not equal itself
        return value.contiguous().reshape(-1).view(torch.uint8)

    return len(some) == len(others) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))
        for a, b in zip(some, others, strict=True)
    )


def reason(error: BaseException) -> str:
    """One sentence on what went wrong first; of several causes that torch lists, the first."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line.removeprefix("- ") for line in lines if line.startswith("- ")] or lines or [type(error).__name__]
    return told[0].partition(". ")[0].rstrip(".")[:300]


def _trace_any(module: nn.Module, example: Activations) -> ExportedModule:
    if not example[0].dim():
        raise SupernetError("the first input has no dimensions, hence no batch")
    size = len(example[0])
    alike = [bool(value.dim()) and len(value) == size for value in example]
    program, lengths = _capture(module, example, alike)
    varies = [like and not length.isdigit() for like, length in zip(alike, lengths, strict=True)]
    if varies != alike:
        # An input that merely has the length of the batch, a square mask for example, is a constant to the module.
        # Unless it is traced as such, ONNX gets a dimension with the name "6" instead of the number.
        program, lengths = _capture(module, example, varies)
    batched = tuple(length == lengths[0] for length in lengths)
    more = tuple(torch.cat([v, v[:1]]) if like else v for v, like in zip(example, batched, strict=True))
    if not identical(outputs_of(program.module(), more), outputs_of(module, more)):
        raise SupernetError(f"with a batch of {size + 1} instead of {size} its outputs differ from those of the module")
    return ExportedModule(module, program, (example, more), batched)


def _capture(module: nn.Module, example: Activations, varies: Sequence[bool]) -> tuple[ExportedProgram, list[str]]:
    """The program, and the length of each of its inputs: a symbol where it may vary, else a number."""
    from torch.export import Dim, export

    # The tracer takes a length of 1 for a constant, so a single row is doubled. Only the first input must vary.
    double = len(example[0]) == 1
    rows = tuple(torch.cat([v, v]) if double and like else v.clone() for v, like in zip(example, varies, strict=True))
    shapes = tuple({0: Dim.AUTO if i else Dim.DYNAMIC} if like else None for i, like in enumerate(varies))
    program = _without_sources(export(module, rows, dynamic_shapes=shapes, strict=False))
    taken = [node.meta["val"] for node in program.graph.nodes if node.name in program.graph_signature.user_inputs]
    return program, [str(value.shape[0]) if value.dim() else "" for value in taken]


def _copies(inputs: Activations) -> Activations:
    """Tensors for one use, since a module may write to its inputs and the tracer leaves its marks on them."""
    return tuple(value.clone() for value in inputs)


def _without_sources(program: ExportedProgram) -> ExportedProgram:
    """The program less the lines and paths of the source files that its nodes came from."""
    for part in program.graph_module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                node.meta.pop("stack_trace", None)
    return program


# Formats: safetensors, a torch.export program and ONNX, each written, read again and checked.

FILES = MappingProxyType({"safetensors": "model.safetensors", "torch": "model.pt2", "onnx": "model.onnx"})


def write(module: nn.Module, example: Activations, folder: Path, formats: Sequence[str]) -> dict[str, str | None]:
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


def _write_torch(traced: ExportedModule, path: Path) -> str | None:
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


def _write_onnx(traced: ExportedModule, path: Path) -> str | None:
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


def _convert(traced: ExportedModule, path: Path) -> None:
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


ABOUT = "model.json"
OWN = ("dynamic_batch", "files", "inputs", "outputs", "versions")  # the keys of model.json that export() writes

log = logging.getLogger("weft.supernet")


def export(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    folder: Path | str,
    formats: Sequence[str] = tuple(FILES),
    metadata: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Path]:
    """Write a plain module, such as `extract` gives; the paths by format, and that of model.json by "json".

    A copy of the module is exported, in evaluation mode on the CPU. Inputs as long as the first one are a batch, which
    may have any size in the programs where the module allows it; where not, the size of the example is kept and the
    reason is logged. What is written is read again and run: the torch program gives the same outputs to the last bit,
    ONNX the same within float tolerance. model.json holds `metadata` and what is needed to call the module.

    Raises SupernetError if a format is unknown, a package is missing (before anything is written), the module cannot be
    exported or a check fails; then the folder is as it was.
    """
    wanted = _check_formats(formats)
    about = _check_metadata(metadata)
    if isinstance(inputs, Tensor) or not inputs or not all(isinstance(value, Tensor) for value in inputs):
        raise SupernetError("export() takes a tuple of example tensors, one for each input of the module: (images,)")
    folder = Path(folder)
    with export_mode(), muted():
        try:
            plain = copy.deepcopy(module).cpu().eval()
            example = tuple(value.detach().cpu().clone() for value in inputs)
            results = outputs_of(plain, example)
        except Exception as error:
            raise SupernetError(f"the module cannot be exported with these inputs: {reason(error)}") from error
        with _temporary(folder) as temp:
            fixed = write(plain, example, temp, wanted)
            about |= {
                "dynamic_batch": {name: why is None for name, why in fixed.items()},
                "files": {name: FILES[name] for name in wanted},
                "inputs": _describe(input_names(plain, len(example)), example),
                "outputs": _describe(output_names(len(results)), results),
                "versions": {"torch": torch.__version__, "weft": _version("weft")},
            }
            (temp / ABOUT).write_text(json.dumps(about, sort_keys=True, indent=2, allow_nan=False) + "\n")
            _publish(temp, folder)
    for name, why in fixed.items():
        if why is not None:
            log.warning("%s takes batches of the size of the example only: %s", FILES[name], why)
    return {name: folder / FILES[name] for name in wanted} | {"json": folder / ABOUT}


def _check_formats(formats: Sequence[str]) -> tuple[str, ...]:
    wanted = (formats,) if isinstance(formats, str) else tuple(dict.fromkeys(formats))
    for name in wanted:
        if name not in FILES:
            raise SupernetError(f"unknown format '{name}'{nearest(str(name), FILES)}")
    if not wanted:
        raise SupernetError(f"export() needs at least one format of {', '.join(FILES)}")
    for package in ("onnx", "onnxscript", "onnxruntime") if "onnx" in wanted else ():
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise SupernetError(f"the format 'onnx' needs {package}: {install_extra('onnx')}") from error
    return wanted


def _check_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The same in the types of JSON."""
    taken = sorted(set(OWN) & set(metadata))
    if taken:
        raise SupernetError(f"the key '{taken[0]}' of {ABOUT} is written by export() itself: choose another one")
    try:
        text = json.dumps(dict(metadata), sort_keys=True, allow_nan=False, default=_as_json)
    except (TypeError, ValueError) as error:
        raise SupernetError(f"the metadata cannot be written to {ABOUT}: {reason(error)}") from error
    about: dict[str, Any] = json.loads(text)
    return about


def _as_json(value: Any) -> Any:
    if isinstance(value, Subnet):
        return value.to_json()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # NumPy and torch, scalars and arrays
        return value.tolist()
    raise TypeError(f"{value!r} is neither a number, a text, a list nor a mapping")


def _describe(names: Sequence[str], values: Activations) -> list[dict[str, Any]]:
    return [
        {"name": name, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        for name, value in zip(names, values, strict=True)
    ]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # used from its sources
        return None


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """A hidden folder inside `folder`, hence on the same file system; it is gone at the end."""
    fresh = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".export-", dir=folder, ignore_cleanup_errors=True) as temp:
            yield Path(temp)
    except OSError as error:
        raise SupernetError(f"cannot write to '{folder}': {error.strerror or error}") from error
    finally:
        if fresh:
            with suppress(OSError):  # a folder that holds an export is not empty, and stays
                folder.rmdir()


def _publish(temp: Path, folder: Path) -> None:
    """Moves the files in place one by one, each whole and on the disk; what refers to others comes after them."""
    mode = (temp / ABOUT).stat().st_mode  # safetensors writes files that nobody else can read
    order = {FILES["onnx"]: 1, ABOUT: 2}
    for path in sorted(temp.iterdir(), key=lambda path: (order.get(path.name, 0), path.name)):
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
        path.chmod(mode)
        os.replace(path, folder / path.name)
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems cannot sync a folder, and need not
            os.fsync(handle)
    finally:
        os.close(handle)


# Calm: exporters that print, warn and log nothing in the thread that calls them.

EXPORTERS = ("torch", "onnx", "onnx_ir", "onnxscript")  # whose loggers are silenced


@contextmanager
def muted() -> Iterator[None]:
    """Within the block, drops what this thread prints and warns, and what torch and ONNX log in it.

    Other threads are heard as before, but for their warnings: Python keeps the filters of those for all threads.
    """
    me = threading.get_ident()

    def wanted(record: logging.LogRecord) -> bool:
        return record.thread != me or record.name.partition(".")[0] not in EXPORTERS

    # Handlers are filtered, not loggers, since a logger asks none of the filters of those above it.
    known = [item for item in logging.root.manager.loggerDict.values() if isinstance(item, logging.Logger)]
    handlers = {handler for logger in (logging.root, *known) for handler in logger.handlers}
    out, err = _Muted(sys.stdout), _Muted(sys.stderr)
    for handler in handlers:
        handler.addFilter(wanted)
    try:
        with warnings.catch_warnings(), redirect_stdout(out), redirect_stderr(err):
            warnings.simplefilter("ignore")
            yield
    finally:
        out.thread = err.thread = None
        for handler in handlers:
            handler.removeFilter(wanted)


class _Muted(io.TextIOBase):
    """A stream that drops what this thread writes until `thread` is None: a handler that keeps it then works again."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.thread: int | None = threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self.thread else self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()
