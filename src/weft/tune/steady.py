"""What a model keeps on the host: seen before and after a step, it tells whether a step of it can be replayed."""

from __future__ import annotations

import pickle
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_SAME = (Tensor, nn.Module, type)


class Seen:
    """The plain values, and which tensors, a model and its loss hold now, and where Python's and NumPy's generators
    stand.

    Two are equal if a replay would find what the step found. A counter of forwards, a tensor that is replaced rather
    than written into, or a number drawn on the host makes them differ; what a global variable holds is not seen.
    """

    def __init__(self, model: nn.Module, loss: Any) -> None:
        self._held: list[Any] = []  # an id stays that of its thing while the thing is there
        holders = [*model.modules(), *(loss.modules() if isinstance(loss, nn.Module) else [loss])]
        self._values = [self._seen(vars(holder)) for holder in holders if hasattr(holder, "__dict__")]
        self._values.append((random.getstate(), pickle.dumps(np.random.get_state())))  # noqa: NPY002

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Seen) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

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
