"""What a model keeps on the host: seen before and after a step, it tells whether a step of it can be replayed."""

from __future__ import annotations

import pickle
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from weft.tune.drawing import standing

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_SAME = (Tensor, nn.Module, type, RemovableHandle)
_REGISTERED = ("_parameters", "_buffers", "_modules")
_ABSENT = object()


class Seen:
    """The plain values, and which tensors, a model and its loss hold now, and where Python's and NumPy's generators
    stand.

    Two are equal if a replay would find what the step found. A counter of forwards, a tensor that is replaced rather
    than written into, or a number drawn on the host makes them differ; what a global variable holds is not seen.
    """

    def __init__(self, model: nn.Module, loss: Any) -> None:
        self._held: list[Any] = []  # an id stays that of its thing while the thing is there
        judges = loss.named_modules(prefix="the loss") if isinstance(loss, nn.Module) else [("the loss", loss)]
        holders = [(name, part) for name, part in [*model.named_modules(), *judges] if hasattr(part, "__dict__")]
        self._values = {(name, key): self._seen(value) for name, part in holders for key, value in vars(part).items()}
        self._values["", "a generator of the host"] = standing()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Seen) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    def changed(self, before: Seen, besides: Container[tuple[str, str]] = ()) -> str | None:
        """The name of something that differs from what it was before; None if nothing does besides what is expected
        to, given by the names of the part and of its attribute."""
        for name, key in (*self._values, *before._values):
            if (name, key) in besides:
                continue
            now, then = (one._values.get((name, key), _ABSENT) for one in (self, before))
            if [now] == [then]:  # as lists compare, which a number that is not one equals itself by
                continue
            if key in _REGISTERED and isinstance(now, list) and isinstance(then, list):
                key = next((str(item[0]) for item in (*now, *then) if (item in now) != (item in then)), key)
            return f"{name}.{key}" if name else key
        return None

    def _seen(self, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return value
        self._held.append(value)
        if isinstance(value, _SAME) or callable(value):
            return id(value)
        if isinstance(value, Mapping):
            return [(self._seen(name), self._seen(item)) for name, item in value.items()]
        if isinstance(value, list | tuple):
            return [self._seen(item) for item in value]
        try:
            return pickle.dumps(value)
        except Exception:  # what cannot be told must count as changed
            return object()
