"""Targets: what a searched subnet must cost, as a penalty on a mixture."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from weft.elastic import Mixture
from weft.errors import SearchError, nearest
from weft.search.cost_model import METRICS, CostModel
from weft.search.cost_table import Array

TOLERANCE = 0.02

_TEXT = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([A-Za-z]*)\s*")
_UNITS = {
    "parameters": {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9},
    "flops": {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12},
    "latency": {"": 1.0, "us": 1e-3, "ms": 1.0, "s": 1e3},
}


@dataclass(frozen=True, slots=True)
class Target:
    """A cost that a subnet must have, within 2 %; raises SearchError where no subnet can have it."""

    expected: CostModel
    value: float
    weight: float = 1.0

    def __post_init__(self) -> None:
        metric, low, high = self.expected.metric, self.expected.low, self.expected.high
        if not (math.isfinite(self.value) and self.value > 0):
            raise SearchError(f"a target for {metric} must be a number above 0, not {self.value}")
        if self.value * (1 + TOLERANCE) < low or self.value * (1 - TOLERANCE) > high:
            raise SearchError(
                f"no architecture meets {metric}={self.value:g} (the reachable range is {low:g} to {high:g})"
            )

    def penalty(self, mixture: Mixture) -> Tensor:
        """The distance of the expected cost from the target, in units of the target, times the weight.

        Within some 2 % it is a square, so that it converges; outside its gradient has one size at every distance, which
        exceeds that of any loss of a fixed slope if the weight is large enough. (The gradient of a square falls near
        the target, so that the loss would win there.)
        """
        off = self.expected.expect(mixture) / self.value - 1
        return self.weight * ((off * off + TOLERANCE**2).sqrt() - TOLERANCE)

    def misses(self, cost: Array, tolerance: float = TOLERANCE) -> Array:
        """How far costs are beyond the tolerance, in units of the target; 0 where they meet it."""
        return np.maximum(np.abs(cost / self.value - 1) - tolerance, 0.0)


def parse_targets(texts: str | Iterable[str], measure: Callable[[str], CostModel]) -> tuple[Target, ...]:
    """Reads ``parameters=5e6``, ``flops=1.2G`` or ``latency=3ms``, several apart or joined by commas.

    ``measure`` gives the costs for a metric. Raises SearchError for what cannot be read or met.
    """
    joined = [texts] if isinstance(texts, str) else list(texts)
    values = dict[str, float]()
    for text in (part for one in joined for part in one.split(",")):
        metric, value = _parse(text)
        if metric in values:
            raise SearchError(f"two targets for {metric}: give one")
        values[metric] = value
    return tuple(Target(measure(metric), value) for metric, value in values.items())


def _parse(text: str) -> tuple[str, float]:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise SearchError(
            f"cannot read target '{text.strip()}'; write a metric, '=' and a number: parameters=5e6, flops=1.2e9 or "
            "latency=3ms"
        )
    metric, number, unit = match.groups()
    if metric not in METRICS:
        raise SearchError(f"no target can be set for '{metric}'{nearest(metric, METRICS)}")
    if unit not in _UNITS[metric]:
        known = ", ".join(name for name in _UNITS[metric] if name)
        raise SearchError(f"cannot read target '{text.strip()}': unknown unit '{unit}'; units of {metric}: {known}")
    return metric, float(number) * _UNITS[metric][unit]
