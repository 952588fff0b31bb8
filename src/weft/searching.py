"""A search that trains, for a person: from a config to what a gradient method found, with its progress on the way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from weft import assembly
from weft.config import Config, Search, to_dict
from weft.data import Data, Loader
from weft.dryrun import META, on_meta
from weft.errors import RunError, SearchError, nearest
from weft.progress import Bar
from weft.runs import Run
from weft.runs.files import plain
from weft.search import METHODS, Scored
from weft.search.cost import flops, parameters
from weft.search.gradient import GRADIENT_METHODS, Found, gradient_search
from weft.search.gradient.darts import Darts
from weft.search.pick import likeliest
from weft.space import Subnet
from weft.supernet import Chain, Factory, extract
from weft.supernet.elastic import Mixture
from weft.supernet.elastic.mixture import choice_options
from weft.supernet.mixed import mix
from weft.zoo.catalogue import Undrawn

log = logging.getLogger("weft")

SAMPLED = ("spos", "fairnas", "sandwich")
KEPT = 0.95  # of the mean probabilities, at each step: methods that draw tell what they drew
PATIENCE = 1.0  # seconds between two looks at the likeliest subnet, at least
SHARE = 20  # and so many times as long as a look takes


def is_gradient(method: str | None) -> bool:
    """Whether a method trains the supernet itself."""
    return method in GRADIENT_METHODS


def check_method(method: str | None) -> None:
    """Refuses a method that nobody knows."""
    if method is not None and method not in (*METHODS, *GRADIENT_METHODS):
        raise SearchError(f"unknown search method '{method}'{nearest(method, (*METHODS, *GRADIENT_METHODS))}")


def tell_unused(search: Search) -> None:
    """Warns of settings that the method does not look at."""
    usual, method, gradient = Search(), search.method, is_gradient(search.method)
    others = ("maximize", "minimize", "constraints", "seed") if gradient else ("targets", "warmup", "rate", "pick")
    unused = [f"search.{name}" for name in others if getattr(search, name) != getattr(usual, name)]
    if unused:
        instead = "search.targets and train.seed" if gradient else "search.constraints"
        log.warning("'%s' does not look at %s, but at %s", method or "evolution", ", ".join(unused), instead)


def check_resumed(config: Config) -> None:
    """Refuses to go on with a run that was searched in another way."""
    path = Path(config.runs) / str(config.run)
    if not (path / "manifest.json").is_file():
        return
    saved, now = Run.open(path).manifest.get("config") or {}, plain(to_dict(config)["search"])
    before = {**plain(to_dict(Config(""))["search"]), **saved.get("search", {})}
    for name in ("method", "targets", "warmup", "rate"):
        if saved and before[name] != now[name]:
            raise RunError(
                f"run '{path.name}' was made with search.{name} = {before[name]}, now it is {now[name]}: "
                "resume it as it was, or choose another name"
            )


def learn(config: Config, folder: Path, resume: bool, console: Console) -> Found:
    """Trains and searches as the config says."""
    if resume:
        check_resumed(config)
    assembly.set_threads(config)
    net, data = assembly.supernet_of(config, folder), assembly.data_of(config, folder)
    arguments = assembly.gradient_arguments(config, folder) | assembly.extra_arguments(config, folder)
    saved = {**to_dict(config), "folder": str(folder.resolve())}
    load = data if (config.train.stages or 1) == 1 else partial(assembly.data_of, config, folder.resolve())
    with Bar(console, "search", config.train.steps, "steps") as bar:
        watch = Watch(bar, net, data)
        arguments |= {"callbacks": [bar.train, watch], "on_score": watch.score(config)}
        return gradient_search(net, load, **arguments, resume=resume, config=saved)


def told(found: Found, config: Config) -> dict[str, Any]:
    """What was found, as plain values."""
    trained, s = found.trained, config.search
    results = trained.path / "results" / s.name
    space, mixture = trained.chain.space, found.mixture
    rows = None
    if mixture is not None:
        bits = {name: max(0.0, float(entropy)) for name, entropy in mixture.entropies().items()}
        rows = [
            {
                "choice": name,
                "found": found.subnet.values.get(name),
                "bits": bits[name],
                "options": list(choice_options(space, name)),
                "probabilities": [float(p) for p in mixture[name]],
            }
            for name in mixture.names
        ]
    return {
        "run": str(trained.path),
        "method": s.method,
        "steps": config.train.steps,
        "fingerprint": trained.fingerprint,
        "architecture": str(found.subnet),
        "picked": found.pick,
        "subnet": found.subnet.to_json(),
        "scores": found.scores,
        "probabilities": rows,
        "results": str(results),
        "files": sorted(path.name for path in results.iterdir() if path.suffix in (".json", ".csv", ".svg")),
    }


class Watch:
    """Tells the bar how undecided a search is, which subnet is the likeliest by now and what that costs.

    The numbers are those of a mean over the last steps. Where nobody looks, nothing is worked out, and what cannot be
    worked out is left out: watching never stops a run.
    """

    def __init__(self, bar: Bar, net: Chain | Factory, data: Data, clock: Callable[[], float] = time.monotonic) -> None:
        self._bar, self._net, self._data, self._clock = bar, net, data, clock
        self._mean: Tensor | None = None
        self._weight = 0.0
        self._mixed: Any = None
        self._costs: dict[Subnet, str] = {}
        self._next = 0.0

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Sees the events of the run."""
        vector = event.get("mixture") if event["event"] == "step" and self._bar.shown else None
        if vector is None:
            return
        self.see(vector)
        began = self._clock()
        if began >= self._next:
            try:
                self._bar.tell(*self._look())
            except Exception as problem:
                log.debug("cannot tell of the mixture: %s", problem)
            self._next = self._clock() + max(PATIENCE, SHARE * (self._clock() - began))

    def see(self, vector: Sequence[float]) -> None:
        seen = torch.tensor([float(p) for p in vector], dtype=torch.float64)
        self._mean = (1 - KEPT) * seen if self._mean is None else KEPT * self._mean + (1 - KEPT) * seen
        self._weight = KEPT * self._weight + (1 - KEPT)

    def mixture(self) -> Mixture:
        """The mean probabilities of the last steps."""
        if self._mixed is None:
            with Undrawn():
                self._mixed = mix(on_meta(self._net), Darts())
        assert self._mean is not None
        return Mixture.flat(self._mixed.space, self._mixed.order, self._mean / self._weight)

    def score(self, config: Config) -> Callable[[Scored, bool], None]:
        """What sees the scores of the evolution that follows a training by samples."""
        began = False

        def see(scored: Scored, cached: bool) -> None:
            nonlocal began
            if not began:
                self._bar.begin("search", config.search.budget)
                began = True
            self._bar.search(scored, cached)

        return see

    def _look(self) -> tuple[str, str]:
        mixture = self.mixture()
        entropies = mixture.entropies().values()
        subnet = likeliest(mixture)
        if subnet not in self._costs:
            self._costs[subnet] = self._cost(subnet)
        bits = float(sum(entropies)) / max(len(entropies), 1)
        return " | ".join([f"{bits:.2f} bits", *filter(None, [self._costs[subnet]])]), str(subnet)

    def _cost(self, subnet: Subnet) -> str:
        chain: Chain = self._mixed.plain
        source = self._data.validation
        assert source is not None
        batch = {name: part.to(META) for name, part in Loader(source, 1, 0, shuffle=False).batch(0).items()}
        plain = extract(chain, subnet, batch)
        names = chain.inputs or tuple(batch)[:1]
        side = [name for layer in chain.route(subnet) for name in layer.side]
        inputs = tuple(batch[name] for name in dict.fromkeys((*names, *side)))
        return f"{_short(parameters(plain))} parameters {_short(flops(plain, inputs))} flops"


def _short(number: float) -> str:
    """Three digits, for a line that has to be short.

    >>> _short(950), _short(3074), _short(5.9e9)
    ('950', '3.07k', '5.9G')
    """
    power = next((power for power in range(4) if number < 1000 ** (power + 1)), 4)
    return f"{number / 1000**power:.3g}{('', 'k', 'M', 'G', 'T')[power]}"
