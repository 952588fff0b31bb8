"""Second-order DARTS: the architecture's gradient at the weights that one more training step would give.

With w' = w - rate * (gradient of the training loss), the gradient of L_val(w'(a), a) by the architecture a is

    dL_val(w', a)/da - rate * (dL_train(w+, a)/da - dL_train(w-, a)/da) / (2 e),    w+- = w +- e * dL_val(w', a)/dw'

with e = 0.01 / |dL_val/dw'|, as Liu et al. (2019) compute it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weft.data import Batch
from weft.errors import TrainError
from weft.pipeline import foreach
from weft.pipeline.bilevel import TRAINING, training_part
from weft.pipeline.consistency import Exact
from weft.pipeline.tape import Tape
from weft.space import Subnet
from weft.supernet import side_inputs

if TYPE_CHECKING:
    from weft.pipeline.law import Law
    from weft.pipeline.sequential import Sequential

Found = dict[str, list[Tensor | None]]


def check_unrolled(law: Law, stages: int = 1) -> None:
    """Raises TrainError where the second order is asked for and cannot be had."""
    if law.bilevel is None or law.bilevel.order == 1:
        return
    if stages > 1 or law.microbatches > 1 or any(said != Exact() for said in law.consistency.values()):
        raise TrainError(
            "the second order changes all weights back and forth within a step: it needs one stage, one micro-batch a "
            "step and 'exact' layers. Use the first order, or DrNAS, on several stages"
        )


def look_ahead(run: Sequential, i: int, subnet: Subnet, batch: Batch) -> tuple[Any, Tensor, Found]:
    """Outputs and loss on the held-out part of the batch, and the gradients of the architecture by layer."""
    train = training_part(batch)
    held = {name: value for name, value in batch.items() if not name.startswith(TRAINING)}
    layers = [w for w in run.weights.values() if not w.layer.arch and w.parameters]
    parameters = [p for w in layers for p in w.parameters]

    def gradients(found: Found) -> list[Tensor]:
        own = [g for w in layers for g in found.get(w.layer.name, [None] * len(w.parameters))]
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, own, strict=True)]

    rate = run.updater.rate * run.law.schedule(i, run.law.steps)
    before = [p.detach().clone() for p in parameters]
    _, _, found = _pass(run, i, subnet, train, arch=False, weights=True)
    _move(parameters, before, run.updater.direction(parameters, gradients(found)), -rate)
    outputs, loss, found = _pass(run, i, subnet, held, arch=True, weights=True)
    ahead = gradients(found)
    small = 0.01 / foreach.norm(ahead)
    sides = []
    for sign in (1.0, -1.0):
        _move(parameters, before, ahead, sign * small)
        sides.append(_pass(run, i, subnet, train, arch=True, weights=False)[2])
    foreach.copy_([p.data for p in parameters], before)
    change: Found = {}
    for name, own in found.items():
        if run.weights[name].layer.arch:
            pairs = zip(own, sides[0][name], sides[1][name], strict=True)
            change[name] = [
                None if g is None or up is None or down is None else g - rate * (up - down) / (2 * small)
                for g, up, down in pairs
            ]
    return outputs, loss, change


def _move(
    parameters: Sequence[torch.nn.Parameter], before: list[Tensor], way: list[Tensor], far: float | Tensor
) -> None:
    for parameter, start, step in zip(parameters, before, way, strict=True):
        parameter.data.copy_(start + far * step)


def _pass(
    run: Sequential, i: int, subnet: Subnet, batch: Batch, arch: bool, weights: bool
) -> tuple[Any, Tensor, Found]:
    tape = Tape(i, run.chain.enter(batch))
    with run.precision():
        for layer in run.chain.route(subnet):
            run.seeder.set(i, 0, layer.name)
            trains = arch if layer.arch else weights
            tape.forward(run.weights[layer.name], side_inputs(layer, batch, subnet), trains)
        run.seeder.set(i, 0, "loss")
        outputs, loss = run.law.loss_of(tape.outputs(), batch)
    return outputs, loss, tape.backward((loss,), (torch.ones((), device=loss.device),))
