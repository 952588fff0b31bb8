"""Which subnet is best: objectives, search methods, the loop that runs them, fronts and costs."""

from weft.callable import make_callable
from weft.search.cache import Cache
from weft.search.cost import flops, latencies, latency, parameters, peak_memory
from weft.search.entry import search
from weft.search.evolution import Evolution
from weft.search.expected import Expected, measure_expected
from weft.search.front import Front
from weft.search.loop import SearchResult, run_search
from weft.search.method import METHODS, Method, make_method
from weft.search.nsga2 import NSGA2
from weft.search.objective import Constraint, Objective, dominates, parse_constraints, parse_objectives
from weft.search.pick import likeliest
from weft.search.random import Random
from weft.search.rank import kendall_tau, regret, top_hit
from weft.search.score import Scorer
from weft.search.scored import Picked, Scored
from weft.search.target import Penalty, Target, parse_targets

__all__ = [
    "METHODS",
    "NSGA2",
    "Cache",
    "Constraint",
    "Evolution",
    "Expected",
    "Front",
    "Method",
    "Objective",
    "Penalty",
    "Picked",
    "Random",
    "Scored",
    "Scorer",
    "SearchResult",
    "Target",
    "dominates",
    "flops",
    "kendall_tau",
    "latencies",
    "latency",
    "likeliest",
    "make_method",
    "measure_expected",
    "parameters",
    "parse_constraints",
    "parse_objectives",
    "parse_targets",
    "peak_memory",
    "regret",
    "run_search",
    "search",
    "top_hit",
]

make_callable(__name__, search)
