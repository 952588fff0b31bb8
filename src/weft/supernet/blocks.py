"""Blocks of a chain: shared layers, choices between candidates, elastic layers, and blocks that a subnet may skip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from weft.elastic import Condition, Mixture
from weft.elastic.mixture import choice_options
from weft.errors import SupernetError
from weft.space import Expr, Space, Subnet
from weft.supernet.layer import Activations, Candidate, ForwardFn, as_activations, check_name

Modules = Mapping[str, nn.Module]
"""The modules of a block's layers, by name."""

Extras = Mapping[str, Any]
"""Keyword arguments of a module."""


class Block(Protocol):
    """One link of the chain; a subnet uses at most one of its layers."""

    name: str
    space: Space | None
    consistency: str | None
    extra_inputs: tuple[str, ...]
    shared: bool
    elastic: bool
    is_architecture: bool
    forward_fn: ForwardFn | None

    def candidates(self) -> Mapping[str, Candidate]:
        """The layers by their global names, in order."""

    def pick(self, subnet: Subnet) -> str | None:
        """The name of the layer that the subnet uses, or None where it skips the block."""

    def mixed(self, modules: Modules, activations: Activations, mixture: Mixture, extras: Extras) -> Activations:
        """The expectation of the block's output under a mixture."""


class _Base:
    """What all blocks have; ``extra_inputs`` names entries of the batch that the layers take as keyword arguments."""

    shared = False
    elastic = False
    is_architecture = False
    forward_fn: ForwardFn | None = None
    space: Space | None

    def __new__(cls, *args: object, **options: object) -> Self:
        if "side" in options:
            raise SupernetError(f"weft.{cls.__name__}: side= was renamed to extra_inputs=")
        return super().__new__(cls)

    def __init__(self, name: str, space: Space | None, extra_inputs: Sequence[str], consistency: object) -> None:
        self.name = check_name(name, "block")
        self.space = space
        self.extra_inputs = tuple(extra_inputs)
        self.consistency = None if consistency is None else str(consistency)
        self.condition: Condition | None = None
        """Holds for the subnets that use the block; None: all do."""


class Shared(_Base):
    """A layer that every subnet uses: a stem, an embedding, a head.

    The layer is a module, or a function that makes one (then its weights depend on the run's seed and its name alone).
    """

    shared = True

    def __init__(
        self, layer: Candidate, name: str, *, extra_inputs: Sequence[str] = (), consistency: object = None
    ) -> None:
        super().__init__(name, None, extra_inputs, consistency)
        self._layer = layer

    def candidates(self) -> Mapping[str, Candidate]:
        return {self.name: self._layer}

    def pick(self, subnet: Subnet) -> str | None:
        return self.name

    def mixed(self, modules: Modules, activations: Activations, mixture: Mixture, extras: Extras) -> Activations:
        return as_activations(modules[self.name](*activations, **extras), self.name)


class Choice(_Base):
    """A block of which every subnet uses one candidate; declares the choice ``name`` in the space."""

    def __init__(
        self,
        space: Space,
        name: str,
        candidates: Mapping[str, Candidate],
        *,
        when: Expr | None = None,
        extra_inputs: Sequence[str] = (),
        consistency: object = None,
    ) -> None:
        super().__init__(name, space, extra_inputs, consistency)
        if not candidates:
            raise SupernetError(f"choice '{name}' has no candidates: give at least one")
        self._names = {check_name(label, f"candidate of '{name}'"): f"{name}.{label}" for label in candidates}
        self._candidates = {self._names[label]: candidate for label, candidate in candidates.items()}
        space.categorical(name, list(candidates), when=when)
        self.condition = None if when is None else Condition(space, when)

    def candidates(self) -> Mapping[str, Candidate]:
        return self._candidates

    def pick(self, subnet: Subnet) -> str | None:
        # Without a value the choice is switched off by its condition (depth): the block is skipped.
        return self._names[str(subnet[self.name])] if self.name in subnet.values else None

    def mixed(self, modules: Modules, activations: Activations, mixture: Mixture, extras: Extras) -> Activations:
        total: Activations | None = None
        for probability, name in zip(mixture[self.name].unbind(), self._names.values(), strict=True):
            out = as_activations(modules[name](*activations, **extras), name)
            if total is not None and [x.shape for x in total] != [y.shape for y in out]:
                raise SupernetError(
                    f"choice '{self.name}' can be mixed only if its candidates give the same shapes: '{name}' gives "
                    f"{[tuple(y.shape) for y in out]}, others {[tuple(x.shape) for x in total]}"
                )
            parts = [probability * y if y.is_floating_point() else y for y in out]
            if total is not None:
                parts = [x + y if y.is_floating_point() else y for x, y in zip(total, parts, strict=True)]
            total = tuple(parts)
        assert total is not None
        return _skipped(activations, total, self.condition, mixture, self.name)


