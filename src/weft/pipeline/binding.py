"""Other tensors in place of a module's parameters for a while: how a layer runs under an older version of its weights.

The only module that touches ``nn.Module._parameters``. torch's own ``functional_call`` puts the parameters back as soon
as the forward is over, and then a checkpointed layer would be recomputed in its backward under the wrong version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class Binding:
    """Where each parameter of a module is kept; one that is tied stands in several places."""

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        number = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._own = list(parameters)
        self._places: list[tuple[dict[str, Any], str, int]] = [
            (part._parameters, name, number[id(parameter)])
            for part in module.modules()
            for name, parameter in part._parameters.items()
            if id(parameter) in number
        ]

    @contextmanager
    def to(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Within the block the module computes with these tensors instead of its parameters."""
        for parameters, name, index in self._places:
            parameters[name] = tensors[index]
        try:
            yield
        finally:
            for parameters, name, index in self._places:
                parameters[name] = self._own[index]
