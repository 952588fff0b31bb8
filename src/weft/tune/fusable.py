"""Which trials can be fused: those of one shape, whose step runs under torch.func's vmap, found by trying it."""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.errors import TuneError
from weft.keys import torch_seeded
from weft.tune.batched import Batched
from weft.tune.lanes import template
from weft.tune.lanewise import refused
from weft.tune.recipe import CONTINUOUS
from weft.tune.setting import Setting

log = logging.getLogger("weft.tune")
_LANES, _SAMPLES = 2, 2
_tried: dict[tuple[Any, ...], str | None] = {}


def shape_key(setting: Setting) -> str | None:
    """Equal for trials that can train as one; None, with the reason in the log, for one that cannot be fused."""
    told = _told(setting)
    which = (told, _identity(setting.model), _identity(setting.loss))  # functions may go by one name, as lambdas do
    if which not in _tried:
        _tried[which] = why_not(setting)
        if _tried[which]:
            log.info("trials like %s are not fused: %s", dict(setting.params), _tried[which])
    return None if _tried[which] else told


def why_not(setting: Setting) -> str | None:
    """Why trials of this shape cannot be fused, or None: found with two lanes of two samples, on fake tensors."""
    if problem := refused(setting.optimizer):
        return problem
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fake tensors warn of what nobody here does
            return _tried_out(setting)
    except TuneError:
        raise
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem).strip() else ''}"


def _tried_out(setting: Setting) -> str | None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    batch = {name: value.cpu() for name, value in setting.data().train.take(np.arange(_SAMPLES)).items()}
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch_seeded(setting.seed, "init"):
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
    unused = [name for name, gradient in zip(stacked, gradients, strict=True) if gradient is None]
    return f"'{unused[0]}' gets no gradient" if unused else None


def _stacked(tensor: Tensor) -> Tensor:
    return torch.stack([tensor.detach()] * _LANES)


def _ones(draw: Any) -> Tensor:
    return torch.ones(_LANES, *draw.shape, dtype=draw.dtype)


def _told(setting: Setting) -> str:
    """All that must be equal, as text."""
    options: Mapping[str, Any] = {n: v for n, v in setting.optimizer.describe().items() if n not in CONTINUOUS}
    told = {
        "params": {name: value for name, value in sorted(setting.params.items()) if name not in CONTINUOUS},
        "model": _name(setting.model),
        "loss": _name(setting.loss),
        "metrics": {name: _name(metric) for name, metric in setting.metrics.items()},
        "objectives": setting.objectives,
        "inputs": setting.inputs,
        "steps": setting.steps,
        "batch": setting.batch_size,
        "optimizer": {name: str(value) for name, value in sorted(options.items())},
        "schedule": _name(setting.schedule),
        "precision": setting.precision,
        "dropout": setting.dropout is None,
        "every": (setting.report, setting.checkpoint),
    }
    text = json.dumps(told, sort_keys=True, default=str)
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
