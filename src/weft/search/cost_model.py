"""Expected costs: the parameters, FLOPs or latency of every subnet of a chain as a sum of tables over few choices."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.elastic import Mixture
from weft.elastic.mixture import choice_options
from weft.errors import SearchError, nearest
from weft.search.cost import flops, latencies, parameters
from weft.search.cost_measure import Measurement
from weft.search.cost_table import (
    Array,
    Table,
    allowed_mask,
    extend_by_constraints,
    merge_tables,
    reachable_range,
    replace_nan,
)
from weft.space import Subnet, Value
from weft.supernet import Chain, extract
from weft.utils.rng import generator

METRICS = ("parameters", "flops", "latency")


class CostModel:
    """What subnets cost: exact for parameters and FLOPs, a sum of measured parts for latency (milliseconds).

    ``low`` and ``high`` are the least and the most that a valid subnet costs; where constraints tie so many choices
    together that this cannot be worked out, they are bounds that no subnet goes beyond. It holds tables alone and can
    be pickled.
    """

    def __init__(
        self,
        metric: str,
        space_id: str,
        options: Mapping[str, tuple[Value, ...]],
        tables: Sequence[Table],
        allowed: Sequence[Array | None],
        low: float,
        high: float,
    ) -> None:
        self.metric, self.space_id, self.low, self.high = metric, space_id, low, high
        self.options = {name: options[name] for table in tables for name in table.names}
        self.constant = float(sum(table.values.sum() for table in tables if not table.names))
        pairs = [(table, mask) for table, mask in zip(tables, allowed, strict=True) if table.names]
        pairs.sort(key=lambda pair: pair[1] is not None)
        self.tables = tuple(table for table, _ in pairs)
        self.allowed_mask = tuple(mask for _, mask in pairs)
        self._on: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_on": {}}

    def __repr__(self) -> str:
        return f"CostModel({self.metric}, {len(self.tables)} tables, {self.low:g} to {self.high:g})"

    def of(self, subnet: Subnet) -> float:
        """The cost of one subnet."""
        if subnet.space_id != self.space_id:
            raise SearchError(f"the subnet '{subnet}' is of space {subnet.space_id}, not of {self.space_id}")
        return sum((table.at(self.options, subnet.values) for table in self.tables), self.constant)

    def expect(self, mixture: Mixture) -> Tensor:
        """The expectation over the valid subnets of a mixture, in its precision; differentiable, and never waits for
        the device but to bring the tables there once.

        Constraints are minded by the tables that hold all choices they tie together, if these have no more than 16,384
        combinations.
        """
        if not self.tables:
            return torch.tensor(self.constant)
        joints = [mixture.joint(table.names) for table in self.tables]
        known = self._tables_on(joints[0])
        free = len(joints) - len(known) + 1
        total = torch.dot(torch.cat([joints[0][:0], *joints[:free]]), known[0][0]) + self.constant
        for joint, (weighted, allowed) in zip(joints[free:], known[1:], strict=True):
            total = total + torch.dot(joint, weighted) / torch.dot(joint, allowed).clamp_min(1e-30)
        return total

    def _tables_on(self, like: Tensor) -> list[tuple[Tensor, Tensor]]:
        """On the device: all tables without forbidden combinations as one, then each other one with what is allowed."""
        key = (like.device, like.dtype)
        if key not in self._on:
            free = [
                table.values.ravel() for table, mask in zip(self.tables, self.allowed_mask, strict=True) if mask is None
            ]
            pairs = [(np.concatenate([np.zeros(0), *free]), np.zeros(0))]
            for table, mask in zip(self.tables, self.allowed_mask, strict=True):
                if mask is not None:
                    pairs.append(((table.values * mask).ravel(), mask.ravel()))
            self._on[key] = [tuple(torch.from_numpy(one).to(*key) for one in pair) for pair in pairs]  # type: ignore[misc]
        return self._on[key]


def build_cost_model(
    chain: Chain,
    batch: Mapping[str, Tensor],
    metric: str,
    device: torch.device | str = "cpu",
    repeats: int = 20,
) -> CostModel:
    """The cost of every subnet of the chain, for one forward of the batch.

    Each layer is extracted and measured for every combination of the choices that its modules name in ``reads``; a
    composite that does no products of its own is measured by the modules within it.
    Parameters and FLOPs are exact. They need no device and, unless a layer reads values of tensors, nothing is
    computed. A latency is the median of ``repeats`` on the device, scaled such that the median of a few complete
    subnets is right.

    Raises SearchError where a part depends on choices with more than 16,384 combinations, and where the parameters or
    FLOPs of a few extracted subnets differ: a cost may depend on the declared choices and on the shapes of inputs.
    """
    if metric not in METRICS:
        raise SearchError(f"no metric '{metric}' can be expected{nearest(metric, METRICS)}")
    measure, found = _measure(chain, batch, metric, torch.device(device), repeats)
    rules = chain.space.rules
    tables = merge_tables([extend_by_constraints(rules, replace_nan(table)) for table in found])
    low, high = reachable_range(chain.space, tables)
    allowed = [allowed_mask(rules, table.names) for table in tables]
    options = {name: choice_options(chain.space, name) for table in tables for name in table.names}
    model = CostModel(metric, chain.space.id, options, tables, allowed, low, high)
    if metric != "latency":
        for subnet, plain, inputs in _samples(measure, 2):
            cost = parameters(plain) if metric == "parameters" else flops(plain, inputs)
            if model.of(subnet) != cost:
                raise SearchError(
                    f"the {metric} of '{subnet}' are {cost:,} and not the {model.of(subnet):,.0f} of its parts: a "
                    "layer depends on more than the choices that its modules name in `reads` and the shapes of their "
                    "inputs"
                )
        return model
    subnets, modules, inputs = zip(*_samples(measure, 4), strict=True)
    times, sums = latencies(modules, inputs[0], repeats), [model.of(subnet) for subnet in subnets]
    scale = statistics.median(time / part for time, part in zip(times, sums, strict=True)) if all(sums) else 1.0
    tables = [Table(table.names, table.values * scale) for table in tables]
    return CostModel(metric, chain.space.id, options, tables, allowed, scale * low, scale * high)


def _measure(
    chain: Chain, batch: Mapping[str, Tensor], metric: str, device: torch.device, repeats: int
) -> tuple[Measurement, list[Table]]:
    if metric != "latency":
        try:
            measure = Measurement(chain, batch, metric, torch.device("meta"))
            return measure, measure.tables()
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            pass  # shapes are not enough: a layer reads values of tensors, so it has to run
    measure = Measurement(chain, batch, metric, device, repeats)
    return measure, measure.tables()


def _samples(measure: Measurement, count: int) -> Iterator[tuple[Subnet, nn.Module, tuple[Tensor, ...]]]:
    """The last subnet and some random ones, each as a plain module with its inputs."""
    chain, batch, space = measure.chain, measure.batch, measure.chain.space
    rng = generator("expected", space.id)
    chosen = [space.last(), *(space.sample(rng) for _ in range(count))] if space.choices else [space.subnet()]
    for subnet in chosen:
        yield subnet, extract(chain, subnet, batch), plain_inputs(chain, subnet, batch)


def plain_inputs(chain: Chain, subnet: Subnet, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """A batch as the subnet's plain module takes it: what enters the chain, then the extra inputs by first use."""
    extra = [name for layer in chain.route(subnet) for name in layer.extra_inputs]
    names = dict.fromkeys((*(chain.inputs or tuple(batch)[:1]), *extra))
    return tuple(batch[name] for name in names)
