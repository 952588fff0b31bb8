"""What a gradient search was given, checked before anything is built: each mistake has its line."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from weft.errors import SearchError, nearest
from weft.pipeline import Optimizer, train
from weft.search.gradient.method import PICKS, GradientMethod, SampledMethod
from weft.search.target import Penalty

OWN = ["method", "targets", "penalties", "architecture", "warmup_weights", "pick", "budget", "recalibrate", "name"]


def check_arguments(
    method: object,
    steps: object,
    metrics: object,
    targets: object,
    penalties: object,
    architecture: object,
    warmup_weights: object,
    pick: object,
    options: Mapping[str, Any],
) -> None:
    """Raises SearchError for what is of the wrong kind, and for options that nobody has."""
    if not isinstance(method, (GradientMethod, SampledMethod)):
        raise SearchError(f"method is a name such as 'drnas', or a method itself, not {method!r}")
    _count("steps", steps, 1)
    if warmup_weights is not None:
        _count("warmup_weights", warmup_weights, 0)
    if pick is not None and pick not in PICKS:
        raise SearchError(f"pick is {' or '.join(map(repr, PICKS))}, not {pick!r}")
    if pick is not None and isinstance(method, SampledMethod):
        raise SearchError(f"'{method.name}' learns no mixture to pick from: leave pick out")
    if pick == "missed" and targets:
        raise SearchError("pick 'missed' does not look at what a subnet costs: use 'likeliest' with targets")
    named = metrics if isinstance(metrics, Mapping) else {} if metrics is None else None
    if named is None or not all(isinstance(name, str) and callable(metric) for name, metric in named.items()):
        raise SearchError(f'metrics are functions by name, such as {{"accuracy": weft.accuracy}}, not {metrics!r}')
    texts = [targets] if isinstance(targets, str) else targets
    if not isinstance(texts, Iterable) or not all(isinstance(text, str) for text in texts):
        raise SearchError(f"targets are texts such as 'parameters=5e6', not {targets!r}")
    if not isinstance(penalties, Iterable) or not all(isinstance(one, Penalty) for one in penalties):
        raise SearchError(f"penalties are of weft.search.Penalty, not {penalties!r}")
    if architecture is not None and not isinstance(architecture, Optimizer):
        raise SearchError(f"architecture is an optimizer such as weft.Optimizer('adam', lr=0.01), not {architecture!r}")
    known = set(inspect.signature(train).parameters) - {"net", "data", "bilevel"}
    for name in options:
        if name not in known:
            raise SearchError(f"a search that trains has no option '{name}'{nearest(name, (*OWN, *sorted(known)))}")


def _count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SearchError(f"{name} is a whole number of {least} or more, not {value!r}")
