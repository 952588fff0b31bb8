"""The planner's solver: one configuration for each vertex at the least cost, proven, within a limit on weights."""

from __future__ import annotations

from weft.plan.solve.limit import OverLimit
from weft.plan.solve.problem import Problem, Solution
from weft.plan.solve.solver import solve

__all__ = ["OverLimit", "Problem", "Solution", "solve"]
