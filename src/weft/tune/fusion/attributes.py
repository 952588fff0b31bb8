"""What a model is beyond its weights: the attributes of its parts, as text that two models can be compared by."""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.hooks import RemovableHandle

from weft.nn.batch import tensors_in
from weft.nn.state import attributes_of, joined, named_tensors, storage
from weft.tune.fusion.dropout import DROPOUT_PLACEHOLDER
from weft.tune.recipe import DROPOUTS, dropouts

UNKNOWN = "a tensor without values"
"""Stands for a tensor that has none, such as a fake one."""

_OMITTED = (*DROPOUTS, nn.Identity)
"""Masks are drawn by each trial's own rate, and a model may leave out a dropout whose rate is 0."""
_DEPTH = 5


def attributes(model: nn.Module) -> dict[str, str]:
    """The class and the attributes of every part, by qualified name: equal for two models that compute alike with the
    same weights. How often dropouts drop is left out."""
    left = {(id(part), name) for part, name in dropouts(model)}
    left |= {(id(part), "inplace") for part in model.modules() if type(part) in _OMITTED}
    names: dict[int, str] = {id(part): name for name, part in model.named_modules()}
    names |= {id(tensor): name for name, tensor in named_tensors(model)}
    found: dict[str, str] = {}
    for name, part in model.named_modules():
        if type(part) not in _OMITTED:
            found[name] = _named(type(part))
        for attribute, value in attributes_of(part):
            if (id(part), attribute) not in left:
                found[joined(name, attribute)] = _text(value, names, ())
    return found


def difference(shared: Mapping[str, str], own: Mapping[str, str], rate: float | None) -> str | None:
    """The name of an attribute that a trial's model has otherwise than the one that lanes share; None if there is none.

    Where the shared one has what stands for the dropout of a lane, the trial's has its ``rate``.
    """
    rates = () if rate is None else (repr(rate),) if rate else ("0.0", "0")
    for name in (*shared, *own):
        expected = shared.get(name, "")
        if own.get(name) not in (
            shared.get(name),
            *(expected.replace(repr(DROPOUT_PLACEHOLDER), told) for told in rates),
        ):
            return name
    return None


def aliased(model: nn.Module) -> str | None:
    """The name of an attribute that holds a weight or a buffer as a plain tensor, which lanes would not find there."""
    storages = {storage(tensor) for _, tensor in named_tensors(model)}
    for name, part in model.named_modules():
        for attribute, value in attributes_of(part):
            if isinstance(part, nn.RNNBase) and attribute == "_flat_weights":  # which torch keeps up to date
                continue
            if any(storage(tensor) in storages for tensor in tensors_in(value)):
                return joined(name, attribute)
    return None


def _text(value: Any, names: Mapping[int, str], within: tuple[int, ...]) -> str:
    """``names`` are those of parts, weights and buffers; ``within`` says what holds the value."""
    if isinstance(value, Tensor | nn.Module) and id(value) in names:
        return f"'{names[id(value)]}' itself"
    if isinstance(value, Tensor | np.ndarray):
        return _numbers(value)
    if id(value) in within or len(within) > _DEPTH:
        return _named(type(value))
    inner = functools.partial(_text, names=names, within=(*within, id(value)))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{inner(key)}: {inner(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(inner, value))})"
    if isinstance(value, RemovableHandle):  # numbered as they are made, whatever makes them
        return _named(type(value))
    if isinstance(value, set | frozenset):
        return f"set({', '.join(sorted(map(inner, value)))})"
    if isinstance(value, functools.partial):
        return f"partial({inner(value.func)}, {inner(value.args)}, {inner(value.keywords)})"
    if isinstance(value, types.MethodType):
        return f"{inner(value.__func__)} of {inner(value.__self__)}"
    if isinstance(value, types.FunctionType):
        return f"{_named(value)} {value.__code__.co_code.hex()} {inner(_bound(value))}"
    told = _named(value) if callable(value) and hasattr(value, "__qualname__") else repr(value)
    if " at 0x" not in told:
        return told
    return f"{_named(type(value))} {inner(vars(value)) if hasattr(value, '__dict__') else ''}"


def _bound(function: types.FunctionType) -> list[Any]:
    """The values that a function brings with it."""
    plain = [constant for constant in function.__code__.co_consts if not isinstance(constant, types.CodeType)]
    given = [plain, function.__code__.co_names, function.__defaults__, function.__kwdefaults__]
    for cell in function.__closure__ or ():
        try:
            given.append(cell.cell_contents)
        except ValueError:  # it is empty so far
            given.append(None)
    return given


def _numbers(value: Tensor | np.ndarray[Any, Any]) -> str:
    if isinstance(value, np.ndarray):
        raw = repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()
    elif isinstance(value, FakeTensor) or value.is_meta or value.layout != torch.strided:
        return f"{UNKNOWN} {value.dtype} {tuple(value.shape)}"
    else:
        raw = (
            value.detach().resolve_conj().resolve_neg().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return f"{value.dtype} {tuple(value.shape)} {hashlib.blake2b(raw, digest_size=12).hexdigest()}"


def _named(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"
