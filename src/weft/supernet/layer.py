"""A layer: the unit of weights that is updated as one, with its stable global name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.elastic import Pick
from weft.errors import SupernetError, WeftError
from weft.utils.rng import torch_seeded

Activations = tuple[Tensor, ...]
"""What a block passes to the next one."""

Candidate = nn.Module | Callable[[], nn.Module]
"""A module as it is, or a factory that is called when the layer is first needed."""

ForwardFn = Callable[[nn.Module, Activations, Mapping[str, Any]], Any]
"""Runs a module on activations, with its extra inputs."""

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class LazyLayer(nn.Module):
    """Stands for a layer whose factory has not been called yet."""

    def __init__(self, factory: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.factory = factory

    def forward(self, *activations: Tensor) -> Tensor:
        raise SupernetError("this layer has not been built yet: call initialise(chain, seed) first")


@dataclass(frozen=True, slots=True)
class Layer:
    """The place of a layer and what it needs; the chain holds its module, by name.

    Every subnet uses a ``shared`` layer. ``consistency`` is a text such as ``lagged(4)``, or None for the run's
    default. ``extra_inputs`` names entries of the batch that its module takes as keyword arguments. The module of an
    ``elastic`` layer takes the subnet too, as ``pick``.
    """

    name: str
    block: int
    shared: bool
    consistency: str | None = None
    extra_inputs: tuple[str, ...] = ()
    elastic: bool = False
    is_architecture: bool = False
    """Whether it holds architecture parameters instead of weights."""
    forward_fn: ForwardFn | None = None
    """Runs its module, if a plain call does not: mixed layers take probabilities from the end of the activations."""


def check_name(name: str, what: str) -> str:
    """The name itself; raises SupernetError unless it can be part of a global layer name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SupernetError(
            f"{what} {name!r} cannot be a name: use letters, digits, '_' and '-', starting with a letter"
        )
    return name


def as_module(candidate: object, name: str) -> nn.Module:
    """The candidate as a module, or a placeholder for its factory."""
    if isinstance(candidate, nn.Module):
        return candidate
    if callable(candidate):
        return LazyLayer(candidate)
    raise SupernetError(
        f"layer '{name}' must be an nn.Module or a function that makes one, not {type(candidate).__name__}"
    )


def build_layer(module: nn.Module, name: str, seed: int, device: torch.device) -> nn.Module:
    """The layer's module on the device. Weights that weft makes are a function of (seed, name).

    A factory is called, and a module on the meta device is reset, under a generator seeded by (seed, name). A module,
    or a part of one, that already has values keeps them.
    """
    if isinstance(module, LazyLayer):
        with torch_seeded(seed, "init", name):
            module = _call_factory(module, name)
    for label, part in list(module.named_children()):
        if isinstance(part, LazyLayer):
            module.add_module(label, build_layer(part, f"{name}.{label}", seed, device))
    tensors = _tensors(module)
    if any(tensor.is_meta for tensor in tensors):
        with torch_seeded(seed, "init", name), torch.no_grad():
            _materialise(module, name)
        if len(_tensors(module)) != len(tensors):
            raise SupernetError(
                f"layer '{name}' has tied weights on the meta device, which torch would untie: give it as a factory"
            )
    return module.to(device)


def _call_factory(lazy: LazyLayer, name: str) -> nn.Module:
    module = lazy.factory()
    if not isinstance(module, nn.Module):
        raise SupernetError(f"the factory of layer '{name}' returned {type(module).__name__}, not an nn.Module")
    return module


def build_layer_on_meta(module: nn.Module, name: str) -> nn.Module:
    """The layer's module with shapes but without values.

    A factory runs on the meta device and draws nothing. A factory that needs values as it runs gets them, which takes
    memory until its tensors are on the meta device too.
    """
    if isinstance(module, LazyLayer):
        lazy = module
        cpu = torch.device("cpu")
        module = shapes_only(lambda: _call_factory(lazy, name), lambda: build_layer(lazy, name, 0, cpu))
    return module.to("meta")


def shapes_only(make: Callable[[], T], make_with_values: Callable[[], T]) -> T:
    """Calls the first function, in which new tensors are on the meta device and torch.nn.init does nothing.

    Where that fails, since it reads values or on any device, calls the second.
    """
    try:
        with torch.device("meta"), _NothingDrawn():
            return make()
    except WeftError:
        raise
    except Exception:
        return make_with_values()


