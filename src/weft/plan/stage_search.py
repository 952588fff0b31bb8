"""A configuration of several stages made faster: each stage is solved again within the memory of its own devices.

The first assignment keeps the memory of all stages together. Once the cut is known, each stage may fill its own memory:
with few micro-batches in flight there is more room in the last stages. Then the graph is cut anew.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from weft.hardware.machine import Machine
from weft.plan.configurations import SolvedConfig, price_assignment
from weft.plan.costs import Tables
from weft.plan.graph import PARAMETER, Graph
from weft.plan.solver import OverLimit, Problem, solve

Table = NDArray[np.float64]

_SECONDS = 0.5  # for one stage
_PASSES = 3  # over all stages, each solved with the others as they are


def solve_stages(
    found: SolvedConfig, machine: Machine, memory_limit: float, tolerance: float, deadline: float = math.inf
) -> SolvedConfig:
    """The configuration, or a faster one of the same mesh, stages and micro-batches."""
    config, best = found.config, found
    stages = _Stages(config.graph, found.tables)
    seen: set[tuple[int, ...]] = set()
    while best.assignment not in seen and len(seen) < _PASSES and time.monotonic() < deadline:
        seen.add(best.assignment)
        assignment = list(best.assignment)
        try:
            for stage in range(config.stages):
                in_flight = min(config.training.microbatches, config.stages - stage)
                inside = [op for op, of in enumerate(best.stage_cut.stage) if of == stage]
                reserved = best.stage_cut.gathered[stage]
                problem = stages.problem(inside, assignment, in_flight, memory_limit - reserved)
                solved = solve(problem, tolerance=tolerance / 4, time_limit=_SECONDS)
                for op, choice in zip(inside, solved.assignment, strict=True):
                    assignment[op] = choice
            made = price_assignment(config, machine, found.tables, tuple(assignment), memory_limit)
        except OverLimit:
            break
        if made.cost.step_time < best.cost.step_time:
            bound = min(found.cost.lower_bound, made.cost.step_time)
            best = replace(made, cost=replace(made.cost, lower_bound=bound))
    return best


class _Stages:
    """The costs of a graph, of which one stage at a time is a problem of its own."""

    def __init__(self, graph: Graph, found: Tables) -> None:
        self._found = found
        self._fixed = [operator.kind == PARAMETER for operator in graph.operators]  # memory that no flight multiplies
        self._sources: list[list[int]] = [[] for _ in found.compute]
        self._readers: list[list[int]] = [[] for _ in found.compute]
        for source, reader in found.moves:
            self._sources[reader].append(source)
            self._readers[source].append(reader)

    def problem(self, inside: Sequence[int], around: Sequence[int], in_flight: int, limit: float) -> Problem:
        """The operators of one stage, where all others have the configurations ``around``."""
        number = {op: at for at, op in enumerate(inside)}
        moves = self._found.moves
        costs: list[Table] = []
        pairs: dict[tuple[int, int], Table] = {}
        for op in inside:
            own = self._found.compute[op]
            for source in self._sources[op]:
                if source in number:
                    pairs[number[source], number[op]] = moves[source, op]
                else:
                    own = own + moves[source, op][around[source]]
            for reader in self._readers[op]:
                if reader not in number:
                    own = own + moves[op, reader][:, around[reader]]
            costs.append(own)
        if math.isinf(limit):
            return Problem(tuple(costs), pairs)
        weights = tuple((1 if self._fixed[op] else in_flight) * self._found.memory[op] for op in inside)
        return Problem(tuple(costs), pairs, weights, limit)
