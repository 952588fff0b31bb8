"""The remainder: what training changes in a model and its state_dict does not have, in buffers and attributes."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from weft.errors import CheckpointError
from weft.runs.shards import DTYPES
from weft.tune.attributes import joined, own, registered, storage, tensors_of

Values = Mapping[str, Any]


class Remainder:
    """Remembers how a model was built, to tell later what is otherwise.

    Of attributes, numbers, texts and tensors are told, and lists, tuples and dictionaries of these.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = {name: _Mark([buffer]) for name, buffer in unkept(model).items()}
        self._attributes = {name: (text, _Mark(tensors)) for name, _, text, tensors in _attributes(model)}

    def changed(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The buffers and the attributes that are not as they were, by qualified name."""
        buffers = {
            name: buffer
            for name, buffer in unkept(model).items()
            if name not in self._buffers or not self._buffers[name].fits([buffer])
        }
        values = {}
        for name, value, text, tensors in _attributes(model):
            before, mark = self._attributes.get(name, (None, _Mark([])))
            if text != before or not mark.fits(tensors):
                values[name] = value
        return buffers, values


class _Mark:
    """Which tensors these are, and how often they had been written into."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._seen = [(weakref.ref(tensor), _version(tensor)) for tensor in tensors]

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        now = [(tensor, _version(tensor)) for tensor in tensors]
        if len(now) != len(self._seen):
            return False
        return all(ref() is t and then == v for (t, v), (ref, then) in zip(now, self._seen, strict=True))


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def restore(model: nn.Module, weights: Values, buffers: Mapping[str, Tensor], attributes: Values) -> None:
    """Puts back the state_dict of a model, and what was told as changed beside it."""
    for name, value in attributes.items():
        part, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(part), attribute, value)
    changing = {joined(name, one) for name, part in model.named_modules() for one in part._buffers}
    for name, value in (*weights.items(), *buffers.items()):
        if name in changing:
            _fit(model, name, value)
    given = model.state_dict()  # for the versions of its layers' formats, which weights alone do not tell
    given.clear()
    given.update(weights)
    model.load_state_dict(given)
    with torch.no_grad():
        for name, buffer in unkept(model).items():
            if name in buffers:
                buffer.copy_(buffers[name])


def _fit(model: nn.Module, name: str, value: Tensor) -> None:
    """Makes a buffer anew that is not yet there, or of another shape or type."""
    part, _, attribute = name.rpartition(".")
    holder = model.get_submodule(part)
    before = holder._buffers[attribute]
    if before is None or (not is_lazy(before) and (before.shape, before.dtype) != (value.shape, value.dtype)):
        where = next(model.parameters()).device if before is None else before.device
        holder._buffers[attribute] = torch.empty_like(value, device=where)


def unkept(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state_dict leaves out."""
    left = {joined(name, one) for name, part in model.named_modules() for one in part._non_persistent_buffers_set}
    return {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name in left}


def encoded(value: Any, tensors: MutableMapping[str, Tensor], name: str) -> Any:
    """A value as JSON, to its last bit; its tensors are put beside it, under names that begin with ``name``.

    CheckpointError for what is neither a number, a text, a tensor nor a list, tuple or dictionary of these.

    >>> encoded({"a": (1, 0.5)}, {}, "")
    {'dict': [['a', {'tuple': [1, {'float': '0x1.0000000000000p-1'}]}]]}
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if type(value) is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [encoded(item, tensors, name) for item in value]}
    if isinstance(value, dict):
        pairs = [[encoded(key, tensors, name), encoded(item, tensors, name)] for key, item in value.items()]
        return {"dict": pairs}
    held = isinstance(value, Tensor) and (value.dtype in DTYPES or value.dtype.is_complex)
    if type(value) is Tensor and held and value.layout == torch.strided and not value.is_meta:
        key = f"{name}#{len(tensors)}"
        tensors[key] = value.detach()
        return {"tensor": key, "host": value.device.type == "cpu"}
    raise CheckpointError(
        f"a checkpoint cannot hold a {type(value).__name__}: it takes numbers, texts, tensors, and lists, tuples and "
        "dictionaries of these, since nothing is pickled"
    )


def decoded(value: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    """What was encoded; tensors that did not lie on the host are put on the device."""
    if not isinstance(value, dict):
        return value
    if "float" in value:
        return float.fromhex(value["float"])
    if "complex" in value:
        return complex(*map(float.fromhex, value["complex"]))
    if "tensor" in value:
        return tensors[value["tensor"]].to("cpu" if value["host"] else device)
    if "dict" in value:
        return {decoded(key, tensors, device): decoded(item, tensors, device) for key, item in value["dict"]}
    (kind, inner), *_ = value.items()
    items = [decoded(item, tensors, device) for item in inner]
    return items if kind == "list" else tuple(items)


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any, str, list[Tensor]]]:
    """Those that can be told, each with its text and its tensors, and hold no weight or buffer, which would then be
    two."""
    storages = {storage(tensor) for _, tensor in registered(model)}
    for name, part in model.named_modules():
        for attribute, value in own(part):
            try:
                text, tensors = json.dumps(encoded(value, {}, "")), [*tensors_of(value)]
            except (CheckpointError, RecursionError):
                continue
            # Nor what was computed of the weights, as weight norms do before every forward.
            if not any(storage(tensor) in storages or tensor.requires_grad for tensor in tensors):
                yield joined(name, attribute), value, text, tensors
