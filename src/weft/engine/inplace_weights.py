"""Weights that are updated between a forward and its backward, so that the backward computes with the newest ones.

Autograd saves a weight by reference. The leaves here keep their memory for the whole run, and an update writes into it,
so that a backward computes with what they hold then. Leaves of the parameters' own type share their memory:
there is one copy of the weights. In low precision a matrix has a leaf of its own, cast once per version; autocast would
make, and save, a cast for every forward, and the backward would see that old one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from weft.engine.consistency import Bounded, Stashed, VersionSchedule
from weft.errors import ConsistencyError
from weft.utils import foreach

_WIDE = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)
"""Modules whose weights autocast does not cast."""


class InPlaceWeights:
    """The leaves of one layer. They hold the newest version of its weights, or an older one for a forward that must
    read it."""

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter], compute: torch.dtype | None) -> None:
        wide = {id(p) for part in module.modules() if isinstance(part, _WIDE) for p in part.parameters()}
        self._parameters = list(parameters)
        self.compute = compute
        self.cast = [compute is not None and p.dim() >= 2 and id(p) not in wide for p in parameters]
        # .data has a version counter of its own: autograd does not take an update for a mistake.
        self.leaves = [
            (p.data.to(compute, copy=True) if cast else p.data).requires_grad_()
            for p, cast in zip(parameters, self.cast, strict=True)
        ]
        self._backup_memory: list[Tensor] | None = None
        self._backup: list[Tensor] | None = None
        """The newest version of the leaves that share the parameters' memory, while these hold an older one."""
        self._old: int | None = None
        self._fresh = not any(self.cast)

    def load_version(self, version: int, tensors: Sequence[Tensor]) -> None:
        if self._old == version:
            return
        if self._backup is None:
            shared = self._shared()
            self._backup = [leaf.clone() for leaf in shared] if self._backup_memory is None else self._backup_memory
            if self._backup_memory is not None:
                foreach.copy_(self._backup, shared)
        foreach.copy_([leaf.data for leaf in self.leaves], [tensor.data for tensor in tensors])
        self._old, self._fresh = version, False

    def load_newest(self) -> None:
        """Puts the newest version into the leaves and the parameters."""
        if self._old is not None and self._backup is not None:
            foreach.copy_(self._shared(), self._backup)
        if not self._fresh:
            pairs = [(leaf, p) for leaf, p, cast in zip(self.leaves, self._parameters, self.cast, strict=True) if cast]
            foreach.copy_([leaf.data for leaf, _ in pairs], [p.data for _, p in pairs])
        self._old, self._fresh = None, True

    def drop_backup(self) -> None:
        """No older version will be read any more: drops the copy of the newest one."""
        if self._old is not None:  # else casts are made anew when they are read: the weights may not have arrived yet
            self.load_newest()
        self._backup = None

    def on_update(self) -> None:
        """To be called after an update of the parameters, with the newest version in place."""
        self._backup = None
        self._fresh = not any(self.cast)

    def rebind(self, casts: Sequence[Tensor | None] | None, backup_memory: list[Tensor] | None) -> None:
        """To be called when the parameters, with the newest version, have other memory, and so have casts and backup.

        Without casts nothing computes with the leaves there.
        """
        memory = (
            [p.data for p in self._parameters]
            if casts is None
            else [p.data if cast is None else cast for p, cast in zip(self._parameters, casts, strict=True)]
        )
        self.leaves = [tensor.data.requires_grad_() for tensor in memory]
        self._backup_memory, self._backup, self._old = backup_memory, None, None
        self._fresh = casts is None or not any(self.cast)

    def _shared(self) -> list[Tensor]:
        """What the leaves hold that share the parameters' memory."""
        return [leaf.data for leaf, cast in zip(self.leaves, self.cast, strict=True) if not cast]


# The guard against a layer that runs its forward again in its backward, as ``torch.utils.checkpoint`` does.
#
# Under ``bounded`` that second forward would compute with newer weights than the first, and the gradient would belong
# to neither. All numbers of stages would agree on it, so no comparison of runs finds it. The first backwards of a
# layer are watched; later ones cost nothing.

BACKWARDS = 2
"""Backwards that are watched."""


class RecomputeGuard:
    def __init__(self, layer: str, module: nn.Module, schedule: VersionSchedule) -> None:
        self._layer, self._module, self._schedule = layer, module, schedule
        moves = isinstance(schedule.consistency, Bounded) and schedule.max_version_lag > 0
        self.backwards = BACKWARDS if moves else 0
        """How many more are to be watched."""

    def backward(self) -> AbstractContextManager[None]:
        """A block for a backward with the layer's weights in place; raises ConsistencyError where it computes with
        them anew."""
        if not self.backwards:
            return nullcontext()
        self.backwards -= 1
        return self._unread()

    @contextmanager
    def _unread(self) -> Iterator[None]:
        parts = [part for part in self._module.modules() if part._parameters]
        originals = [part._parameters for part in parts]
        for part, parameters in zip(parts, originals, strict=True):
            part.__dict__["_parameters"] = _Guarded(parameters, self._read)
        try:
            yield
        finally:
            for part, parameters in zip(parts, originals, strict=True):
                part.__dict__["_parameters"] = parameters

    def _read(self) -> None:
        # A hook of the user's may look at a weight; only what is recomputed does so with gradients on.
        if not torch.is_grad_enabled():
            return
        bounded = self._schedule.consistency
        assert isinstance(bounded, Bounded)
        raise ConsistencyError(
            f"layer '{self._layer}' runs its forward again in its backward, as torch.utils.checkpoint does: under "
            f"{bounded} that would be with newer weights than the forward itself had. Leave the checkpoint out, or "
            f"keep it with {Stashed(bounded.every, bounded.depth)} or exact"
        )


class _Guarded(dict[str, Any]):
    """A module's parameters that call a function when one of them is read."""

    def __init__(self, parameters: Mapping[str, Any], read: Any) -> None:
        super().__init__(parameters)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        self._read()
        return super().__getitem__(name)


# Other tensors in place of a module's parameters, with which a layer runs under an older version of its weights.
#
# This file alone touches ``nn.Module._parameters``. torch's own ``functional_call`` puts the parameters back as
# soon as the forward is over, and then a checkpointed layer would be recomputed in its backward under the wrong
# version.


class ParameterSwap:
    """The places of a module's parameters; one that is shared within the module has several."""

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
