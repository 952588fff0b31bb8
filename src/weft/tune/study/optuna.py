"""Optuna: its samplers and pruners by name, and the choices of a space as its distributions."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from weft.errors import TuneError, install_extra, nearest
from weft.space import Choice, Floats, Integers, Space, Value

Kind = Literal["sampler", "pruner"]
Given = str | Mapping[str, Any] | None

SAMPLERS = {
    "tpe": "TPESampler",
    "cmaes": "CmaEsSampler",
    "gp": "GPSampler",
    "nsga2": "NSGAIISampler",
    "random": "RandomSampler",
    "grid": "",
}
PRUNERS = {
    "none": "NopPruner",
    "asha": "SuccessiveHalvingPruner",
    "hyperband": "HyperbandPruner",
    "median": "MedianPruner",
}
KNOWN: dict[Kind, dict[str, str]] = {"sampler": SAMPLERS, "pruner": PRUNERS}
"""Our names, and the classes of Optuna that they stand for. Optuna's grid is not used."""

_LEAST = {"n_ei_candidates": 1, "popsize": 2, "points": 2}
"""Options that Optuna looks at only once it needs them: whole numbers from these on."""

_SET = (
    "seed",
    "warn_independent_sampling",
    "independent_sampler",
    "gamma",
    "weights",
    "constraints_func",
    "x0",
    "source_trials",
)
"""Options that the study sets itself, or that cannot be written down."""
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
    known = _options(KNOWN[kind][name])
    for option in written:
        if option not in known:
            hint = nearest(option, known) or "; it has none"
            raise TuneError(f"the {kind} '{name}' has no option '{option}'{hint}")
        if problem := _wrong(known[option], option, written[option]):
            raise TuneError(f"the option '{option}' of the {kind} '{name}' is {problem}, not {written[option]!r}")
    made = OptunaSpec(kind, name, written)
    if name != "grid":
        build(made, seed=0)
    return made


def _wrong(usual: Any, option: str, value: object) -> str | None:
    """What an option should have been, if it is of another kind than Optuna's own default, or too small: Optuna itself
    finds out only when it samples."""
    if option in _LEAST and not (type(value) is int and value >= _LEAST[option]):
        return f"a whole number from {_LEAST[option]} on"
    if usual is None or value == usual or type(value) is (int if usual == "auto" else type(usual)):
        return None
    return {bool: "true or false", int: "a whole number"}.get(type(usual), "a whole number or 'auto'")


def _options(cls: str) -> dict[str, Any]:
    """The options of a class of Optuna with their defaults, but for those that the study sets."""
    if not cls:
        return {"points": None}
    optuna = optuna_module()
    parameters = inspect.signature(getattr(optuna.samplers, cls, None) or getattr(optuna.pruners, cls)).parameters
    found = {
        name: one.default for name, one in parameters.items() if name not in _SET and one.kind is not one.VAR_KEYWORD
    }
    return {**found, **({"multivariate": False} if "multivariate" in found else {})}


