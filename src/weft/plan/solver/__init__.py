"""The planner's solver: one configuration for each vertex at the least cost, proven, within a limit on weights."""

from __future__ import annotations

from weft.plan.solver.problem import OverLimit, Problem, Solution
from weft.plan.solver.solve import solve

__all__ = ["OverLimit", "Problem", "Solution", "solve"]
