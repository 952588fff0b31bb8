"""The optimizer of a trial, which trains all its weights at once."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from weft.pipeline.optimizer import Updater


class Whole(Updater):
    """Updates every parameter that holds a gradient, in one call while all of them always do."""

    _uneven = False
    """Whether a parameter may have less state than others, which fused kernels do not take together."""

    def step(self, factor: float) -> None:
        """One update at ``factor`` times the base learning rate; no parameter has a gradient afterwards."""
        given = [(p, p.grad) for p in self.parameters.values() if p.grad is not None]
        self._uneven = self._uneven or len(given) < len(self.parameters)
        if self._uneven:
            self.apply([p for p, _ in given], [gradient for _, gradient in given], factor)
            return
        for optimizer, rates in zip(self._optimizers, self._base, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad()

    def load(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        super().load(states)
        self._uneven = any(not states.get(name) for name in self.parameters)
