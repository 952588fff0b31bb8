"""What a trial takes of a GPU while it is judged, before anything runs: an evaluation beside weights and optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.errors import WeftError
from weft.plan.memory.estimate import Estimate, estimate
from weft.plan.memory.tape import Tape
from weft.tune.complete import example, shaped
from weft.tune.evaluation import judged, scores
from weft.tune.pools import reserved_apart
from weft.tune.segments import expandable
from weft.tune.setting import Setting

_log = logging.getLogger("weft.tune")
_last: list[tuple[Setting, str, Judging | None]] = []
"""The newest, since a candidate is looked at in several ways that are judged alike."""


class Judging:
    """Bytes by the samples of a micro-batch; no batch is larger than what a trial is judged by."""

    def __init__(self, found: Estimate, most: int) -> None:
        self._found, self._most = found, most

    def at(self, samples: int) -> int:
        return self._at(samples).reserved

    def apart(self, samples: int) -> int:
        """Where steps are captured, with which judging shares a pool of memory."""
        one = self._at(samples)
        return reserved_apart(*one.tape(one.batch))

    def fits(self, samples: int, room: int) -> bool:
        return room > 0 and self._at(samples).fits(room, context=False)

    def largest(self, most: int, room: int) -> int:
        """The largest number of samples, up to ``most``, that fits."""
        if not most or self.fits(most, room):
            return most
        least = 0
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if self.fits(middle, room) else (least, middle)
        return least

    def _at(self, samples: int) -> Estimate:
        return self._found.at(min(samples, self._most))


def judging(
    setting: Setting, optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer], device: str
) -> Judging | None:
    """None where it cannot be traced: what fails then, fails when it runs."""
    if not _last or _last[0][0] is not setting or _last[0][1] != device:
        _last[:] = [(setting, device, _traced(setting, optimizer, device))]
    return _last[0][2]


def left_by_backwards(tape: Tape) -> int:
    """Bytes that libraries keep for the thread of backwards: they lie there while a trial is judged, too."""
    phase, kept = 0, dict[int, int]()
    for event in tape.order:
        block = abs(event) - 1
        if event == 0:
            phase += 1
        elif event < 0:
            kept.pop(block, None)
        elif tape.phases[phase] == "backward" and tape.parts[block] == "workspaces":
            kept[block] = tape.sizes[block]
    return sum(kept.values())


def _traced(setting: Setting, optimizer: Any, device: str) -> Judging | None:
    validation = setting.data().validation
    most = setting.batch_size if validation is None else min(setting.batch_size, len(validation))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        with torch.no_grad(), judged(model), setting.autocast(torch.device("cpu")):
            scores(setting).add(model(*setting.enter(batch)), batch)
        # An update, for the state that lies there the next time; with no more gradients than training has at once.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    try:
        found = estimate(
            shaped(setting), example(setting, most), optimizer=optimizer, step=step, device=device,
            expandable=expandable(),
        )  # fmt: skip
    except WeftError as problem:
        _log.info("judging trials like %s is not estimated: %s", dict(setting.params), problem)
        return None
    return Judging(found, most)
