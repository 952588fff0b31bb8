"""What a lane of a fused training takes of a CPU at its peak, before anything runs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Hashable
from contextlib import suppress

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.engine.rng import Seeder
from weft.tune.fit.fit import KNOWN, likeness
from weft.tune.fit.loss_model import example_batch
from weft.tune.fit.peaks import paused
from weft.tune.fusion.stacked_model import StackedModel
from weft.tune.fusion.trainer import FusedStep
from weft.tune.recipe import TrialConfig
from weft.tune.training.cuda_graphs import Gradients
from weft.utils.live_memory import LiveStorages

log = logging.getLogger("weft.tune")
_LANES = 2
_known: dict[Hashable, int | None] = {}


def lane_peak(setting: TrialConfig, micro: int) -> int | None:
    """Bytes of storages that are alive at once, for each lane of a batched step in parts of ``micro`` samples; None,
    with the reason in the log, where it cannot be traced.

    Every lane is taken to have a batch of its own: lanes of one seed share it, and take a little less.
    """
    key = (likeness(setting), micro)
    if key not in _known:
        while len(_known) >= KNOWN:
            del _known[next(iter(_known))]
        try:
            _known[key] = -(-_traced(setting, micro) // _LANES)
        except Exception as problem:
            log.info("lanes like %s are not traced: %s: %s", dict(setting.params), type(problem).__name__, problem)
            _known[key] = None
    return _known[key]


def _traced(setting: TrialConfig, micro: int) -> int:
    """Of the second step of all lanes, since in the first the dropouts of a forward are looked for; or of judging them,
    if that takes more."""
    like, device = (
        example_batch(setting, setting.batch_size),
        torch.device("cpu"),
    )  # out here, where the data set is real
    validation = setting.data().validation
    seeders = [Seeder(setting.seed, device)] * _LANES
    with seeders[0].preserved(), warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        warnings.simplefilter("ignore")  # fake tensors warn of what nobody here does
        lanes = StackedModel([setting] * _LANES, device)
        work = FusedStep(setting, lanes, device, micro)
        batch = {name: torch.empty((_LANES, *part.shape), dtype=part.dtype) for name, part in like.items()}

        def step() -> None:
            gradients: Gradients | None = None
            for given in work.micro_batches(batch, False, seeders, [setting.dropout] * _LANES, 0):
                _, gradients = work.part(given, gradients)
            assert gradients is not None
            assert gradients[0] is not None
            lanes.update(gradients[0], 1.0)

        step()
        with LiveStorages([*lanes.tensors(), *batch.values()]) as live:
            step()
        seen = micro if validation is None else min(micro, len(validation))
        shown = {name: torch.empty((seen, *part.shape[1:]), dtype=part.dtype) for name, part in like.items()}
        beside = batch.values() if paused(setting) else ()
        judging = LiveStorages([*lanes.tensors(), *shown.values(), *beside])
        with judging, suppress(Exception), torch.no_grad():  # what fails then, fails when it runs
            work.batched.outputs(lanes.parameters, lanes.fixed, shown)
    return int(max(live.peak, judging.peak))
