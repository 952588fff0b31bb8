"""When the inputs of a stage's operations were made, and when they arrived."""

from __future__ import annotations

import numpy as np

from weft.serve.pipeline.columns import Numbers
from weft.serve.pipeline.spans import Traced

F, B, W, E = (ord(letter) for letter in "FBWE")


class Inputs:
    """When the inputs of operations were made and when they arrived."""

    def __init__(self, traced: Traced) -> None:
        self._stages, self._last = traced.stages, len(traced.stages) - 1

    def of(self, stage: int) -> tuple[Numbers, Numbers]:
        """Of every operation of a stage; the first stage's own were always there, and what is not known is NaN."""
        ops, received = self._stages[stage].ops, self._stages[stage].received
        made = np.full(len(ops), np.nan)
        arrived = np.full(len(ops), np.nan)
        for kind in (F, B, W, E):
            own = ops.kind == kind
            if not own.any():
                continue
            if kind in (F, E) and stage == 0:
                made[own] = arrived[own] = -np.inf
                continue
            home, of = stage - 1 if kind in (F, E) else stage, B if kind == W else kind
            if kind == B:
                home, of = (stage, F) if stage == self._last else (stage + 1, B)
            source, n = self._stages[home].ops, ops.microbatch[own]
            ends = _looked_up(source.microbatch, source.end, source.kind == of, n)
            came = _looked_up(received["microbatch"], received["time"], received["kind"] == kind, n)
            came = np.where(np.isnan(came), ends, came)
            arrived[own], made[own] = came, np.fmin(ends, came)
        return made, arrived


def _looked_up(keys: Numbers, values: Numbers, among: Numbers, wanted: Numbers) -> Numbers:
    """For each wanted key the last value that it has, or NaN."""
    keys, values = keys[among], values[among]
    if not len(keys):
        return np.full(len(wanted), np.nan)
    order = np.argsort(keys, kind="stable")
    keys, values = keys[order], values[order]
    at = np.searchsorted(keys, wanted, side="right") - 1
    return np.where((at >= 0) & (keys[at] == wanted), values[at], np.nan)