class _NothingDrawn(TorchFunctionMode):
    """Skips torch.nn.init. On the meta device it has no effect, but torch would import its compiler for it."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else (kwargs or {}).get("tensor")
        return func(*args, **(kwargs or {}))


def _tensors(module: nn.Module, recurse: bool = True) -> list[Tensor]:
    return [*module.parameters(recurse), *module.buffers(recurse)]


def _materialise(part: nn.Module, path: str) -> None:
    tensors = _tensors(part)
    all_meta = bool(tensors) and all(tensor.is_meta for tensor in tensors)
    has_meta = any(tensor.is_meta for tensor in _tensors(part, recurse=False))
    if has_meta:
        part.to_empty(device=torch.device("cpu"), recurse=False)
    # Parts first, in their order: a constructor makes its parts and then has the last word, as torch's attention has.
    for label, child in part.named_children():
        _materialise(child, f"{path}.{label}")
    reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
    if callable(reset) and (has_meta or all_meta):
        reset()
    elif has_meta:
        raise SupernetError(
            f"'{path}' ({type(part).__name__}) lies on the meta device and has no reset_parameters(): "
            "give the layer as a factory, for example lambda: MyLayer()"
        )


def run_layer(layer: Layer, module: nn.Module, activations: Activations, extras: Mapping[str, Any]) -> Activations:
    """The output of a layer's module."""
    out = module(*activations, **extras) if layer.forward_fn is None else layer.forward_fn(module, activations, extras)
    return as_activations(out, layer.name)


def failure(layer: Layer, activations: Activations, problem: Exception) -> Exception:
    """The error of a layer that failed on these activations, with its name; running out of memory stays as it is."""
    if isinstance(problem, torch.OutOfMemoryError):
        return problem
    shapes = ", ".join(str(tuple(x.shape)) for x in activations)
    hint = " (an embedding has fewer entries than the largest index)" if isinstance(problem, IndexError) else ""
    return SupernetError(f"layer '{layer.name}' fails on inputs of shape {shapes}: {problem}{hint}")


def as_activations(value: Any, where: str) -> Activations:
    """A tensor or a tuple of tensors, as a tuple; raises SupernetError for anything else."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, (tuple, list)) and value and all(isinstance(part, Tensor) for part in value):
        return tuple(value)
    kind = type(value).__name__
    raise SupernetError(f"'{where}' gave {kind}, which a chain cannot pass on: return a tensor or a tuple of tensors")


def extra_inputs(layer: Layer, batch: Mapping[str, Tensor], pick: Pick) -> dict[str, Any]:
    """The keyword arguments of the layer's module: entries of the batch, and the subnet if the layer is elastic.

    Raises SupernetError where an entry is missing.
    """
    try:
        inputs: dict[str, Any] = {key: batch[key] for key in layer.extra_inputs}
    except KeyError as missing:
        raise SupernetError(
            f"layer '{layer.name}' takes the extra input {missing}, "
            f"but the batch has {', '.join(sorted(batch)) or 'nothing'}"
        ) from None
    if layer.elastic:
        inputs["pick"] = pick
    return inputs


# The border between two blocks: where gradients from several consumers are added in one fixed order at every cut.


class _Boundary(torch.autograd.Function):
    # One node for all activations: its backward runs only after everything behind the border is done, so the
    # order in which a tensor's gradients are summed never depends on whether the chain is cut here.
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return gradients


class _Entry(_Boundary):
    # An alias and not a view: a layer may work on what it gets in place, as nn.ReLU(inplace=True) does.
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return tuple(tensor.data for tensor in tensors)


def detached_entry(leaves: Activations) -> Activations:
    """The leaves as a layer behind a cut may use them; their gradients are summed as at any border."""
    return _apply(_Entry, leaves, 1)


def grad_barrier(activations: Activations) -> Activations:
    """The same tensors behind a border. A single tensor that needs a gradient is a border by itself."""
    return _apply(_Boundary, activations, 2)


def _apply(border: type[_Boundary], activations: Activations, fewest: int) -> Activations:
    """The activations, those that require gradients behind the border; unchanged where fewer than ``fewest`` do."""
    places = [index for index, tensor in enumerate(activations) if tensor.requires_grad]
    if len(places) < fewest:
        return activations
    results = list(activations)
    behind = border.apply(*(activations[index] for index in places))  # type: ignore[no-untyped-call]
    for index, tensor in zip(places, behind, strict=True):
        results[index] = tensor
    return tuple(results)
