"""What each stage of a plan computes, which tensors it holds, and which values it receives and sends.

What has no gradient and comes from inputs and constants alone, such as masks and positions, is computed anew in every
stage that reads it. Every other value is computed in one stage and sent straight to each stage that reads it, also over
the stages between.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.errors import PlanError
from weft.plan.graph import Graph, layer_of
from weft.plan.runtime.lowering import LocalProgram, Segment, lower, segments
from weft.plan.runtime.parameters import DeferredGradSync, ModelTensors
from weft.plan.runtime.program import CallSignature, CannotShard, CapturedProgram, ValueRef
from weft.plan.runtime.random_ops import is_random, whole_draw
from weft.plan.sharding import REPLICATED, Placements, ShardingStrategy, local_shape, without_partials


@dataclass(frozen=True, slots=True)
class StageEdge:
    """A value that one stage computes and a later one reads."""

    value: ValueRef
    source: int
    target: int
    gradient: bool


@dataclass(frozen=True, slots=True)
class StageSection:
    """A stage's part of a graph, as indices of operators: those that it computes, and what it holds or is given from
    the start. ``ends`` are values that are wanted for themselves. Edges are in the order in which they are sent."""

    operators: frozenset[int]
    leaves: frozenset[int]
    ends: tuple[ValueRef, ...]
    receives: tuple[StageEdge, ...]
    sends: tuple[StageEdge, ...]


def stage_sections(
    graph: Graph,
    stage: Sequence[int | None],
    calls: Collection[int],
    ends: Sequence[ValueRef],
    updates: Mapping[int, ValueRef],
    random: Collection[int] = (),
) -> tuple[StageSection, ...]:
    """The sections of all stages, which compute the ends and what these need.

    ``stage`` says where an operator is computed, if it matters; ``calls`` are the operators that are computed at all;
    ``updates``: a buffer -> its next value; ``random`` draw at random, so that they are computed once.
    Raises PlanError where an operator would read from a later stage, or a buffer change in another one.
    """
    count = max(each for each in stage if each is not None) + 1
    free = _free(graph, calls, updates, random)
    at = _resolve_stages(graph, stage, calls, free)
    wanted = [*ends, *updates.values()]
    needed = {value.source for value in wanted}
    for op in reversed(range(len(graph))):
        if op in needed:
            needed.update(read.source for read in graph.operators[op].reads)
    stage_of = {value: at[value.source] if value.source in at else stage[value.source] or 0 for value in wanted}
    sections: list[set[int]] = []
    edges: list[StageEdge] = []
    for number in range(count):
        inside = {value.source for value, own in stage_of.items() if own == number}
        inside |= {op for op in calls if op in needed and at.get(op) == number}
        received: set[ValueRef] = set()
        for op in reversed(range(len(graph))):
            for read in graph.operators[op].reads if op in inside and op in calls else ():
                if at.get(read.source, number) != number:
                    received.add(ValueRef(read.source, read.output))
                else:
                    inside.add(read.source)
        sections.append(inside)
        edges += [
            StageEdge(value, at[value.source], number, graph.operators[value.source].outputs[value.output].gradient)
            for value in received
        ]
    edges.sort(key=lambda each: (each.source, each.target, each.value.source, each.value.output))
    for op, value in updates.items():
        sections[stage_of[value]].add(op)
    # What no operator reads stays where the plan has it, so that nothing of the model is lost.
    for op in set(range(len(graph))).difference(calls, *sections):
        sections[stage[op] or 0].add(op)
    for op, value in updates.items():
        own = stage_of[value]
        if others := [number for number, inside in enumerate(sections) if op in inside and number != own]:
            raise PlanError(
                f"buffer '{graph.operators[op].target}' changes in stage {own} and is read in stage {others[0]}: "
                "ask for fewer stages"
            )
    return tuple(
        StageSection(
            frozenset(inside.intersection(calls)),
            frozenset(inside.difference(calls)),
            tuple(value for value, own in stage_of.items() if own == number),
            tuple(each for each in edges if each.target == number),
            tuple(each for each in edges if each.source == number),
        )
        for number, inside in enumerate(sections)
    )


def _free(
    graph: Graph, calls: Collection[int], updates: Mapping[int, ValueRef], random: Collection[int]
) -> frozenset[int]:
    """What every stage can have for itself: no gradient, no draw, and nothing that changes, in all it comes from."""
    free: set[int] = set()
    for op, operator in enumerate(graph.operators):
        if operator.has_gradient or op in random:
            continue
        if all(read.source in free for read in operator.reads) if op in calls else op not in updates:
            free.add(op)
    return frozenset(free)


def _resolve_stages(
    graph: Graph, stage: Sequence[int | None], calls: Collection[int], free: Collection[int]
) -> dict[int, int]:
    """The stage of every operator that is computed once: that of the plan, but without gradient no later than where it
    is first read."""
    last = max(each for each in stage if each is not None)
    at = {op: last if (own := stage[op]) is None else own for op in calls if op not in free}
    for op in reversed(range(len(graph))):
        if op in at:
            for read in graph.operators[op].reads:
                if read.source in at and not graph.operators[read.source].has_gradient:
                    at[read.source] = min(at[read.source], at[op])
    for op in at:
        for read in graph.operators[op].reads:
            if read.source in at and at[read.source] > at[op]:
                raise PlanError(
                    f"operator '{graph.operators[op].name}' of stage {at[op]} reads "
                    f"'{graph.operators[read.source].name}' of stage {at[read.source]}, which comes later: plan anew"
                )
    return at


@dataclass(frozen=True, slots=True)
class StageGraph:
    """The loss of the program if it has one, the buffers that it changes with their next values, and what each stage
    does."""

    loss: ValueRef | None
    changes: dict[str, ValueRef]
    sections: tuple[StageSection, ...]

    @classmethod
    def of(
        cls, program: CapturedProgram, strategy: ShardingStrategy, stage: Sequence[int | None], whole_steps: bool = True
    ) -> StageGraph:
        """Raises PlanError where the stages cannot be run, or for ``whole_steps`` where there is no loss."""
        captured, signature = program.captured, CallSignature.of(program)
        loss = _loss(captured.graph, signature)
        if loss is None and whole_steps:
            raise PlanError(
                f"'{captured.graph.name}' returns no loss, which micro-batches and stages need: plan it with loss=..., "
                "or give it labels"
            )
        changes = {name: program.value(node) for node, name in captured.mutated.items()}
        buffers = {name: program.value(node).source for node, name in captured.buffers.items()}
        random = set()
        calls = set()
        for op, node in program.calls():
            calls.add(op)
            call = program.call(op, node, strategy.splits[op], strategy.mesh)
            if not is_random(call):
                continue
            random.add(op)
            if max(each or 0 for each in stage):
                try:
                    whole_draw(call)
                except CannotShard as problem:
                    message = f"operator '{call.operator.name}' ({call.operator.target}): {problem}"
                    raise PlanError(f"{message}, so other stages cannot keep pace: ask for stages=1") from problem
        updates = {buffers[name]: value for name, value in changes.items()}
        ends = [value for value in signature.outputs if isinstance(value, ValueRef)] if loss is None else [loss]
        return cls(loss, changes, stage_sections(captured.graph, stage, calls, ends, updates, random))


def _loss(graph: Graph, signature: CallSignature) -> ValueRef | None:
    """The first number among the results that a gradient flows through."""
    for value in signature.outputs:
        if isinstance(value, ValueRef):
            tensor = graph.operators[value.source].outputs[value.output]
            if tensor.gradient and tensor.elements == 1:
                return value
    return None


@dataclass(frozen=True, slots=True)
class P2PTensor:
    """One device's part of a value that is sent from stage to stage."""

    edge: StageEdge
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What one process computes of a micro-batch: segments of instructions, less those that are taken once a step, and
    what comes from and goes to other stages."""

    program: LocalProgram
    grad_sync: DeferredGradSync
    segments: tuple[Segment, ...]
    receives: tuple[P2PTensor, ...]
    sends: tuple[P2PTensor, ...]

    @classmethod
    def of(
        cls,
        program: CapturedProgram,
        strategy: ShardingStrategy,
        stage_graph: StageGraph,
        stage: int,
        weights: ModelTensors,
        recompute: bool,
    ) -> StagePlan:
        """One stage's part of whole steps."""
        graph, section = program.graph, stage_graph.sections[stage]
        whole: Placements = (REPLICATED,) * len(strategy.mesh.sizes)
        sent = [each.value for each in section.sends]
        crossing = {*(each.value for each in section.receives), *sent}
        placements = {v: without_partials(strategy.result(graph, v.source, v.output)) for v in crossing}
        # A buffer's next value is wanted whole where it is made, and is sent so.
        placements.update({value: whole for value in stage_graph.changes.values() if value in placements})
        inputs = {
            **weights.placements,
            **{each.value: whole for each in CallSignature.of(program).inputs if each.value.source in section.leaves},
            **{each.value: placements[each.value] for each in section.receives},
        }
        lowered = lower(
            program,
            strategy,
            inputs,
            tuple(dict.fromkeys((*section.ends, *sent))),
            keep_sharded=frozenset(sent) - frozenset(section.ends),
            only=section.operators,
        )
        grad_sync = DeferredGradSync.of(lowered, {lowered.inputs[v]: name for v, name in weights.parameters.items()})
        dtypes = program.dtypes()

        def item(each: StageEdge) -> P2PTensor:
            tensor = graph.operators[each.value.source].outputs[each.value.output]
            return P2PTensor(each, local_shape(tensor.shape, placements[each.value], strategy.mesh), dtypes[each.value])

        return cls(
            lowered,
            grad_sync,
            segments(lowered, grad_sync.others(lowered), _layers(graph) if recompute else None),
            tuple(item(each) for each in section.receives),
            tuple(item(each) for each in section.sends),
        )


def forward_program(
    program: CapturedProgram,
    strategy: ShardingStrategy,
    changes: Mapping[str, ValueRef],
    weights: ModelTensors,
    recompute: bool,
) -> tuple[LocalProgram, tuple[Segment, ...]]:
    """One forward of a single stage, whose results are all whole on every device; autograd moves the gradients to
    where the parameters are stored."""
    signature, whole = CallSignature.of(program), (REPLICATED,) * len(strategy.mesh.sizes)
    lowered = lower(
        program,
        strategy,
        {**weights.placements, **{each.value: whole for each in signature.inputs}},
        (*(value for value in signature.outputs if isinstance(value, ValueRef)), *changes.values()),
    )
    return lowered, segments(lowered, lowered.instructions, _layers(program.graph) if recompute else None)


def _layers(graph: Graph) -> dict[str, str]:
    return {each.name: layer_of(each.module) for each in graph.operators}
