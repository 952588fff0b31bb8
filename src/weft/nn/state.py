"""The state of a module beyond its weights: what of it changed, and how it is saved as JSON and tensors."""

from __future__ import annotations

import json
import pickle
import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.hooks import RemovableHandle

from weft.errors import CheckpointError
from weft.nn.batch import tensors_in

SAVED = frozenset(
    {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32}
    | {torch.int64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32}
    | {torch.float64, torch.complex32, torch.complex64, torch.complex128}
)
"""Dtypes of the tensors that can be saved."""


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Within the block, the model is in evaluation mode; afterwards every part is in the mode that it was in."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


_BARE_ATTRIBUTES = frozenset(vars(nn.Module()))
_REGISTERED = ("_parameters", "_buffers", "_modules")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_BY_IDENTITY = (nn.Module, type, RemovableHandle)
_ABSENT = object()


def attributes_of(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes that a bare module does not have, without those that weight norms recompute."""
    left = {*_BARE_ATTRIBUTES, *weight_norm_attributes(part)}
    return ((name, value) for name, value in vars(part).items() if name not in left)


def weight_norm_attributes(part: nn.Module) -> list[str]:
    """The attributes of a part that weight norms of the old kind recompute before every forward."""
    return [hook.name for hook in part._forward_pre_hooks.values() if isinstance(hook, WeightNorm)]


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, by name."""
    return [*model.named_parameters(), *model.named_buffers()]


def non_persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state_dict leaves out."""
    left = {joined(name, one) for name, part in model.named_modules() for one in part._non_persistent_buffers_set}
    return {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name in left}


def storage(tensor: Tensor) -> object:
    """Equal for tensors that share memory; an identity alone for lazy and sparse tensors."""
    return id(tensor) if is_lazy(tensor) or tensor.layout != torch.strided else tensor.untyped_storage()._cdata


def joined(name: str, attribute: str) -> str:
    return f"{name}.{attribute}" if name else attribute


class ModuleSnapshot:
    """Named values at one moment. Numbers and texts are compared by value, tensors and functions by identity.

    With ``writes`` a tensor that was written to in place has changed. What cannot be compared has changed.
    """

    def __init__(self, values: Iterable[tuple[Hashable, Any]], writes: bool = False) -> None:
        self._seen = {name: _seen(value, writes) for name, value in values}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModuleSnapshot) and self._seen == other._seen

    __hash__ = None  # type: ignore[assignment]

    def changed(self, before: ModuleSnapshot) -> Iterator[Any]:
        """The names of what differs from before, was added or was removed."""
        for name in dict.fromkeys((*self._seen, *before._seen)):
            if self._seen.get(name, _ABSENT) != before._seen.get(name, _ABSENT):
                yield name


class ModuleState(ModuleSnapshot):
    """All that a module and its loss hold, and with ``beside`` what else a forward may read.

    In-place writes to buffers do not count as changes; with ``writes``, those to other tensors do. Global variables are
    not seen.
    """

    def __init__(self, model: nn.Module, loss: Any, beside: Mapping[str, Any], writes: bool = False) -> None:
        judges = loss.named_modules(prefix="the loss") if isinstance(loss, nn.Module) else [("the loss", loss)]
        tensors, others = list[tuple[Hashable, Any]](), [(("", name), value) for name, value in beside.items()]
        for name, part in [*model.named_modules(), *judges]:
            for key, value in getattr(part, "__dict__", {}).items():
                if key in _REGISTERED:
                    tensors += (((name, own), item) for own, item in value.items())
                else:
                    others.append(((name, key), value))
        super().__init__(others, writes)
        self._seen |= ModuleSnapshot(tensors)._seen

    def first_changed(self, before: ModuleState, besides: Container[tuple[str, str]] = ()) -> str | None:
        """The first name that changed, ``besides`` attributes that are expected to, given as (part, attribute)."""
        return next((joined(*name) for name in self.changed(before) if name not in besides), None)


class ExtraState:
    """What training changes of a model that its state_dict does not have, compared with the model as it was built.

    Of attributes, numbers, texts and tensors are saved, and lists, tuples and dictionaries of these.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = ModuleSnapshot(non_persistent_buffers(model).items(), writes=True)
        self._attributes = ModuleSnapshot(_savable(model), writes=True)

    def changed(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The buffers and attributes that changed, by qualified name."""
        buffers, attributes = non_persistent_buffers(model), dict(_savable(model))
        written = ModuleSnapshot(buffers.items(), writes=True).changed(self._buffers)
        changed = ModuleSnapshot(attributes.items(), writes=True).changed(self._attributes)
        return (
            {name: buffers[name] for name in written if name in buffers},
            {name: attributes[name] for name in changed if name in attributes},
        )


def restore(
    model: nn.Module, weights: Mapping[str, Any], buffers: Mapping[str, Tensor], attributes: Mapping[str, Any]
) -> None:
    """Restores the state_dict of a model, and what `ExtraState.changed` gave beside it."""
    for name, value in attributes.items():
        part, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(part), attribute, value)
    changing = {joined(name, one) for name, part in model.named_modules() for one in part._buffers}
    for name, value in (*weights.items(), *buffers.items()):
        if name in changing:
            _replace_buffer(model, name, value)
    given = model.state_dict()  # for the versions of its layers' formats, which weights alone do not tell
    given.clear()
    given.update(weights)
    model.load_state_dict(given)
    with torch.no_grad():
        for name, buffer in non_persistent_buffers(model).items():
            if name in buffers:
                buffer.copy_(buffers[name])


def to_plain(value: Any, tensors: MutableMapping[str, Tensor], name: str) -> Any:
    """A value as JSON, to its last bit; its tensors are put beside it, under names that begin with ``name``.

    CheckpointError for what is neither a number, a text, a tensor nor a list, tuple or dictionary of these.

    >>> to_plain({"a": (1, 0.5)}, {}, "")
    {'dict': [['a', {'tuple': [1, {'float': '0x1.0000000000000p-1'}]}]]}
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if type(value) is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [to_plain(item, tensors, name) for item in value]}
    if isinstance(value, dict):
        pairs = [[to_plain(key, tensors, name), to_plain(item, tensors, name)] for key, item in value.items()]
        return {"dict": pairs}
    if type(value) is Tensor and value.dtype in SAVED and value.layout == torch.strided and not value.is_meta:
        key = f"{name}#{len(tensors)}"
        tensors[key] = value.detach()
        return {"tensor": key, "host": value.device.type == "cpu"}
    raise CheckpointError(
        f"a checkpoint cannot hold a {type(value).__name__}: it takes numbers, texts, tensors, and lists, tuples and "
        "dictionaries of these, since nothing is pickled"
    )


def from_plain(value: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    """The value that `to_plain` encoded; tensors that were not on the host are moved to the device."""
    if not isinstance(value, dict):
        return value
    if "float" in value:
        return float.fromhex(value["float"])
    if "complex" in value:
        return complex(*map(float.fromhex, value["complex"]))
    if "tensor" in value:
        return tensors[value["tensor"]].to("cpu" if value["host"] else device)
    if "dict" in value:
        return {from_plain(key, tensors, device): from_plain(item, tensors, device) for key, item in value["dict"]}
    (kind, inner), *_ = value.items()
    items = [from_plain(item, tensors, device) for item in inner]
    return items if kind == "list" else tuple(items)


def _savable(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes that can be saved and share no memory with a parameter or buffer."""
    storages = {storage(tensor) for _, tensor in named_tensors(model)}
    for name, part in model.named_modules():
        for attribute, value in attributes_of(part):
            try:
                json.dumps(to_plain(value, {}, ""))
            except (CheckpointError, RecursionError):
                continue
            # Nor what was computed of the weights, as weight norms do before every forward.
            if not any(storage(tensor) in storages or tensor.requires_grad for tensor in tensors_in(value)):
                yield joined(name, attribute), value


def _replace_buffer(model: nn.Module, name: str, value: Tensor) -> None:
    """Replaces a buffer that is missing, lazy, or of another shape or dtype."""
    part, _, attribute = name.rpartition(".")
    holder = model.get_submodule(part)
    before = holder._buffers[attribute]
    if before is None or (not is_lazy(before) and (before.shape, before.dtype) != (value.shape, value.dtype)):
        where = next(model.parameters()).device if before is None else before.device
        holder._buffers[attribute] = torch.empty_like(value, device=where)


def _seen(value: Any, writes: bool) -> Any:
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    if isinstance(value, Tensor):
        return _Identity(value), -1 if not writes or value.is_inference() else value._version
    if isinstance(value, _BY_IDENTITY) or callable(value):
        return _Identity(value)
    try:
        if isinstance(value, Mapping):
            return [(_seen(name, writes), _seen(item, writes)) for name, item in value.items()]
        if isinstance(value, list | tuple):
            return [_seen(item, writes) for item in value]
        return pickle.dumps(value)
    except Exception:  # what cannot be compared counts as changed
        return object()


class _Identity:
    """Compares by identity while the object lives; it keeps nothing alive that can be referred to weakly."""

    def __init__(self, thing: Any) -> None:
        self._thing: Callable[[], Any]
        try:
            self._thing = weakref.ref(thing)
        except TypeError:
            self._thing = lambda: thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and (mine := self._thing()) is not None and mine is other._thing()

    __hash__ = None  # type: ignore[assignment]
