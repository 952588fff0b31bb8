"""Which trials can be fused: those of one shape, whose step runs under torch.func's vmap, found by trying it."""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.errors import TuneError
from weft.nn.fake import clear_polluted_caches
from weft.tune.fusion.stacked_model import build_tracked, shared_template, why_not_shared, why_not_stackable
from weft.tune.fusion.vmap import DROPOUT_PLACEHOLDER, BatchedForward, CannotFuse, DropoutCall, record_calls
from weft.tune.recipe import CONTINUOUS, TrialConfig
from weft.utils.rng import get_rng_state, restored, torch_seeded

log = logging.getLogger("weft.tune")
_TRIALS, _SAMPLES = 2, 2
_HOST_DRAWS = "its model draws from Python's or NumPy's generator, where fused trials could not draw each its own"
_tried: dict[tuple[Any, ...], str | None] = {}
_logged: set[tuple[Any, ...]] = set()
_functions: dict[int, Any] = {}
"""Functions by identity, kept alive: several may share a name, as lambdas do."""


def fusion_key(config: TrialConfig) -> str | None:
    """Equal for trials that can train as one; None, with the reason in the log, for one that cannot be fused.

    Forwards are traced on fake tensors, which what a model keeps in a global variable may hold on to: not for a process
    that trains.
    """
    with clear_polluted_caches(config.model, config.loss):
        shape = outline(config)
        which = (shape, id(config.model), id(config.loss))
        _functions.update({id(config.model): config.model, id(config.loss): config.loss})
        if which not in _tried:
            _tried[which] = why_not(config)
            if _tried[which]:
                log.info("trials like %s are not fused: %s", dict(config.params), _tried[which])
        if _tried[which]:
            return None
        try:
            read = _read(config)
        except Exception as problem:
            log.info("trial %s is not fused: %s", dict(config.params), _first_line(problem))
            return None
    own = {name: config.params[name] for name in sorted(read - {"dropout"})}
    if own and which not in _logged:
        _logged.add(which)
        names = ", ".join(f"'{name}'" for name in own)
        log.info("trials like %s are not fused with others whose %s is not the same", dict(config.params), names)
    return _digest(shape + repr(own))


def why_not(config: TrialConfig) -> str | None:
    """Why trials of this shape cannot be fused, or None: found with two trials of two samples, on fake tensors."""
    if why := why_not_stackable(config.optimizer):
        return why
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fake tensors give warnings that are of no use here
            return _try(config)
    except TuneError:
        raise
    except Exception as problem:
        return _first_line(problem)


def outline(config: TrialConfig) -> str:
    """A digest of all that must be equal and that the trial's configuration says; the model is not built."""
    options: Mapping[str, Any] = {n: v for n, v in config.optimizer.describe().items() if n not in CONTINUOUS}
    facts = {
        "params": {name: value for name, value in sorted(config.params.items()) if name not in CONTINUOUS},
        "model": _name(config.model),
        "loss": _name(config.loss),
        "metrics": {name: _name(metric) for name, metric in config.metrics.items()},
        "objectives": config.objectives,
        "inputs": config.model_inputs,
        "steps": config.steps,
        "batch": config.batch_size,
        "optimizer": {name: str(value) for name, value in sorted(options.items())},
        "schedule": _name(config.lr_schedule),
        "precision": config.precision,
        "dropout": config.dropout is None,
        "every": (config.report_every, config.checkpoint_every),
    }
    return _digest(json.dumps(facts, sort_keys=True, default=str))


def _read(config: TrialConfig) -> set[str]:
    """The choices that this trial's model depends on. CannotFuse if it uses the dropout beyond its dropouts."""
    with _fake(), torch_seeded(config.seed, "init"):
        _, read = shared_template(config)
    if config.dropout is None:
        return read
    with _fake(), torch_seeded(config.seed, "init"):
        read |= build_tracked(config)[1]
    if "dropout" in read and not _only_drops(config):
        raise CannotFuse("its model uses 'dropout' for more than the rate of its dropouts")
    return read


def _only_drops(config: TrialConfig) -> bool:
    """Whether the loss is the same at the trial's rate and at the one that stands for it, if nothing is dropped."""
    assert config.dropout is not None
    batch = config.data().train.take(np.arange(_SAMPLES))
    losses = []
    for rate in (DROPOUT_PLACEHOLDER, config.dropout):
        with torch_seeded(config.seed, "init"), torch.no_grad(), record_calls([]):
            module = shared_template(config, rate)[0]
            losses += [config.loss(module.train(mode)(*config.enter(batch)), batch) for mode in (True, False)]
    return all(torch.equal(one, other) for one, other in zip(losses[:2], losses[2:], strict=True))


def _try(config: TrialConfig) -> str | None:
    batch = {name: value.cpu() for name, value in config.data().train.take(np.arange(_SAMPLES)).items()}
    state = get_rng_state()
    with _fake() as fake, torch_seeded(config.seed, "init"), restored(state):
        if "seed" in config.params:  # fused trials share all of a module but its weights
            config.model(config.params)
        module = shared_template(config)[0].train()
        if why := why_not_shared(module):
            return why
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        if len({p.dtype for p in trained.values()}) != 1:
            return "its weights are of several types, or there are none to train"
        rest = [*module.named_parameters(), *module.named_buffers()]
        tensors = {n: torch.stack([tensor.detach()] * _TRIALS) for n, tensor in rest}
        stacked = {n: tensors.pop(n).requires_grad_() for n in trained}
        batches = {n: fake.from_tensor(value).expand(_TRIALS, *value.shape) for n, value in batch.items()}
        forward = BatchedForward(config, module, torch.device("cpu"))

        def ones(calls: Sequence[DropoutCall]) -> list[Tensor]:
            return [torch.ones(_TRIALS, *call.shape, dtype=call.dtype) for call in calls]

        losses = forward.losses(stacked, tensors, batches, ones)
        gradients = torch.autograd.grad(losses.sum(), list(stacked.values()), allow_unused=True)
        if get_rng_state() != state:
            return _HOST_DRAWS
    unused = [name for name, gradient in zip(stacked, gradients, strict=True) if gradient is None]
    return f"'{unused[0]}' gets no gradient" if unused else None


def _fake() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def _first_line(problem: Exception) -> str:
    first = next(iter(str(problem).strip().splitlines()), "")
    return first if isinstance(problem, CannotFuse) else f"{type(problem).__name__}: {first}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"
