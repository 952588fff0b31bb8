"""A mixture: a probability for every option of every choice, where a subnet has one option each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from weft.errors import SpaceError, SupernetError, nearest
from weft.space import Space, Subnet

TOLERANCE = 1e-4


class Mixture:
    """Independent choices, each with a vector of probabilities in the order of its options.

    The probabilities of a choice with a condition hold where it is active. Elastic layers take a mixture in the place
    of a subnet, and compute with the expectation of their weights under it. They compute what
    they derive from it once, so give one mixture to all layers.
    """

    __slots__ = ("_cached", "_probabilities", "_space")

    def __init__(self, space: Space, probabilities: Mapping[str, Tensor]) -> None:
        """Takes one vector a choice; raises SupernetError where one is missing or is not a distribution."""
        for name in probabilities:
            if name not in space.choices:
                raise SupernetError(f"a mixture for the unknown choice '{name}'{nearest(name, space.choices)}")
        for name in space.choices:
            options = choice_options(space, name)
            if name not in probabilities:
                raise SupernetError(f"the mixture has no probabilities for choice '{name}'; options: {options}")
            vector = probabilities[name]
            if vector.shape != (len(options),):
                raise SupernetError(
                    f"choice '{name}' has {len(options)} options, but its probabilities have the shape "
                    f"{tuple(vector.shape)}"
                )
            shown = [float(p) for p in vector.detach()]
            if min(shown) < -TOLERANCE or not math.isclose(sum(shown), 1.0, abs_tol=TOLERANCE):
                raise SupernetError(
                    f"the probabilities of choice '{name}' are {', '.join(f'{p:g}' for p in shown)} and come to "
                    f"{sum(shown):g}: they must be 0 or more and come to 1"
                )
        self._fill(space, probabilities)

    def _fill(self, space: Space | None, probabilities: Mapping[str, Tensor]) -> None:
        self._space = space
        self._probabilities = probabilities if isinstance(probabilities, _Parts) else dict(probabilities)
        self._cached: dict[Any, Any] = {}

    @classmethod
    def unchecked(cls, space: Space | None, probabilities: Mapping[str, Tensor]) -> Mixture:
        """For probabilities that are right by construction: a check would make a GPU wait.

        Choices that nobody reads may be missing, and the space where nobody needs a subnet.
        """
        mixture = cls.__new__(cls)
        mixture._fill(space, probabilities)
        return mixture

    @classmethod
    def flat(cls, space: Space, names: Sequence[str], vector: Tensor) -> Mixture:
        """From one vector that holds the probabilities of these choices one after another."""
        return cls.unchecked(space, _Parts(vector, {name: len(choice_options(space, name)) for name in names}))

    @classmethod
    def uniform(cls, space: Space, device: torch.device | str = "cpu") -> Mixture:
        """Every option of a choice is as likely as the others."""
        counts = {name: len(choice_options(space, name)) for name in space.choices}
        return cls.unchecked(space, {name: torch.full((n,), 1 / n, device=device) for name, n in counts.items()})

    @classmethod
    def one_hot(cls, subnet: Subnet, space: Space, device: torch.device | str = "cpu") -> Mixture:
        """All the probability on one subnet; inactive choices are on their first option, which has no effect."""
        space.check(subnet)
        rows = {}
        for name in space.choices:
            options = choice_options(space, name)
            row = torch.zeros(len(options), device=device)
            row[options.index(subnet.values[name]) if name in subnet.values else 0] = 1.0
            rows[name] = row
        return cls.unchecked(space, rows)

    @property
    def space(self) -> Space:
        if self._space is None:
            raise SupernetError("this mixture was made without its space")
        return self._space

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._probabilities)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._probabilities:
            raise SupernetError(f"the mixture has no probabilities for '{name}'{nearest(name, self._probabilities)}")
        return self._probabilities[name]

    def joint(self, names: Sequence[str]) -> Tensor:
        """The probabilities of all combinations of options of these choices, the last one varying fastest."""
        factors = map(self.__getitem__, names)
        return self.cached(("joint", *names), lambda: reduce(lambda a, b: torch.outer(a, b).flatten(), factors))  # type: ignore[no-any-return]

    def cached(self, key: Any, make: Any) -> Any:
        """The value of ``make()``, called once a key for this mixture."""
        if key not in self._cached:
            self._cached[key] = make()
        return self._cached[key]

    def entropies(self) -> dict[str, Tensor]:
        """In bits, by choice."""
        return {n: -(p * p.clamp_min(1e-12).log2()).sum() for n, p in self._probabilities.items()}


class _Parts(Mapping[str, Tensor]):
    """The parts of a vector, cut on first use: a cut costs a backward even where nobody uses it."""

    def __init__(self, vector: Tensor, counts: Mapping[str, int]) -> None:
        self._vector, self._counts = vector, counts
        self._starts = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
        self._cut: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        part = self._cut.get(name)
        if part is None:
            part = self._cut[name] = self._vector.narrow(0, self._starts[name], self._counts[name])
        return part

    def __contains__(self, name: object) -> bool:
        return name in self._counts

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)


Pick = Subnet | Mixture
"""The architecture that a forward computes: one subnet, or a mixture of all."""


def choice_options(space: Space, name: str) -> tuple[Any, ...]:
    """The options of a choice; raises SpaceError for a choice of real numbers, which has none."""
    options = space.choices[name].options
    if options is None:
        raise SpaceError(f"choice '{name}' is a real number: only choices between options can be mixed")
    return options
