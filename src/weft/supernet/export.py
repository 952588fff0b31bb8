"""Export: a folder with a plain module as files that run without weft, and a description of how to call it."""

from __future__ import annotations

import copy
import importlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import SupernetError, nearest
from weft.space import Subnet
from weft.supernet.calm import calm
from weft.supernet.formats import FILES, input_names, output_names, write
from weft.supernet.layer import Carry
from weft.supernet.traced import as_traced, outputs_of, reason

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
    with as_traced(), calm():
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
            raise SupernetError(f"the format 'onnx' needs the package {package}: pip install weft[onnx]") from error
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


def _describe(names: Sequence[str], values: Carry) -> list[dict[str, Any]]:
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
