"""The captured program under a strategy as a flat list of instructions for one device, in segments to recompute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from weft.plan.graph import parameter_values
from weft.plan.runtime.local_ops import local_kernel
from weft.plan.runtime.program import (
    CapturedProgram,
    Kernel,
    LocalKernel,
    Operand,
    ShardedCall,
    ValueRef,
    leaves,
    replace_leaves,
)
from weft.plan.runtime.random_ops import is_random, whole_draw
from weft.plan.runtime.redistribute import (
    CollectiveSteps,
    MeshCollectives,
    ReshardAfterForward,
    redistribute,
    redistribution_steps,
)
from weft.plan.sharding import REPLICATED, Mesh, Placements, ShardingStrategy, result_placements, without_partials


@dataclass(frozen=True, slots=True)
class Register:
    """Holds a value while it is needed."""

    number: int


@dataclass(frozen=True, slots=True)
class Redistribute:
    """Brings a value to the placements that readers want: one target for each of their gradients' placements. With
    ``reshard``, what the backward needs of it is redistributed once more instead of being kept."""

    source: int
    steps: CollectiveSteps
    grad_steps: tuple[CollectiveSteps, ...]
    targets: tuple[int, ...]
    reshard: bool = False
    frees: tuple[int, ...] = ()

    @property
    def reads(self) -> Iterable[int]:
        return (self.source,)

    @property
    def writes(self) -> Iterable[int]:
        return self.targets

    def run(self, registers: list[Any], collectives: MeshCollectives) -> None:
        for target, value in zip(
            self.targets, redistribute(registers[self.source], collectives, self.steps, self.grad_steps), strict=True
        ):
            registers[target] = value


@dataclass(frozen=True, slots=True)
class Compute:
    """Computes this device's part of an operator; ``targets`` says where each output that is read goes."""

    name: str
    compute: Kernel
    args: list[Any]
    kwargs: dict[str, Any]
    targets: tuple[tuple[int, int], ...]
    frees: tuple[int, ...] = ()

    @property
    def reads(self) -> Iterable[int]:
        return [register.number for register in leaves([self.args, self.kwargs], Register)]

    @property
    def writes(self) -> Iterable[int]:
        return [register for _, register in self.targets]

    def run(self, registers: list[Any], collectives: MeshCollectives) -> None:
        given = [self.args, self.kwargs]
        args, kwargs = replace_leaves(given, Register, lambda register: registers[register.number])
        out = self.compute(collectives, args, kwargs)
        several = isinstance(out, (tuple, list))
        for output, target in self.targets:
            registers[target] = out[output] if several else out


Instruction = Redistribute | Compute


@dataclass(frozen=True, slots=True)
class LocalProgram:
    """The instructions, and the registers of the values that are there before the first and after the last."""

    registers: int
    instructions: tuple[Instruction, ...]
    inputs: Mapping[ValueRef, int]
    results: Mapping[ValueRef, int]
    random: bool
    reshards: bool  # whether an instruction does


def lower(
    captured: CapturedProgram,
    strategy: ShardingStrategy,
    inputs: Mapping[ValueRef, Placements],
    results: Sequence[ValueRef],
    keep_sharded: Collection[ValueRef] = (),
    only: Collection[int] | None = None,
) -> LocalProgram:
    """The instructions from the inputs, whose placements are given, to the results: those in ``keep_sharded`` are split
    or whole as they come out (never partial sums), all others whole on every device. With ``only``, these operators
    alone are computed; of the others, the random ones are drawn and thrown away, so that the generator goes on as if
    they were. Of a parameter that is gathered, or a view or cast of one, this device's part alone is kept for the
    backward."""
    mesh = strategy.mesh
    whole: Placements = (REPLICATED,) * len(mesh.sizes)
    calls = [(op, captured.call(op, node, strategy.splits[op], mesh)) for op, node in captured.calls()]
    made = [(op, call, local_kernel(call)) for op, call in calls if only is None or op in only]
    placements = dict(inputs)
    for op, call, how in made:
        for output in range(len(call.operator.outputs)):
            found = call.result_placements(output)
            placements[ValueRef(op, output)] = without_partials(found) if output in how.whole else found
    requested: _Requests = defaultdict(dict)
    for _, call, how in made:
        for operand in leaves([how.args, how.kwargs], Operand):
            wanted, gradient = _operand_request(call, operand)
            requested[operand.value, wanted][gradient] = None
    ends = {value: without_partials(placements[value]) if value in keep_sharded else whole for value in results}
    for value, wanted in ends.items():
        requested[value, wanted][wanted] = None
    lowering = _Lowering(mesh, placements, requested, parameter_values(captured.graph))
    begin = {value: lowering.register(value) for value in inputs}
    ours = {op: (call, how) for op, call, how in made}
    for op, call in calls:
        if op in ours:
            lowering.compute(op, *ours[op])
        elif is_random(call):
            lowering.instructions.append(Compute(f"{call.operator.name} elsewhere", whole_draw(call), [], {}, ()))
    final = {value: lowering.fetch(value, wanted, wanted) for value, wanted in ends.items()}
    instructions = _with_frees(lowering.instructions, frozenset(final.values()))
    random = any(is_random(call) for _, call in calls)
    reshards = any(isinstance(each, Redistribute) and each.reshard for each in instructions)
    return LocalProgram(lowering.count, instructions, begin, final, random, reshards)


def _operand_request(call: ShardedCall, operand: Operand) -> tuple[Placements, Placements]:
    return call.operand_placements(operand), result_placements(operand.tensor, call.split)


