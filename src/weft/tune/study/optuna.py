"""A method: the name of a sampler or pruner with its options, checked as they are written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from weft.errors import TuneError, nearest
from weft.space import Value

Kind = Literal["sampler", "pruner"]
Given = str | Mapping[str, Any] | None

KNOWN: dict[Kind, dict[str, tuple[str, tuple[str, ...]]]] = {
    "sampler": {
        "tpe": ("TPESampler", ("n_startup_trials", "n_ei_candidates", "multivariate", "group", "constant_liar")),
        "cmaes": (
            "CmaEsSampler",
            ("n_startup_trials", "popsize", "use_separable_cma", "with_margin", "lr_adapt", "consider_pruned_trials"),
        ),
        "gp": ("GPSampler", ("n_startup_trials", "deterministic_objective")),
        "nsga2": ("NSGAIISampler", ("population_size", "mutation_prob", "crossover_prob", "swapping_prob")),
        "random": ("RandomSampler", ()),
        "grid": ("", ("points",)),
    },
    "pruner": {
        "none": ("NopPruner", ()),
        "asha": (
            "SuccessiveHalvingPruner",
            ("min_resource", "reduction_factor", "min_early_stopping_rate", "bootstrap_count"),
        ),
        "hyperband": ("HyperbandPruner", ("min_resource", "max_resource", "reduction_factor", "bootstrap_count")),
        "median": ("MedianPruner", ("n_startup_trials", "n_warmup_steps", "interval_steps", "n_min_trials")),
    },
}
"""Our names, the classes of Optuna that they stand for, and those of its options that can be written down."""

_LEAST = {
    **dict.fromkeys(("n_startup_trials", "min_early_stopping_rate", "bootstrap_count", "n_warmup_steps"), 0),
    **dict.fromkeys(("n_ei_candidates", "min_resource", "max_resource", "interval_steps", "n_min_trials"), 1),
    **dict.fromkeys(("popsize", "population_size", "points", "reduction_factor"), 2),
}
"""Options that are whole numbers, from these on: Optuna looks at most only when it needs them."""
_PARTS = ("mutation_prob", "crossover_prob", "swapping_prob")
"""Options that are numbers from 0 to 1; all others are true or false."""
_WORDS = {("asha", "min_resource"): "auto", ("hyperband", "max_resource"): "auto"}
_UNSET = ("popsize", "mutation_prob", "multivariate")
"""Options that may be None."""

_FIXED: dict[str, dict[str, Value]] = {
    "cmaes": {"warn_independent_sampling": False},
    "gp": {"warn_independent_sampling": False},
}


@dataclass(frozen=True, slots=True)
class Method:
    kind: Kind
    name: str
    options: Mapping[str, Value]

    def to_json(self) -> dict[str, Value]:
        return {"name": self.name, **dict(sorted(self.options.items()))}


def method(kind: Kind, given: Given) -> Method:
    """From a name, or from a mapping of ``name`` and options; None is no pruner.

    >>> method("sampler", {"name": "tpe", "n_startup_trials": 5}).to_json()
    {'name': 'tpe', 'n_startup_trials': 5}
    """
    if given is None and kind == "pruner":
        given = "none"
    written = {"name": given} if isinstance(given, str) else dict(given) if isinstance(given, Mapping) else {}
    name = written.pop("name", None)
    if not isinstance(name, str):
        raise TuneError(f"a {kind} is a name, or a mapping of a name and options, not {given!r}")
    if name not in KNOWN[kind]:
        raise TuneError(f"unknown {kind} '{name}'{nearest(name, KNOWN[kind])}")
    known = KNOWN[kind][name][1]
    for option in written:
        if option not in known:
            hint = nearest(option, known) or "; it has none"
            raise TuneError(f"the {kind} '{name}' has no option '{option}'{hint}")
        if problem := _wrong(name, option, written[option]):
            raise TuneError(f"the option '{option}' of the {kind} '{name}' is {problem}, not {written[option]!r}")
    made = Method(kind, name, written)
    if name != "grid":
        build(made, seed=0)
    return made


def _wrong(name: str, option: str, value: object) -> str | None:
    """What an option should have been, if it is something else."""
    word = _WORDS.get((name, option))
    if (value is None and option in _UNSET) or (word is not None and value == word):
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if option in _LEAST:
        right = isinstance(value, int) and number and value >= _LEAST[option]
        return None if right else f"a whole number from {_LEAST[option]} on{f' or {word!r}' if word else ''}"
    if option in _PARTS:
        return None if number and 0 <= value <= 1 else "a number from 0 to 1"  # type: ignore[operator]
    return None if isinstance(value, bool) else "true or false"


def build(made: Method, seed: int | None = None) -> Any:
    """A fresh sampler or pruner of Optuna; values that it refuses are a TuneError."""
    optuna = optuna_module()
    options = {**made.options, **_FIXED.get(made.name, {})}
    if made.kind == "sampler":
        options["seed"] = (seed or 0) % 2**32
    module = optuna.samplers if made.kind == "sampler" else optuna.pruners
    try:
        with quiet():
            return getattr(module, KNOWN[made.kind][made.name][0])(**options)
    except ImportError as error:
        raise TuneError(f"the {made.kind} '{made.name}' needs '{error.name}': pip install weft[tune]") from error
    except (ValueError, TypeError, AssertionError) as error:
        told = " ".join(str(error).split())
        raise TuneError(f"the {made.kind} '{made.name}' refuses {dict(made.options)}: {told}") from error


def optuna_module() -> Any:
    """Optuna, or a TuneError that says how to get it."""
    try:
        import optuna
    except ImportError as error:
        raise TuneError("studies need Optuna: pip install weft[tune]") from error
    return optuna


@contextmanager
def quiet() -> Iterator[None]:
    """Within the block Optuna neither logs nor warns; what matters of it we say ourselves."""
    import warnings

    logging = optuna_module().logging
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
