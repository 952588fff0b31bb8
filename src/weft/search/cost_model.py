"""Expected costs: the parameters, FLOPs or latency of every subnet of a chain as a sum of tables over few choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.elastic import Mixture
from weft.elastic.mixture import choice_options
from weft.errors import SearchError, nearest
from weft.search.cost_measure import Measure
from weft.search.cost_table import Array, Table, allowed_mask, filled, merged, reachable, with_tied
from weft.space import Subnet, Value
from weft.supernet import Chain

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
        return f"Expected({self.metric}, {len(self.tables)} tables, {self.low:g} to {self.high:g})"

    def of(self, subnet: Subnet) -> float:
        """The cost of one subnet."""
        if subnet.space_id != self.space_id:
            raise SearchError(f"the subnet '{subnet}' is of space {subnet.space_id}, not of {self.space_id}")
        total = self.constant
        for table in self.tables:
            # An inactive choice makes no difference, so that any option of it will do.
            given = [(self.options[name], subnet.values.get(name)) for name in table.names]
            total += table.values[tuple(0 if value is None else options.index(value) for options, value in given)]
        return float(total)

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

    Parameters and FLOPs are exact: each composite is traced for every combination of the choices that its own forward
    asks the pick for, and each module is measured for every size that it and its inputs can have. They need no device
    and, unless a layer reads values of tensors, nothing is computed. A latency is the median of ``repeats`` on the
    device, layer by layer (part by part where a layer reads choices with more than 64 combinations), and scaled such
    that whole subnets come out right in the middle.

    Raises SearchError where a part depends on choices with more than 16,384 combinations, and where one of a few
    subnets costs something else: modules that hand something to each other beside tensors cannot be told apart.
    """
    if metric not in METRICS:
        raise SearchError(f"no metric '{metric}' can be expected{nearest(metric, METRICS)}")
    measure = Measure(chain, batch, metric, torch.device(device), repeats)
    rules = chain.space.rules
    tables = [filled(table) for table in measure.tables()]
    if metric == "latency":
        scale = measure.scale(tables)
        tables = [Table(table.names, table.values * scale) for table in tables]
    tables = merged([with_tied(rules, table) for table in tables])
    low, high = reachable(chain.space, tables)
    allowed = [allowed_mask(rules, table.names) for table in tables]
    options = {name: choice_options(chain.space, name) for table in tables for name in table.names}
    return CostModel(metric, chain.space.id, options, tables, allowed, low, high)