# A value as it is read -> the placements of its gradients, in the order of its readers.
_Requests = dict[tuple[ValueRef, Placements], dict[Placements, None]]


@dataclass(slots=True)
class _Lowering:
    """Lays out the instructions in order; a redistribution is made once, just before its first reader."""

    mesh: Mesh
    placements: Mapping[ValueRef, Placements]
    requested: _Requests
    reshard: frozenset[int]
    instructions: list[Instruction] = field(default_factory=list)
    count: int = 0
    _registers: dict[ValueRef, int] = field(default_factory=dict)
    _fetched: dict[tuple[ValueRef, Placements], dict[Placements, int]] = field(default_factory=dict)

    def register(self, value: ValueRef) -> int:
        if value not in self._registers:
            self._registers[value] = self._new()
        return self._registers[value]

    def fetch(self, value: ValueRef, wanted: Placements, gradient: Placements) -> int:
        """The register of a value as a reader wants it."""
        key = (value, wanted)
        if key not in self._fetched:
            held = self.placements[value]
            # The gradient of a partial sum is that of the sum: whole where the value is partial.
            grad_target = without_partials(held)
            steps = redistribution_steps(held, wanted, self.mesh)
            grad_steps = {each: redistribution_steps(each, grad_target, self.mesh) for each in self.requested[key]}
            if not steps and not any(grad_steps.values()):
                self._fetched[key] = dict.fromkeys(grad_steps, self.register(value))
            else:
                targets = {each: self._new() for each in grad_steps}
                made = Redistribute(
                    self.register(value),
                    steps,
                    tuple(grad_steps.values()),
                    tuple(targets.values()),
                    bool(steps) and value.source in self.reshard,
                )
                self.instructions.append(made)
                self._fetched[key] = targets
        return self._fetched[key][gradient]

    def compute(self, op: int, call: ShardedCall, how: LocalKernel) -> None:
        def register(operand: Operand) -> Register:
            return Register(self.fetch(operand.value, *_operand_request(call, operand)))

        args, kwargs = replace_leaves(how.args, Operand, register), replace_leaves(how.kwargs, Operand, register)
        targets = tuple((output, self.register(ValueRef(op, output))) for output in sorted(call.used_outputs))
        self.instructions.append(Compute(call.operator.name, how.run, args, kwargs, targets))

    def _new(self) -> int:
        self.count += 1
        return self.count - 1


def _with_frees(instructions: Sequence[Instruction], kept: frozenset[int]) -> tuple[Instruction, ...]:
    """The instructions, each with the registers that nobody reads after it."""
    out: list[Instruction] = []
    later = set(kept)
    for instruction in reversed(instructions):
        done = sorted({register for register in (*instruction.reads, *instruction.writes) if register not in later})
        later.update(done)
        out.append(replace(instruction, frees=tuple(done)))
    return tuple(reversed(out))


@dataclass(frozen=True, slots=True)
class Segment:
    """Instructions that follow each other: the registers that they read from before, and those that are read after."""

    instructions: tuple[Instruction, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    recompute: bool  # whether the backward computes them once more

    def run(self, registers: list[Any], collectives: MeshCollectives, resharding: ReshardAfterForward) -> None:
        if not self.recompute or not self.outputs or not torch.is_grad_enabled():
            self._execute(registers, collectives, resharding)
            return

        def alone(*values: Any) -> tuple[Tensor, ...]:
            own: list[Any] = [None] * len(registers)
            for register, value in zip(self.inputs, values, strict=True):
                own[register] = value
            self._execute(own, collectives, None)
            return tuple(own[register] for register in self.outputs)

        results = checkpoint(alone, *(registers[register] for register in self.inputs), use_reentrant=False)
        for register in {register for instruction in self.instructions for register in instruction.frees}:
            registers[register] = None
        for register, value in zip(self.outputs, results, strict=True):
            registers[register] = value

    def _execute(
        self, registers: list[Any], collectives: MeshCollectives, resharding: ReshardAfterForward | None
    ) -> None:
        for instruction in self.instructions:
            instruction.run(registers, collectives)
            if resharding and isinstance(instruction, Redistribute) and instruction.reshard:
                whole, part = registers[instruction.targets[0]], registers[instruction.source]
                resharding.gathered(whole, part, instruction.steps)
            for register in instruction.frees:
                registers[register] = None


def segments(
    program: LocalProgram, instructions: Sequence[Instruction], layers: Mapping[str, str] | None
) -> tuple[Segment, ...]:
    """The instructions in segments: one for each run of a layer's calls, and of those that belong to none. A
    redistribution belongs to the call that it is made for. ``layers``: a call's name -> its layer; without it nothing
    is computed again."""
    name, later = "", frozenset(program.results.values())
    backward = []  # of each instruction: its layer, and the registers that are read after it
    for instruction in reversed(instructions):
        if isinstance(instruction, Compute):
            name = (layers or {}).get(instruction.name, "")
        backward.append((instruction, name, later))
        later = later.union(instruction.reads)
    found = []
    for name, group in groupby(reversed(backward), key=itemgetter(1)):
        members, _, afters = zip(*group, strict=True)
        made: set[int] = set()
        reads: dict[int, None] = {}
        for instruction in members:
            reads.update(dict.fromkeys(register for register in instruction.reads if register not in made))
            made.update(instruction.writes)
        outputs = tuple(sorted(made & afters[-1]))
        found.append(Segment(members, tuple(reads), outputs, bool(name)))
    return tuple(found)