class Optional(_Base):
    """A block that a subnet may skip: by a condition on other choices (depth), or by a choice ``name``."""

    def __init__(
        self,
        space: Space,
        name: str,
        layer: Candidate,
        *,
        when: Expr | None = None,
        extra_inputs: Sequence[str] = (),
        consistency: object = None,
    ) -> None:
        super().__init__(name, space, extra_inputs, consistency)
        self._layer = layer
        # A choice with the single option True has the condition, so that a subnet's values say which blocks it uses.
        space.categorical(name, [False, True] if when is None else [True], when=when)
        self.condition = None if when is None else Condition(space, when)

    def candidates(self) -> Mapping[str, Candidate]:
        return {self.name: self._layer}

    def pick(self, subnet: Subnet) -> str | None:
        return self.name if subnet.values.get(self.name) is True else None

    def mixed(self, modules: Modules, activations: Activations, mixture: Mixture, extras: Extras) -> Activations:
        assert self.space is not None
        out = as_activations(modules[self.name](*activations, **extras), self.name)
        if len(choice_options(self.space, self.name)) == 2:  # its choice is whether to skip it
            return _blend(activations, out, mixture[self.name][1], self.name)
        return _skipped(activations, out, self.condition, mixture, self.name)


class Elastic(_Base):
    """A block whose layer takes the subnet as the keyword ``pick`` and uses the part of its weights that it asks for.

    The layer is an ``elastic.Module``, or a function that makes one. With ``when``, subnets for which the condition
    does not hold skip the block: that is how depth varies.
    """

    elastic = True

    def __init__(
        self,
        space: Space,
        name: str,
        layer: Candidate,
        *,
        when: Expr | None = None,
        extra_inputs: Sequence[str] = (),
        consistency: object = None,
    ) -> None:
        super().__init__(name, space, extra_inputs, consistency)
        self._layer = layer
        self.condition = None if when is None else Condition(space, when)
        self.shared = when is None

    def candidates(self) -> Mapping[str, Candidate]:
        return {self.name: self._layer}

    def pick(self, subnet: Subnet) -> str | None:
        return self.name if self.condition is None or self.condition.holds(subnet) else None

    def mixed(self, modules: Modules, activations: Activations, mixture: Mixture, extras: Extras) -> Activations:
        out = as_activations(modules[self.name](*activations, **{**extras, "pick": mixture}), self.name)
        return _skipped(activations, out, self.condition, mixture, self.name)


def _skipped(
    activations: Activations, out: Activations, condition: Condition | None, mixture: Mixture, name: str
) -> Activations:
    return out if condition is None else _blend(activations, out, condition.probability(mixture), name)


def _blend(activations: Activations, out: Activations, probability: Tensor, name: str) -> Activations:
    """The expectation over using the block and skipping it; exact at both ends."""
    if [x.shape for x in activations] != [y.shape for y in out]:
        raise SupernetError(
            f"block '{name}' can be skipped, so its outputs must have the shapes of its inputs: "
            f"{[tuple(x.shape) for x in activations]}, not {[tuple(y.shape) for y in out]}"
        )
    return tuple(
        torch.lerp(x, y, probability.to(y.dtype)) if y.is_floating_point() else y
        for x, y in zip(activations, out, strict=True)
    )
