"""Which trials can be fused: those of one shape, whose step runs under torch.func's vmap, found by trying it."""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.engine.rng import get_rng_state, restored
from weft.errors import TuneError
from weft.nn.fake import clear_polluted_caches
from weft.tune.fusion.attributes import UNKNOWN, attributes, difference
from weft.tune.fusion.dropout import DROPOUT_PLACEHOLDER, record_calls
from weft.tune.fusion.optimizers import refused
from weft.tune.fusion.stacked_model import template, unfit
from weft.tune.fusion.vmap import Batched, CannotFuse
from weft.tune.recipe import CONTINUOUS, TrialConfig
from weft.utils.rng import torch_seeded

log = logging.getLogger("weft.tune")
_LANES, _SAMPLES = 2, 2
_OTHER = 0.25
"""A dropout other than the one that stands for a lane's own."""
_BY_DROPOUT = "'{}' of its model goes by the dropout, and lanes share it"
_tried: dict[tuple[Any, ...], str | None] = {}
_first: dict[tuple[Any, ...], dict[str, str]] = {}
_parted: set[tuple[Any, ...]] = set()


def shape_key(setting: TrialConfig) -> str | None:
    """Equal for trials that can train as one; None, with the reason in the log, for one that cannot be fused.

    Forwards are traced on fake tensors, which what a model keeps in a global variable may hold on to: not for a process
    that trains.
    """
    with clear_polluted_caches(setting.model, setting.loss):
        return _key(setting)


def _key(setting: TrialConfig) -> str | None:
    told = outline(setting)
    which = (told, _identity(setting.model), _identity(setting.loss))  # functions may go by one name, as lambdas do
    if which not in _tried:
        _tried[which] = why_not(setting)
        if _tried[which]:
            log.info("trials like %s are not fused: %s", dict(setting.params), _tried[which])
    if _tried[which]:
        return None
    try:
        shared, name = _shared(setting)
    except Exception as problem:
        log.info("trial %s is not fused: %s", dict(setting.params), _said(problem))
        return None
    if name is not None:
        log.info("trial %s is not fused: %s", dict(setting.params), _BY_DROPOUT.format(name))
        return None
    first = _first.setdefault(which, shared)
    if (name := difference(first, shared, None)) is not None and which not in _parted:
        _parted.add(which)
        log.info("trials like %s are not fused with others whose '%s' is not the same", dict(setting.params), name)
    return told + _digest("\n".join(f"{name}={text}" for name, text in sorted(shared.items())))


def why_not(setting: TrialConfig) -> str | None:
    """Why trials of this shape cannot be fused, or None: found with two lanes of two samples, on fake tensors."""
    if why := refused(setting.optimizer):
        return why
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fake tensors warn of what nobody here does
            return _tried_out(setting)
    except TuneError:
        raise
    except Exception as problem:
        return _said(problem)


def _shared(setting: TrialConfig) -> tuple[dict[str, str], str | None]:
    """The attributes of the module that lanes share, and the name of one that is otherwise in the trial's own."""
    found = []
    for build in (partial(template, setting), setting.bare)[: 1 if setting.dropout is None else 2]:
        with _fake(), torch_seeded(setting.seed, "init"):
            told = attributes(build())
        if any(UNKNOWN in text for text in told.values()):
            with torch_seeded(setting.seed, "init"):
                told = attributes(build())
        found.append(told)
    return found[0], difference(found[0], found[-1], setting.dropout)


def _rated(setting: TrialConfig) -> str | None:
    """Why an attribute that holds the dropout is not only what masks are drawn by; None if all are."""
    with _fake():
        holding = [name for name, text in attributes(template(setting)).items() if repr(DROPOUT_PLACEHOLDER) in text]
    if not holding:
        return None
    batch = setting.data().train.take(np.arange(_SAMPLES))
    losses = []
    for rate in (DROPOUT_PLACEHOLDER, _OTHER):
        with torch_seeded(setting.seed, "init"), torch.no_grad(), record_calls([]):
            module = template(setting, rate)
            losses += [setting.loss(module.train(mode)(*setting.enter(batch)), batch) for mode in (True, False)]
    same = all(torch.equal(one, other) for one, other in zip(losses[:2], losses[2:], strict=True))
    return None if same else _BY_DROPOUT.format(holding[0])


def _tried_out(setting: TrialConfig) -> str | None:
    batch = {name: value.cpu() for name, value in setting.data().train.take(np.arange(_SAMPLES)).items()}
    stand = get_rng_state()
    with _fake() as fake, torch_seeded(setting.seed, "init"), restored(stand):
        if "seed" in setting.params:  # lanes share all of a module but its weights
            setting.model(setting.params)
        module = template(setting).train()
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        if len({p.dtype for p in trained.values()}) != 1:
            return "its weights are of several types, or there are none to train"
        stacked = {n: _stacked(p).requires_grad_() for n, p in trained.items()}
        rest = [*module.named_parameters(), *module.named_buffers()]
        fixed = {n: _stacked(t) for n, t in rest if n not in trained}
        lanes = {n: fake.from_tensor(value).expand(_LANES, *value.shape) for n, value in batch.items()}
        batched = Batched(setting, module, torch.device("cpu"))
        losses = batched.losses(stacked, fixed, lanes, lambda draws: [_ones(draw) for draw in draws])
        gradients = torch.autograd.grad(losses.sum(), list(stacked.values()), allow_unused=True)
        if get_rng_state() != stand:
            return "its model draws from Python's or NumPy's generator, where lanes could not draw each its own"
    unused = [name for name, gradient in zip(stacked, gradients, strict=True) if gradient is None]
    if unused:
        return f"'{unused[0]}' gets no gradient"
    return unfit(module) or _rated(setting)


def _fake() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def _said(problem: Exception) -> str:
    first = next(iter(str(problem).strip().splitlines()), "")
    return first if isinstance(problem, CannotFuse) else f"{type(problem).__name__}: {first}"


def _stacked(tensor: Tensor) -> Tensor:
    return torch.stack([tensor.detach()] * _LANES)


def _ones(draw: Any) -> Tensor:
    return torch.ones(_LANES, *draw.shape, dtype=draw.dtype)


def outline(setting: TrialConfig) -> str:
    """All that must be equal and is said by the setting itself, as text; the model is not looked into."""
    options: Mapping[str, Any] = {n: v for n, v in setting.optimizer.describe().items() if n not in CONTINUOUS}
    told = {
        "params": {name: value for name, value in sorted(setting.params.items()) if name not in CONTINUOUS},
        "model": _name(setting.model),
        "loss": _name(setting.loss),
        "metrics": {name: _name(metric) for name, metric in setting.metrics.items()},
        "objectives": setting.objectives,
        "inputs": setting.model_inputs,
        "steps": setting.steps,
        "batch": setting.batch_size,
        "optimizer": {name: str(value) for name, value in sorted(options.items())},
        "schedule": _name(setting.lr_schedule),
        "precision": setting.precision,
        "dropout": setting.dropout is None,
        "every": (setting.report_every, setting.checkpoint_every),
    }
    return _digest(json.dumps(told, sort_keys=True, default=str))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def _identity(function: Any) -> Any:
    """Something that is equal only for the same function, and keeps it from being mistaken for a later one."""
    try:
        hash(function)
    except TypeError:
        return _Same(function)
    return function


class _Same:
    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._thing is self._thing

    def __hash__(self) -> int:
        return id(self._thing)
