"""Validation that flows: batches that are only scored go through the stages between two micro-batches of training.

Nothing is drained for it. What goes before micro-batch n sees of every layer the version that the forward of n sees,
so the scores belong to the law of the run and not to its timing. Such batches are counted over the run:

    ... n-2  n-1  [ E0 E1 E2 ... ]  n  n+1 ...        the next ones, E3 and so on, go before n + every * m

The last stage scores them, and word of it goes back to the first, which lets no more than a few be under way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.data import Batch
from weft.errors import TrainError
from weft.pipeline.evaluate import Scores
from weft.pipeline.law import Loss, Metric, Outputs
from weft.pipeline.scheduler import FORWARDS, Kind
from weft.pipeline.statistics import running_norms
from weft.pipeline.weights import Weights
from weft.space import Subnet
from weft.supernet import Carry, Chain, Layer, side_inputs

SCORED = "scored"
"""The gate that counts batches of which word has come back."""

EVALUATED = "evaluated"
"""The gate that counts batches that are through on a stage."""


@dataclass(frozen=True, slots=True)
class Flow:
    """When batches flow: ``picks`` subnets with ``batches`` each, every ``span`` micro-batches, before the last."""

    span: int
    picks: int
    batches: int
    total: int

    @property
    def size(self) -> int:
        """Batches before one micro-batch."""
        return self.picks * self.batches

    def due(self, n: int) -> range:
        """Those that go before micro-batch n."""
        if n == 0 or n % self.span or n >= self.total:
            return range(0)
        return range((n // self.span - 1) * self.size, n // self.span * self.size)

    def before(self, n: int) -> int:
        """How many have gone when the forward of micro-batch n begins."""
        return min(n, self.total - 1) // self.span * self.size

    def at(self, number: int) -> int:
        """The micro-batch that a batch goes before."""
        return (number // self.size + 1) * self.span


class Evaluation:
    """What flows through one stage: the picks by name, their batches, and on the last stage the scores."""

    def __init__(
        self,
        flow: Flow,
        picks: Mapping[str, Subnet],
        batch: Callable[[int], Batch],
        loss: Loss | None,
        metrics: Mapping[str, Metric] | None,
        ahead: int = 8,
    ) -> None:
        self.flow, self.ahead = flow, ahead
        self._picks = list(picks.items())
        self._batch, self._loss, self._metrics = batch, loss, metrics
        self._scores: Scores | None = None
        self.found: list[tuple[int, str, Subnet, dict[str, float]]] = []
        """On the first stage: micro-batch, pick, subnet and scores; whoever keeps them takes them out."""

    def subnet(self, number: int) -> Subnet:
        return self._pick(number)[1]

    def batch(self, number: int) -> Batch:
        return self._batch(number % self.flow.batches)

    def gates(self, kind: Kind, n: int, first: bool) -> Sequence[tuple[Hashable, int]]:
        """They keep their order among themselves and with forwards; the first stage is not too far ahead."""
        if kind == "F":
            return [(EVALUATED, self.flow.before(n))]
        own: list[tuple[Hashable, int]] = [(EVALUATED, n), (FORWARDS, self.flow.at(n))]
        return [*own, (SCORED, n + 1 - self.ahead)] if first else own

    def score(self, number: int, outputs: Outputs) -> str:
        """For the last stage; the means, as text, when the outputs are a pick's last ones."""
        if number % self.flow.batches == 0:
            self._scores = Scores(self._loss, self._metrics)
        assert self._scores is not None
        self._scores.add(outputs, self.batch(number))
        return json.dumps(self._scores.means()) if (number + 1) % self.flow.batches == 0 else ""

    def heard(self, number: int, note: str) -> None:
        """For the first stage: what the last one says."""
        if note:
            scores = {str(name): float(value) for name, value in json.loads(note).items()}
            self.found.append((self.flow.at(number), *self._pick(number), scores))

    def _pick(self, number: int) -> tuple[str, Subnet]:
        return self._picks[number % self.flow.size // self.flow.batches]


def check_flow(chain: Chain) -> None:
    """Raises TrainError for layers whose evaluation reads what training folds into their buffers."""
    for name in chain.layers:
        if running_norms(chain.module(name)):
            raise TrainError(
                f"layer '{name}' has norms with running statistics, which belong to no one version of the weights: "
                "validate without flow, which drains the pipeline"
            )


def through(
    weights: Mapping[str, Weights], layers: Sequence[Layer], n: int, carry: Carry, batch: Batch, subnet: Subnet
) -> Carry:
    """The layers in evaluation mode, under the versions that the forward of micro-batch n sees."""
    with torch.no_grad():
        for layer in layers:
            own = weights[layer.name]
            own.module.eval()
            try:
                carry = own.run(own.at(own.clock.forward_reads(n)), carry, side_inputs(layer, batch, subnet))
            finally:
                own.module.train()
    return carry
