"""The batch a model is captured with: tensors by name, and what is constant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import PlanError

Batch = Tensor | tuple[Any, ...] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Named:
    """A batch taken apart. ``tensors`` are copies, so that no two share memory, with a name for each; ``batch`` puts
    tensors of these names back into the form in which the batch was given."""

    given: Batch
    tensors: Mapping[str, Tensor]
    keys: Mapping[str, int | str]  # the place of each tensor in a tuple, or its key

    @classmethod
    def of(cls, batch: Batch, model: nn.Module) -> Named:
        parts: dict[int | str, Any]
        if isinstance(batch, Tensor):
            parts = {0: batch}
        elif isinstance(batch, Mapping):
            parts = dict(batch.items())
        elif isinstance(batch, (tuple, list)):
            parts = dict(enumerate(batch))
        else:
            raise PlanError(f"a batch is a tensor, a tuple or a mapping, not {type(batch).__name__}")
        device = next((value.device for value in model.parameters()), torch.device("cpu"))
        tensors: dict[str, Tensor] = {}
        keys: dict[str, int | str] = {}
        for key, value in parts.items():
            if isinstance(value, Tensor):
                name = f"input_{key}" if isinstance(key, int) or not key.isidentifier() else key
                tensors[name] = _copy(value, device)
                keys[name] = key
            elif value is not None and not isinstance(value, (bool, int, float, str)):
                kind = type(value).__name__
                raise PlanError(f"batch entry '{key}' is {kind}: an entry is a tensor, a number, a string or None")
        if not tensors:
            raise PlanError("the batch holds no tensor")
        return cls(batch, tensors, keys)

    def batch(self, tensors: Mapping[str, Tensor]) -> Batch:
        found = {self.keys[name]: tensor for name, tensor in tensors.items()}
        if isinstance(self.given, Tensor):
            return found[0]
        if isinstance(self.given, Mapping):
            return {key: found.get(key, value) for key, value in self.given.items()}
        return tuple(found.get(place, value) for place, value in enumerate(self.given))


def call(model: Any, batch: Batch) -> Any:
    """The model's output for a batch."""
    if isinstance(batch, Tensor):
        return model(batch)
    return model(**batch) if isinstance(batch, Mapping) else model(*batch)


def _copy(value: Tensor, device: torch.device) -> Tensor:
    # A copy, because export takes two inputs that are one tensor for one input. Values do not matter, only their kind.
    if device.type == "meta" or value.is_meta:
        return torch.zeros(value.shape, dtype=value.dtype, device=device, requires_grad=False)
    return value.detach().to(device, copy=True)