def build(made: OptunaSpec, seed: int | None = None) -> Any:
    """A fresh sampler or pruner of Optuna; values that it refuses are a TuneError."""
    optuna = optuna_module()
    options = {**made.options, **_FIXED.get(made.name, {})}
    if made.kind == "sampler":
        options["seed"] = (seed or 0) % 2**32
    module = optuna.samplers if made.kind == "sampler" else optuna.pruners
    try:
        with silence_optuna():
            return getattr(module, KNOWN[made.kind][made.name])(**options)
    except ImportError as error:
        raise TuneError(f"the {made.kind} '{made.name}' needs '{error.name}': {install_extra('tune')}") from error
    except (ValueError, TypeError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise TuneError(f"the {made.kind} '{made.name}' refuses {dict(made.options)}: {reason}") from error


def optuna_module() -> Any:
    """Optuna, or a TuneError that says how to get it."""
    try:
        import optuna
    except ImportError as error:
        raise TuneError(f"studies need Optuna: {install_extra('tune')}") from error
    return optuna


@contextmanager
def silence_optuna() -> Iterator[None]:
    """Within the block Optuna neither logs nor warns; weft reports errors itself."""
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


STUDY_NAME = "study"
"""Of every study in memory: Hyperband deals its brackets by name and number, and the user's name must not change a
result."""


def in_memory_study(trials: Iterable[Any], directions: Sequence[str], pruner: Any = None) -> Any:
    """A study of Optuna with these trials, which samplers and pruners read; it is thrown away afterwards."""
    with silence_optuna():
        study = optuna_module().create_study(study_name=STUDY_NAME, directions=list(directions), pruner=pruner)
        for trial in trials:
            study.add_trial(trial)
    return study


State = Literal["waiting", "running", "complete", "pruned", "failed"]
STATES: dict[State, str] = {
    "waiting": "WAITING",
    "running": "RUNNING",
    "complete": "COMPLETE",
    "pruned": "PRUNED",
    "failed": "FAIL",
}
"""The states of a record, and Optuna's names of them."""


def optuna_state(state: State) -> Any:
    return optuna_module().trial.TrialState[STATES[state]]


# The choices of a space as Optuna's distributions, asked in the order of the space.

ATTEMPTS = 1000
"""Draws of the rest of a partial pick before it is taken to be impossible."""


def step_of(choice: Integers) -> int | None:
    """The distance of integers that are ordered and evenly spaced.

    >>> step_of(Integers((16, 32, 48))), step_of(Integers((16, 32, 64)))
    (16, None)
    """
    steps = {b - a for a, b in zip(choice.values, choice.values[1:], strict=False)}
    return None if not choice.ordered or len(steps) > 1 else next(iter(steps), 1)


def distribution(choice: Choice) -> Any:
    """Real choices and evenly spaced integers keep their order; other choices are categories."""
    kinds = optuna_module().distributions
    if isinstance(choice, Floats):
        return kinds.FloatDistribution(choice.low, choice.high, log=choice.log)
    if isinstance(choice, Integers) and (step := step_of(choice)) is not None:
        return kinds.IntDistribution(choice.values[0], choice.values[-1], step=step)
    return kinds.CategoricalDistribution(choice.options)


def distributions(space: Space, params: Mapping[str, Value]) -> dict[str, Any]:
    """Of those choices that the trial has."""
    return {name: distribution(space.choices[name]) for name in params}


def with_derived(space: Space, params: Mapping[str, Value]) -> dict[str, Value]:
    """The values of a trial, and after them the derived dimensions that are active with these."""
    subnet = space.rules.subnet(dict(params))
    return {**params, **{name: subnet[name] for name in space.derived if name in subnet}}


def suggest(space: Space, trial: Any) -> dict[str, Value]:
    """Ask an Optuna trial for every choice that turns out active, in order; constraints are not checked."""

    def pick(name: str, choice: Choice) -> Value:
        if isinstance(choice, Floats):
            number = float(trial.suggest_float(name, choice.low, choice.high, log=choice.log))
            return min(max(number, choice.low), choice.high)  # a logarithm and back may leave the interval by a bit
        if isinstance(choice, Integers) and (step := step_of(choice)) is not None:
            return choice.canonical(trial.suggest_int(name, choice.values[0], choice.values[-1], step=step))
        return choice.canonical(trial.suggest_categorical(name, choice.options))

    return space.rules.settle(pick)


def complete_params(space: Space, params: Mapping[str, Value], rng: np.random.Generator) -> dict[str, Value]:
    """A valid pick with these values, the choices that are missing drawn from the generator.

    A value that is no option, unknown, derived or of a choice that turns out inactive is a TuneError or SpaceError.
    """
    given: dict[str, Value] = {}
    for name, value in params.items():
        if name not in space.choices:
            space.handle(name)  # an unknown name is an error here, with the nearest one
            raise TuneError(f"'{name}' is derived from '{space.derived[name]}'; leave it out")
        choice = space.choices[name]
        if not choice.contains(value):
            options = f"[{choice.low}, {choice.high}]" if isinstance(choice, Floats) else list(choice.options)[:12]
            raise TuneError(f"'{name}' cannot be {value!r}: it is of {options}")
        given[name] = choice.canonical(value)

    def pick(name: str, choice: Choice) -> Value:
        return given[name] if name in given else choice.sample(rng)

    inactive: set[str] = set()
    for _ in range(ATTEMPTS):
        values = space.rules.settle(pick)
        inactive = given.keys() - values.keys()
        if not inactive and space.rules.broken(values) is None:
            return values
        if given.keys() >= space.choices.keys() or set(values) <= given.keys():
            break  # nothing was drawn: another attempt would be the same
    if inactive:
        name = min(inactive)
        raise TuneError(f"'{name}' is inactive with these values: '{space.conditions[name]}' is false; leave it out")
    broken = space.rules.broken(values)
    raise TuneError(f"no trial has {dict(given)}: the constraint {broken} does not hold, whatever the rest")
