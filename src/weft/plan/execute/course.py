"""What one process computes of a micro-batch: from what it holds and is given, over its stage's steps, to what it
gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.plan.execute.calling import Calling
from weft.plan.execute.exchange import Parcel
from weft.plan.execute.late import Late
from weft.plan.execute.outline import Outline
from weft.plan.execute.reading import Reading, Value
from weft.plan.execute.recipe import Recipe, recipe, settled
from weft.plan.execute.sections import Crossing
from weft.plan.execute.spans import Span, spans
from weft.plan.execute.weights import Weights
from weft.plan.layout import REPLICATED, Layout, local_shape
from weft.plan.strategy import Strategy
from weft.plan.tables import layer_of


@dataclass(frozen=True, slots=True)
class Course:
    """The steps in spans, less those that are taken once a step, and what comes from and goes to other stages."""

    recipe: Recipe
    late: Late
    spans: tuple[Span, ...]
    receives: tuple[Parcel, ...]
    sends: tuple[Parcel, ...]
    loss: torch.dtype

    @classmethod
    def of(
        cls,
        reading: Reading,
        strategy: Strategy,
        outline: Outline,
        stage: int,
        calling: Calling,
        weights: Weights,
        recompute: bool,
    ) -> Course:
        graph, section = reading.graph, outline.sections[stage]
        whole: Layout = (REPLICATED,) * len(strategy.mesh.sizes)
        laid = settled(reading, strategy, {each.value for each in (*section.receives, *section.sends)})
        # A buffer's next value is wanted whole where it is made, and is sent so.
        laid.update({value: whole for value in outline.changes.values() if value in laid})
        given = {
            **weights.layouts,
            **{each.value: whole for each in calling.inputs if each.value.source in section.leaves},
            **{each.value: laid[each.value] for each in section.receives},
        }
        sent = {each.value: None for each in section.sends}
        ends = tuple({**dict.fromkeys(section.ends), **sent})
        lying = frozenset(sent) - frozenset(section.ends)
        made = recipe(reading, strategy, given, ends, lying, section.operators)
        late = Late.of(made, {made.given[value]: name for value, name in weights.parameters.items()})
        layers = {each.name: layer_of(each.module) for each in graph.operators} if recompute else None
        dtypes = _dtypes(reading)

        def parcel(each: Crossing) -> Parcel:
            tensor = graph.operators[each.value.source].outputs[each.value.output]
            return Parcel(each, local_shape(tensor.shape, laid[each.value], strategy.mesh), dtypes[each.value])

        return cls(
            made,
            late,
            spans(made, late.others(made), layers),
            tuple(parcel(each) for each in section.receives),
            tuple(parcel(each) for each in section.sends),
            dtypes[outline.loss],
        )


def _dtypes(reading: Reading) -> dict[Value, torch.dtype]:
    return {
        reading.value(node.name): node.meta["val"].dtype
        for node in reading.captured.nodes.nodes
        if node.name in reading.captured.values and isinstance(node.meta.get("val"), torch.Tensor)
    }
