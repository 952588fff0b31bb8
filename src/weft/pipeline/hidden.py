"""What a layer hides from its versions: tensors that it keeps for itself, and forwards that it runs in its backward.

Both are found in the first passes of a layer, which are watched; later ones cost nothing.

    self.state = 0.9 * self.state + x      forwards of several versions are under way: whose state is it?
    checkpoint(self.inner, x)              under ``bounded`` the backward would run ``inner`` with newer weights

Beside ``binding`` the only module that touches ``nn.Module._parameters``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import ConsistencyError
from weft.pipeline.consistency import Bounded, Clock, Exact, Recomputed, Stashed

FORWARDS = 3
"""Forwards that are watched. The first may fill a cache; what the others change is more than that."""

BACKWARDS = 2
"""Backwards that are watched."""

DEEP = 3
"""How far lists within lists are looked into."""

_NOTHING: AbstractContextManager[None] = nullcontext()
_INNER = frozenset(vars(nn.Module()))


class Hidden:
    """Watches one layer under its clock: each pass runs in a block of its own, which raises ConsistencyError."""

    def __init__(self, layer: str, module: nn.Module, clock: Clock) -> None:
        self._layer, self._module, self._clock = layer, module, clock
        # Under `exact` all that a forward could read there comes from earlier micro-batches, in their order.
        self._forwards = 0 if isinstance(clock.consistency, Exact) else FORWARDS
        moves = isinstance(clock.consistency, Bounded) and clock.drift > 0
        self._backwards = BACKWARDS if moves else 0

    def forward(self) -> AbstractContextManager[None]:
        """For a forward of the layer: it must not change tensors that are neither parameters nor buffers."""
        if not self._forwards:
            return _NOTHING
        self._forwards -= 1
        return _NOTHING if self._forwards == FORWARDS - 1 else self._unchanged()

    def backward(self) -> AbstractContextManager[None]:
        """For a backward of the layer, with its weights in place: it must not compute with them anew."""
        if not self._backwards:
            return _NOTHING
        self._backwards -= 1
        return self._unread()

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        before = kept(self._module)
        yield
        name = changed(before, kept(self._module))
        if name is not None:
            raise ConsistencyError(
                f"layer '{self._layer}' keeps tensors for itself, in '{name}', that its forward changes, which needs "
                f"'exact'; here it is {self._clock.consistency}, and micro-batches of several versions would share "
                "them. Compute them anew in each forward"
            )

    @contextmanager
    def _unread(self) -> Iterator[None]:
        parts = [part for part in self._module.modules() if part._parameters]
        own = [part._parameters for part in parts]
        for part, parameters in zip(parts, own, strict=True):
            part.__dict__["_parameters"] = _Guarded(parameters, self._read)
        try:
            yield
        finally:
            for part, parameters in zip(parts, own, strict=True):
                part.__dict__["_parameters"] = parameters

    def _read(self) -> None:
        # A hook of the user's may look at a weight; only what is recomputed does so with gradients on.
        if not torch.is_grad_enabled():
            return
        said = self._clock.consistency
        assert isinstance(said, Bounded)
        raise ConsistencyError(
            f"layer '{self._layer}' runs its forward again in its backward, as torch.utils.checkpoint does: under "
            f"{said} that would be with newer weights than the forward itself had. Leave the checkpoint out and say "
            f"{Recomputed(said.every, said.depth)}, which means just that, or keep it with "
            f"{Stashed(said.every, said.depth)} or exact"
        )


def kept(module: nn.Module) -> dict[str, tuple[Any, int]]:
    """The tensors that a module and its parts keep as plain attributes, alone or in lists and dictionaries, by name;
    each with the number of changes in place. Of a list with tensors there is the length too."""
    known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    found: dict[str, tuple[Any, int]] = {}
    for path, part in module.named_modules():
        for name, value in part.__dict__.items():
            if name not in _INNER:
                _gather(f"{path}.{name}" if path else name, value, known, found, DEEP)
    return found


def changed(before: Mapping[str, tuple[Any, int]], after: Mapping[str, tuple[Any, int]]) -> str | None:
    """The first of the tensors that is another one or gone, or was changed in place; what is new may be a cache."""
    for name, (thing, count) in before.items():
        now = after.get(name)
        if now is None or now[0] is not thing or now[1] != count:
            return name
    return None


class _Guarded(dict[str, Any]):
    """A module's parameters that say when one of them is read."""

    def __init__(self, own: Mapping[str, Any], read: Any) -> None:
        super().__init__(own)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        self._read()
        return super().__getitem__(name)


def _gather(name: str, value: Any, known: set[int], found: dict[str, tuple[Any, int]], deep: int) -> None:
    if isinstance(value, Tensor):
        if id(value) not in known and not isinstance(value, nn.Parameter):
            found[name] = (value, 0 if value.is_inference() else value._version)
        return
    if not deep:
        return
    if isinstance(value, (list, tuple, deque)):
        size = len(found)
        for index, item in enumerate(value):
            _gather(f"{name}[{index}]", item, known, found, deep - 1)
        if len(found) > size:
            found[name] = (None, len(value))
    elif isinstance(value, dict):
        for key, item in value.items():
            _gather(f"{name}[{key!r}]", item, known, found, deep - 1)
