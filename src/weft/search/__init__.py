"""Which subnet is best: objectives, search methods, the loop that runs them, fronts and costs."""

from weft.search.api import search
from weft.search.cost import flops, latencies, latency, parameters, peak_memory
from weft.search.cost_model import CostModel, build_cost_model
from weft.search.discretize import most_probable_subnet
from weft.search.front import Front, FrontMember, Scored
from weft.search.loop import Cache, SearchResult, run_search
from weft.search.methods import METHODS, NSGA2, Evolution, Method, Random, make_method
from weft.search.objectives import Constraint, Objective, dominates, parse_constraints, parse_objectives
from weft.search.scorer import Scorer
from weft.search.targets import Target, parse_targets
from weft.utils.imports import make_callable

__all__ = [
    "METHODS",
    "NSGA2",
    "Cache",
    "Constraint",
    "CostModel",
    "Evolution",
    "Front",
    "FrontMember",
    "Method",
    "Objective",
    "Random",
    "Scored",
    "Scorer",
    "SearchResult",
    "Target",
    "build_cost_model",
    "dominates",
    "flops",
    "latencies",
    "latency",
    "make_method",
    "most_probable_subnet",
    "parameters",
    "parse_constraints",
    "parse_objectives",
    "parse_targets",
    "peak_memory",
    "run_search",
    "search",
]

make_callable(__name__, search)
