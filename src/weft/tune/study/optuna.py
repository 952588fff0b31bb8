"""A method: the name of a sampler or pruner with its options, checked as they are written."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from weft.errors import TuneError, install_extra, nearest
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

_LEAST = {"n_ei_candidates": 1, "popsize": 2, "points": 2}
"""Options that Optuna looks at only once it needs them: whole numbers from these on."""

_FIXED: dict[str, dict[str, Value]] = {
    "cmaes": {"warn_independent_sampling": False},
    "gp": {"warn_independent_sampling": False},
}


@dataclass(frozen=True, slots=True)
class OptunaSpec:
    kind: Kind
    name: str
    options: Mapping[str, Value]

    def to_json(self) -> dict[str, Value]:
        return {"name": self.name, **dict(sorted(self.options.items()))}


def parse_spec(kind: Kind, given: Given) -> OptunaSpec:
    """From a name, or from a mapping of ``name`` and options; None is no pruner.

    >>> parse_spec("sampler", {"name": "tpe", "n_startup_trials": 5}).to_json()
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
        if problem := _wrong(KNOWN[kind][name][0], option, written[option]):
            raise TuneError(f"the option '{option}' of the {kind} '{name}' is {problem}, not {written[option]!r}")
    made = OptunaSpec(kind, name, written)
    if name != "grid":
        build(made, seed=0)
    return made


def _wrong(cls: str, option: str, value: object) -> str | None:
    """What an option should have been, if it is of another kind than Optuna's own default, or too small."""
    if option in _LEAST and not (type(value) is int and value >= _LEAST[option]):
        return f"a whole number from {_LEAST[option]} on"
    usual = None if option == "points" else _options(cls)[option].default
    usual = False if option == "multivariate" else usual
    if usual is None or value == usual or type(value) is (int if usual == "auto" else type(usual)):
        return None
    return {bool: "true or false", int: "a whole number"}.get(type(usual), "a whole number or 'auto'")


def _options(cls: str) -> Mapping[str, inspect.Parameter]:
    optuna = optuna_module()
    return inspect.signature(getattr(optuna.samplers, cls, None) or getattr(optuna.pruners, cls)).parameters


def build(made: OptunaSpec, seed: int | None = None) -> Any:
    """A fresh sampler or pruner of Optuna; values that it refuses are a TuneError."""
    optuna = optuna_module()
    options = {**made.options, **_FIXED.get(made.name, {})}
    if made.kind == "sampler":
        options["seed"] = (seed or 0) % 2**32
    module = optuna.samplers if made.kind == "sampler" else optuna.pruners
    try:
        with silence_optuna():
            return getattr(module, KNOWN[made.kind][made.name][0])(**options)
    except ImportError as error:
        raise TuneError(f"the {made.kind} '{made.name}' needs '{error.name}': {install_extra('tune')}") from error
    except (ValueError, TypeError, AssertionError) as error:
        told = " ".join(str(error).split())
        raise TuneError(f"the {made.kind} '{made.name}' refuses {dict(made.options)}: {told}") from error


def optuna_module() -> Any:
    """Optuna, or a TuneError that says how to get it."""
    try:
        import optuna
    except ImportError as error:
        raise TuneError(f"studies need Optuna: {install_extra('tune')}") from error
    return optuna


@contextmanager
def silence_optuna() -> Iterator[None]:
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
