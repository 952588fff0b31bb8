"""A plan carried over to the program of one of its micro-batches, which was captured by itself.

The plan's graph of a micro-batch is derived from that of the whole batch. A program of fewer samples may still differ:
a model may treat a single sample apart in what has no gradient, and an axis of one is no dimension of a reshape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from weft.errors import PlanError
from weft.plan.batches import batch_size
from weft.plan.capture import Captured, capture
from weft.plan.execute.batch import microbatches
from weft.plan.execute.check import misfit
from weft.plan.graph import Graph, Operator
from weft.plan.layout import REPLICATED, Mesh, Split
from weft.plan.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.plan.plan import Plan


def microbatch_of(
    plan: Plan, whole: Captured, model: nn.Module, batch: Any, loss: Any
) -> tuple[Captured, Strategy, tuple[int | None, ...]]:
    """One micro-batch of a plan, captured, with its splits and stages. ``whole`` is of the whole batch; ``batch`` and
    ``loss`` are as they were then. Raises PlanError where they are not."""
    if plan.microbatches == 1:
        return whole, plan.strategy, plan.stage
    if batch is None:
        raise PlanError(
            f"this plan has {plan.microbatches} micro-batches, one of which must be captured: pass batch= as it was "
            "planned with, and loss= if there was one"
        )
    first = microbatches(batch, batch_size(whole.graph), plan.microbatches)[0]
    found = capture(model, first, loss=loss, name=plan.model)
    splits, stage = transferred(plan.graph, plan.splits, plan.stage, found.graph, plan.mesh)
    return found, Strategy(plan.mesh, splits), stage


def transferred(
    planned: Graph, splits: Sequence[Split], stage: Sequence[int], found: Graph, mesh: Mesh
) -> tuple[tuple[Split, ...], tuple[int | None, ...]]:
    """The split and the stage of each operator of ``found``. Operators through which gradients flow must be those of
    the plan in its order, else PlanError; others are found by their names, and have no stage where the plan lacks
    them."""
    ours = [place for place, each in enumerate(found.operators) if _learns(each)]
    theirs = [place for place, each in enumerate(planned.operators) if _learns(each)]
    for own, other in zip(ours, theirs, strict=False):
        _refuse_other(found.operators[own], planned.operators[other])
    if len(ours) != len(theirs):
        raise PlanError(
            f"a micro-batch of '{planned.name}' has {len(ours)} operators with gradients, and the plan {len(theirs)}: "
            "give the batch and the loss that it was planned with"
        )
    pairs = dict(zip(ours, theirs, strict=True))
    named = {(each.name, each.target): place for place, each in enumerate(planned.operators) if not _learns(each)}
    whole: Split = (REPLICATED,) * len(mesh.sizes)
    new: list[Split] = []
    stages: list[int | None] = []
    for place, operator in enumerate(found.operators):
        old = pairs.get(place, named.get((operator.name, operator.target)))
        stages.append(None if old is None else stage[old])
        new.append(whole if old is None else _split(planned.operators[old], operator, splits[old], mesh))
    return tuple(new), tuple(stages)


def _learns(operator: Operator) -> bool:
    return any(tensor.gradient for tensor in operator.outputs)


def _refuse_other(own: Operator, other: Operator) -> None:
    if own.target != other.target:
        raise PlanError(
            f"a micro-batch runs '{own.name}' ({own.target}) where the plan has '{other.name}' ({other.target}): "
            "give the batch and the loss that it was planned with"
        )


def _split(old: Operator, new: Operator, split: Split, mesh: Mesh) -> Split:
    """The split of the same axes; a mesh axis that cannot cut them is left out."""
    if [dim.name for dim in old.dims] != [dim.name for dim in new.dims]:
        split = tuple(_dim(old, new, place) if place >= 0 else place for place in split)
    for axis in reversed(range(len(split))):
        if misfit(new, split, mesh) is None:
            break
        split = (*split[:axis], REPLICATED, *split[axis + 1 :])
    return split


def _dim(old: Operator, new: Operator, place: int) -> int:
    """The dimension that cuts the same axis of a tensor."""
    before = (*old.outputs, *(read.tensor for read in old.reads))
    after = (*new.outputs, *(read.tensor for read in new.reads))
    for mine, other in zip(before, after, strict=False):
        if place in mine.dims and len(mine.dims) == len(other.dims):
            found = other.dims[mine.dims.index(place)]
            if found is not None:
                return found
    return REPLICATED
