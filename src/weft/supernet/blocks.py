"""Blocks of a chain: shared layers, choices between candidates, elastic layers, and blocks that a subnet may skip."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from weft.elastic import Condition, Mixture
from weft.elastic.mixture import choice_options
from weft.errors import SupernetError
from weft.space import Expr, Space, Subnet, Value
from weft.supernet.layer import Activations, Candidate, ForwardFn, as_activations, check_name

Modules = Mapping[str, nn.Module]
"""The modules of a block's layers, by name."""

Extras = Mapping[str, Any]
"""Keyword arguments of a module."""


class Block(ABC):
    """One link of the chain; a subnet uses at most one of its layers.

    ``extra_inputs`` names entries of the batch that the layers take as keyword arguments.
    """

    shared = False
    elastic = False
    is_architecture = False
    forward_fn: ForwardFn | None = None

    def __new__(cls, *args: object, **options: object) -> Self:
        if "side" in options:
            raise SupernetError(f"weft.{cls.__name__}: side= was renamed to extra_inputs=")
        return super().__new__(cls)

    def __init__(
        self,
        name: str,
        space: Space | None,
        layers: Mapping[str, Candidate],
        *,
        options: Sequence[Value] = (),
        when: Expr | None = None,
        extra_inputs: Sequence[str] = (),
        consistency: object = None,
    ) -> None:
        self.name = check_name(name, "block")
        self.space = space
        self.extra_inputs = tuple(extra_inputs)
        self.consistency = None if consistency is None else str(consistency)
        self._layers = layers
        if space is not None and options:
            space.categorical(name, options, when=when)
        self.condition = None if space is None or when is None else Condition(space, when)
        """Holds for the subnets that use the block; None: all do."""

    def candidates(self) -> Mapping[str, Candidate]:
        """The layers by their global names, in order."""
        return self._layers

    def pick(self, subnet: Subnet) -> str | None:
        """The name of the layer that the subnet uses, or None where it skips the block."""
        return self.name

    @abstractmethod
    def mixed(self, modules: Modules, activations: Activations, mixture: Mixture, extras: Extras) -> Activations:
        """The expectation of the block's output under a mixture."""

    def _skipped(self, activations: Activations, out: Activations, mixture: Mixture) -> Activations:
        """The expectation over using the block, which gives ``out``, and skipping it by its condition."""
        return out if self.condition is None else self._blend(activations, out, self.condition.probability(mixture))

    def _blend(self, activations: Activations, out: Activations, probability: Tensor) -> Activations:
        """The expectation over using the block and skipping it; exact at both ends."""
        if [x.shape for x in activations] != [y.shape for y in out]:
            raise SupernetError(
                f"block '{self.name}' can be skipped, so its outputs must have the shapes of its inputs: "
                f"{[tuple(x.shape) for x in activations]}, not {[tuple(y.shape) for y in out]}"
            )
        return tuple(
            torch.lerp(x, y, probability.to(y.dtype)) if y.is_floating_point() else y
            for x, y in zip(activations, out, strict=True)
        )


class Shared(Block):
    """A layer that every subnet uses: a stem, an embedding, a head.

    The layer is a module, or a function that makes one (then its weights depend on the run's seed and its name alone).
    """

    shared = True

    def __init__(
        self, layer: Candidate, name: str, *, extra_inputs: Sequence[str] = (), consistency: object = None
    ) -> None:
        super().__init__(name, None, {name: layer}, extra_inputs=extra_inputs, consistency=consistency)

    def mixed(self, modules: Modules, activations: Activations, mixture: Mixture, extras: Extras) -> Activations:
        return as_activations(modules[self.name](*activations, **extras), self.name)


class Choice(Block):
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
        if not candidates:
            raise SupernetError(f"choice '{name}' has no candidates: give at least one")
        self._names = {check_name(label, f"candidate of '{name}'"): f"{name}.{label}" for label in candidates}
        layers = {self._names[label]: candidate for label, candidate in candidates.items()}
        super().__init__(
            name, space, layers, options=list(candidates), when=when, extra_inputs=extra_inputs, consistency=consistency
        )

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
        return self._skipped(activations, total, mixture)


class Optional(Block):
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
        # A choice with the single option True has the condition, so that a subnet's values say which blocks it uses.
        options = [False, True] if when is None else [True]
        super().__init__(
            name, space, {name: layer}, options=options, when=when, extra_inputs=extra_inputs, consistency=consistency
        )

    def pick(self, subnet: Subnet) -> str | None:
        return self.name if subnet.values.get(self.name) is True else None

    def mixed(self, modules: Modules, activations: Activations, mixture: Mixture, extras: Extras) -> Activations:
        assert self.space is not None
        out = as_activations(modules[self.name](*activations, **extras), self.name)
        if len(choice_options(self.space, self.name)) == 2:  # its choice is whether to skip it
            return self._blend(activations, out, mixture[self.name][1])
        return self._skipped(activations, out, mixture)


class Elastic(Block):
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
        super().__init__(name, space, {name: layer}, when=when, extra_inputs=extra_inputs, consistency=consistency)
        self.shared = when is None

    def pick(self, subnet: Subnet) -> str | None:
        return self.name if self.condition is None or self.condition.holds(subnet) else None

    def mixed(self, modules: Modules, activations: Activations, mixture: Mixture, extras: Extras) -> Activations:
        out = as_activations(modules[self.name](*activations, **{**extras, "pick": mixture}), self.name)
        return self._skipped(activations, out, mixture)
