"""Copies of a model and a batch in fake tensors: shapes without data, whatever device the originals are on."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import _lru_cache_wrapper
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from weft.errors import PlanError
from weft.nn.batch import batch_items


def fake_model(model: nn.Module) -> nn.Module:
    """A copy within the fake mode that is on; weights of a recurrent module lie in one block, as cuDNN wants them."""
    _check(model)
    memo: dict[int, Any] = {}
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                _flatten_rnn(module, memo)
        for parameter in model.parameters():
            if id(parameter) not in memo:
                memo[id(parameter)] = nn.Parameter(_like(parameter), parameter.requires_grad)
        for tensor in (*model.buffers(), *_attributes(model)):
            memo.setdefault(id(tensor), _like(tensor))
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise PlanError(f"the model cannot be copied: {said}; build it anew on the 'meta' device") from error


def tensors_in_order(model: nn.Module, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers with their modules' names, in the order in which ``model.to(device)`` moves them."""
    for child, module in model.named_children():
        yield from tensors_in_order(module, f"{name}.{child}" if name else child)
    for own in (*model._parameters.values(), *model._buffers.values()):
        if own is not None:
            yield name, own


@contextmanager
def hide_fake_tensors() -> Iterator[None]:
    """A block in which models of transformers do what they do with data, not what they do in an export."""
    module = sys.modules.get("transformers.utils.import_utils")
    if module is None or not hasattr(module, "is_fake_tensor"):
        yield
        return
    original = module.is_fake_tensor
    module.is_fake_tensor = lambda _: False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.is_fake_tensor = original  # type: ignore[attr-defined]


def fake_batch(batch: Any, size: int | None = None, other: int | None = None) -> Any:
    """The batch in fake tensors; with two sizes, first dimensions of the first become the other."""
    if isinstance(batch, Tensor):
        shape = list(batch.shape)
        if size is not None and other is not None and shape and shape[0] == size:
            shape[0] = other
        return torch.empty(shape, dtype=batch.dtype)
    if isinstance(batch, Mapping):
        return {key: fake_batch(value, size, other) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        values = [fake_batch(value, size, other) for value in batch]
        named = hasattr(batch, "_fields")
        return type(batch)(*values) if named else tuple(values) if isinstance(batch, tuple) else values
    if is_dataclass(batch):
        made = copy.copy(batch)
        for name, value in batch_items(batch):
            object.__setattr__(made, name, fake_batch(value, size, other))  # frozen ones too
        return made
    return batch


def _check(model: nn.Module) -> None:
    """PlanError for a model that has no shapes, or that no mode sees into."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise PlanError(f"module '{name}' is scripted and cannot be traced: give the one that it was made from")
        if any(is_lazy(tensor) for tensor in (*module._parameters.values(), *module._buffers.values())):
            raise PlanError(f"module '{name}' has no shape before its first batch: call the model with one beforehand")


def _attributes(model: nn.Module) -> Iterator[Tensor]:
    """Tensors that modules keep as plain attributes."""
    apart = ("_parameters", "_buffers", "_modules")
    for module in model.modules():
        kept = [value for name, value in vars(module).items() if name not in apart]
        yield from (leaf for leaf in pytree.tree_leaves(kept) if isinstance(leaf, Tensor))


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _flatten_rnn(module: nn.RNNBase, memo: dict[int, Any]) -> None:
    own = [weight for weight in module._flat_weights if weight is not None]
    flat = torch.empty(sum(weight.numel() for weight in own), dtype=own[0].dtype)
    for weight, part in zip(own, torch.split(flat, [weight.numel() for weight in own]), strict=True):
        memo[id(weight)] = nn.Parameter(part.view(weight.shape), weight.requires_grad)


# Caches of a model's code, which a trace would leave with fake tensors in them.

_OTHERS = ("torch", "numpy", "weft", "builtins")
"""Packages that keep no tensor in their caches."""
MAX_DEPTH = 5
_NEVER = (type, FunctionType, ModuleType)


@contextmanager
def clear_polluted_caches(*code: Any) -> Iterator[None]:
    """Empties the ``functools`` caches that got tensors without data within the block.

    These are searched in the Python modules that define the given models and functions, and in those that they import
    from; other caches cannot be found.
    """
    found = _caches({home for one in code for home in _modules_of(one)})
    before = [cache.cache_info().misses for cache in found]
    try:
        yield
    finally:
        for cache, misses in zip(found, before, strict=True):
            if cache.cache_info().misses != misses and _holds_fakes(cache):
                cache.cache_clear()


def _holds_fakes(cache: Any) -> bool:
    """Whether a tensor without data is in it, or in what is in it, a few levels deep."""
    level, seen = [cache], {id(cache)}
    for _ in range(MAX_DEPTH):
        below = [one for one in gc.get_referents(*level) if not isinstance(one, _NEVER) and id(one) not in seen]
        if any(isinstance(one, FakeTensor) or (isinstance(one, Tensor) and one.is_meta) for one in below):
            return True
        seen.update(map(id, below))
        level = below
    return False


def _modules_of(code: Any) -> set[str]:
    parts = [type(part) for part in code.modules()] if isinstance(code, nn.Module) else [code]
    own = {str(getattr(part, "__module__", "")) for part in parts}
    return own | {str(getattr(value, "__module__", "")) for name in own for value in _callables_in(name)}


def _callables_in(home: str) -> list[Any]:
    if home not in sys.modules or home.split(".")[0] in _OTHERS:
        return []
    return [value for value in vars(sys.modules[home]).values() if isinstance(value, type) or callable(value)]


def _caches(modules: set[str]) -> list[Any]:
    values = [value for home in modules for value in _callables_in(home)]
    # Of a class, methods too, which may be static.
    methods = [own for value in values if isinstance(value, type) for own in vars(value).values()]
    inner = [getattr(value, "__func__", value) for value in (*values, *methods)]
    return list({id(value): value for value in inner if isinstance(value, _lru_cache_wrapper)}.values())
