"""Models under strategies on real processes: results, gradients, buffers and weights are those of one device."""

from __future__ import annotations

import copy
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plan_models import (
    ADDS_UP,
    ROWS,
    SEED,
    Expected,
    Model,
    captured,
    expected,
    forward_backward,
    made,
    on_processes,
    same,
    same_after_a_step,
    same_gradients,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from weft.errors import PlanError
from weft.plan import Plan
from weft.plan.capture import CapturedModel, capture
from weft.plan.graph import PARAMETER, Dim, Operator
from weft.plan.planner import plan_captured
from weft.plan.redistribution import gathered_again, gathered_bytes
from weft.plan.runtime import ParallelModule, StepOptions, parallelize
from weft.plan.runtime.apply import transfer_splits
from weft.plan.runtime.redistribute import Collective, MeshCollectives, ReshardAfterForward
from weft.plan.sharding import REPLICATED, Mesh, OpSplit, ShardingStrategy, operand_placements, splits
from weft.utils.rng import generator

Ready = tuple[CapturedModel, ShardingStrategy, tuple[int | None, ...]]


@cache
def freed(name: str) -> CapturedModel:
    """The captured model, in which rows may be split in losses that weigh their classes, too."""
    found = captured(name)
    operators = [
        replace(each, dims=tuple(Dim.free(dim.name, dim.size) if dim.name[0] == "n" else dim for dim in each.dims))
        if each.kind == "mean_loss"
        else each
        for each in found.graph.operators
    ]
    return replace(found, graph=replace(found.graph, operators=tuple(operators)))


def by_rule(name: str, mesh: Mesh, how: str) -> ShardingStrategy:
    """A split for each operator: that of the rule where it is one, on the mesh axes where it can be."""
    found = []
    for operator in freed(name).graph.operators:
        allowed = set(splits(operator, mesh))
        wanted = STRATEGIES[how](operator, mesh)
        while wanted not in allowed:  # one mesh axis less
            last = max(axis for axis, dim in enumerate(wanted) if dim != REPLICATED)
            wanted = (*wanted[:last], REPLICATED, *wanted[last + 1 :])
        found.append(wanted)
    return ShardingStrategy(mesh, tuple(found))


def batch_dim(operator: Operator) -> int:
    """The dimension of the first axis of what an operator reads first, if it can be split: mostly that of the batch."""
    tensors = [read.tensor for read in operator.reads] if operator.kind != PARAMETER else []
    if operator.target.startswith(("aten.embedding", "aten.addmm")):
        tensors = tensors[1:]
    dims = tensors[0].dims if tensors else ()
    return dims[0] if dims and dims[0] is not None and operator.dims[dims[0]].parts > 1 else REPLICATED


def width_dim(operator: Operator) -> int:
    """As Megatron cuts: products that widen by columns, those that narrow by rows; attention by heads."""
    names = {dim.name: number for number, dim in enumerate(operator.dims) if dim.parts > 1}
    if operator.kind == "matmul" and "n" in names and "k" in names:
        return names["n"] if operator.dims[names["n"]].size >= operator.dims[names["k"]].size else names["k"]
    if operator.kind == "conv":
        return names.get("k", names.get("g", REPLICATED))
    if operator.kind == "attention":
        return names.get("h", REPLICATED)
    if operator.kind == PARAMETER:
        return 0 if operator.dims and operator.dims[0].parts > 1 else REPLICATED
    last = operator.outputs[0].dims[-1] if operator.outputs and operator.outputs[0].dims else None
    return last if last is not None and operator.dims[last].parts > 1 else REPLICATED


def stored(operator: Operator, mesh: Mesh) -> int:
    """As FSDP stores: a parameter in parts along the first axis that can be, all else by rows."""
    if operator.kind != PARAMETER:
        return batch_dim(operator)
    able = [number for number, dim in enumerate(operator.dims) if dim.parts % mesh.devices == 0]
    return able[0] if able else REPLICATED


STRATEGIES: dict[str, Callable[[Operator, Mesh], OpSplit]] = {
    "data parallel": lambda operator, mesh: (batch_dim(operator),) * len(mesh.sizes),
    "fully sharded": lambda operator, mesh: (stored(operator, mesh),) * len(mesh.sizes),
    "tensor parallel": lambda operator, mesh: (width_dim(operator),) * len(mesh.sizes),
    "mixed": lambda operator, mesh: (batch_dim(operator), width_dim(operator)),
}


def at_random(name: str, mesh: Mesh, draw: int) -> ShardingStrategy:
    """Any split of each operator, apart from one draw to the next in how many are split at all."""
    numbers = generator(name, str(mesh), draw)
    found = []
    for operator in freed(name).graph.operators:
        allowed = list(splits(operator, mesh))
        found.append(allowed[int(numbers.integers(len(allowed)))] if numbers.random() > draw % 3 / 4 else allowed[0])
    return ShardingStrategy(mesh, tuple(found))


def strategies(name: str, mesh: Mesh, draws: int) -> Iterator[tuple[str, ShardingStrategy]]:
    for how in ("fully sharded", "mixed" if len(mesh.sizes) == 2 else "tensor parallel"):
        yield how, by_rule(name, mesh, how)
    for draw in range(draws):
        yield f"random {draw}", at_random(name, mesh, draw)


def applied(name: str, strategy: ShardingStrategy, mesh: DeviceMesh) -> ParallelModule:
    return parallelize(freed(name), strategy, mesh=mesh, weights=made(name)[0])


KINDS = ["perceptron", "pictures", "text", "odds"]


@pytest.mark.parametrize(
    ("sizes", "draws", "names"),
    [
        ((2,), 1, KINDS),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [((2,), 3, [*KINDS, "gpt2", "llama"]), ((4,), 1, KINDS), ((2, 2), 3, [*KINDS, "gpt2", "llama"])]
        ),
    ],
    ids=str,
)
def test_every_strategy_gives_what_one_device_gives(
    tmp_path: Path, sizes: tuple[int, ...], draws: int, names: list[str]
) -> None:
    mesh = Mesh(sizes)
    cases = [(f"{n}, {what}", n, expected(n), each) for n in names for what, each in strategies(n, mesh, draws)]

    def work(rank: int) -> None:
        devices = init_device_mesh("cpu", sizes)
        for what, name, wanted, strategy in cases:
            module = applied(name, strategy, devices)
            found = forward_backward(module, wanted.batch)
            for number, (own, whole) in enumerate(zip(found, wanted.results, strict=True)):
                same(f"{what}: result {number}", own.detach(), whole)
            assert [key for key, _ in module.named_parameters()] == list(wanted.gradients), what
            assert all(isinstance(each, DTensor) for each in module.parameters())
            same_gradients(what, module, wanted)
            for key, value in module.named_buffers():
                if key in wanted.buffers:
                    same(f"{what}: buffer {key}", value.float(), wanted.buffers[key].float())
            same_after_a_step(what, module, wanted)

    on_processes(mesh.devices, tmp_path, work)


def planned(name: str, stages: int, count: int, mesh: tuple[int, ...]) -> Plan:
    devices = stages * Mesh(mesh).devices
    given: dict[str, Any] = {"stages": stages, "microbatches": count, "mesh": mesh, "recompute": False}
    return plan_captured(captured(name), "cpu", devices=devices, compare=False, **given)


def resplit(plan: Plan, how: str) -> Plan:
    """The plan with other splits: along the batch, or any at random."""
    numbers = generator(how, plan.model, str(plan.mesh), plan.stages)
    found: list[OpSplit] = []
    for operator in plan.graph.operators:
        allowed = list(splits(operator, plan.mesh))
        wanted = (batch_dim(operator),) * len(plan.mesh.sizes)
        if how == "random":
            found.append(allowed[int(numbers.integers(len(allowed)))])
        else:
            found.append(wanted if wanted in allowed else allowed[0])
    return replace(plan, splits=tuple(found))


def ready(name: str, plan: Plan) -> Ready:
    """What the processes of a plan run, as `program_of` gives it; a micro-batch is captured once for all plans."""
    found = captured(name, plan.microbatches)
    moved, stage = transfer_splits(plan.graph, plan.splits, plan.stage, found.graph, plan.mesh)
    return found, ShardingStrategy(plan.mesh, moved), stage


def check_step(module: ParallelModule, wanted: Expected, what: str) -> None:
    """A step, compared with one device in every element; then a step of the optimizer."""
    torch.manual_seed(SEED)
    same(f"{what}: loss", module.step(wanted.batch), wanted.results[0])
    same_gradients(what, module, wanted)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [key for key, _ in module.named_parameters()])
    assert {key for keys in every for key in keys} == set(wanted.gradients), what
    same_after_a_step(what, module, wanted)


def one_device(name: str, count: int) -> Expected:
    return expected(name, 1 if name in ADDS_UP else count)


@pytest.mark.parametrize(
    ("stages", "count", "mesh", "names"),
    [
        (2, 4, (1,), ["perceptron", "dropping text"]),
        (1, 2, (2,), ["perceptron", "pictures"]),
        (3, 1, (1,), ["plain text"]),
        *(
            pytest.param(*case, [*KINDS[:2], "plain text", "dropping text", "gpt2"], marks=pytest.mark.long)
            for case in [(2, 4, (2,)), (4, 4, (1,))]
        ),
    ],
    ids=str,
)
def test_stages_and_micro_batches_give_what_one_device_gives(
    tmp_path: Path, stages: int, count: int, mesh: tuple[int, ...], names: list[str]
) -> None:
    cases = []
    for name in names:
        plan = planned(name, stages, count, mesh)
        assert (plan.stages, plan.microbatches) == (stages, count)
        plans = {"planned": plan}
        if mesh != (1,):
            plans |= {how: resplit(plan, how) for how in ("rows", "random")}
        for what, each in plans.items():
            cases.append((f"{name}, {what}", one_device(name, count), ready(name, each)))

    def work(rank: int) -> None:
        for what, wanted, program in cases:
            check_step(parallelize(*program, StepOptions(count), weights=wanted.model), wanted, what)

    on_processes(stages * Mesh(mesh).devices, tmp_path, work)


def test_micro_batches_of_one_sample_run_though_their_program_is_another(tmp_path: Path) -> None:
    plan = resplit(planned("gpt2", 1, ROWS, (2,)), "random")
    found, strategy, stage = ready("gpt2", plan)
    assert [each.name for each in found.graph.operators] != [each.name for each in plan.graph.operators]
    assert any(each is None for each in stage) or len(found.graph) < len(plan.graph)
    cut = sum(any(dim >= 0 for dim in split) for split in strategy.splits)
    assert cut > len(found.graph) // 4  # most splits are carried over
    wanted = one_device("gpt2", ROWS)

    def work(rank: int) -> None:
        module = parallelize(found, strategy, stage, StepOptions(ROWS), weights=wanted.model)
        check_step(module, wanted, "one by one")

    on_processes(2, tmp_path, work)


@contextmanager
def counted() -> Iterator[Counter[tuple[Collective, int]]]:
    """The collectives that this process takes part in, by their kinds and how many elements they leave."""
    found, before = Counter[tuple[Collective, int]](), MeshCollectives._run

    def counting(self: MeshCollectives, kind: Collective, taken: Tensor, *given: Any) -> None:
        found[kind, taken.numel()] += 1
        before(self, kind, taken, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeshCollectives, "_run", counting)
        yield found


class Deep(nn.Module):
    """Twelve weights of 4 KiB, each used as it is or through a view, beside activations that are much smaller; perhaps
    under autocast, where what is gathered is a cast of the weight."""

    def __init__(self, autocast: bool) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(32, 32) / 6 for _ in range(12))
        self.autocast = autocast

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            for number, weight in enumerate(self.weights):
                x = torch.tanh(functional.linear(x, weight) if number % 2 else x @ weight.t())
            return x.float().square().mean()


class Gathered:
    """The bytes of gathered tensors that are alive, and the most that ever were at once."""

    alive = peak = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        before = MeshCollectives.move

        def move(collectives: MeshCollectives, tensor: Tensor, steps: Any) -> Tensor:
            moved = before(collectives, tensor, steps)
            if moved.numel() > tensor.numel():
                self.alive += moved.nbytes
                self.peak = max(self.peak, self.alive)
                weakref.finalize(moved.untyped_storage(), self.free, moved.nbytes)
            return moved

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MeshCollectives, "move", move)
            yield

    def free(self, size: int) -> None:
        self.alive -= size


def test_what_is_sent_and_kept_is_what_the_strategy_is_known_for(tmp_path: Path) -> None:
    mesh, name = Mesh((2,)), "perceptron"
    graph, parts = freed(name).graph, by_rule(name, mesh, "fully sharded")
    gathered = {
        (op, number)
        for op, operator in enumerate(graph.operators)
        for number, read in enumerate(operator.reads)
        if graph.operators[read.source].kind == PARAMETER
        and operand_placements(read.tensor, parts.splits[op]) != parts.result(graph, read.source, read.output)
    }
    assert len(gathered) == 9  # as the costs have it
    assert len(gathered & gathered_again(graph, recompute=False)) == 4
    sent = {
        # The loss and its labels are added up, the scores are gathered, and each parameter's gradient is added up.
        "data parallel": ({"all_reduce": 2, "all_gather": 1}, {"all_reduce": 9}),
        # Each of nine parameters that can be cut is gathered, and the gradients of eight that learn are scattered. Four
        # are gathered again for the backward, which needs neither biases nor the first weight.
        "fully sharded": (
            {"all_reduce": 2, "all_gather": 1 + 9},
            {"all_reduce": 1, "all_gather": 4, "reduce_scatter": 8},
        ),
    }
    rows, deep = (torch.randn(4, 32),), []
    for autocast in (False, True):
        model = Deep(autocast)
        program, weight = capture(model, rows), 32 * 32 * (2 if autocast else 4)
        split = tuple(
            next((s for s in splits(o, mesh) if s != (-1,) and (o.kind == PARAMETER or o.outputs[0].shape)), (-1,))
            for o in program.graph.operators
        )
        assert max(gathered_bytes(program.graph, mesh, split, recompute=False)) == 2 * weight
        deep.append((model, program, ShardingStrategy(mesh, split), weight))

    def collectives(rank: int) -> None:
        devices = init_device_mesh("cpu", (2,))
        for what in sent:
            module = applied(name, by_rule(name, mesh, what), devices)
            with counted() as forward:
                loss, scores = module(made(name)[1])
            with counted() as backward:
                (loss * 1.5 + scores.square().mean()).backward()
            by_kind = [Counter(kind for kind, _ in found.elements()) for found in (forward, backward)]
            assert by_kind == list(sent[what]), what

    def weights_are_freed_after_the_forward_and_gathered_one_by_one(rank: int) -> None:
        for (model, program, strategy, weight), recompute in product(deep, (False, True)):
            module = parallelize(program, strategy, options=StepOptions(recompute=recompute), weights=model)
            held = Gathered()
            with held.counted():
                loss = module(rows)
                # One, and the next one; gloo may hold what it has sent a little longer. Kept, they are 12.
                assert weight <= held.peak < 5 * weight
                assert held.alive < 3 * weight
                held.peak = 0
                loss.backward()
                assert weight <= held.peak < 5 * weight
                del loss
                module.step(rows)
                assert held.peak < 5 * weight

    on_processes(2, tmp_path, collectives, weights_are_freed_after_the_forward_and_gathered_one_by_one)


def squared(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (output - batch[0]).square().mean()


def test_a_plan_is_applied_to_a_model_and_trains_it_as_one_device_would(tmp_path: Path) -> None:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8))
    model = Model(lambda model, x, y: model.layers(x) + y, layers=layers)  # without a loss of its own
    batch = torch.randn(ROWS, 8), torch.randn(ROWS, 8)
    found = capture(model, batch, loss=squared)
    plan = plan_captured(found, "cpu", devices=2, stages=2, microbatches=4, compare=False)
    whole = plan_captured(found, "cpu", devices=2, stages=1, microbatches=1, mesh=(2,), compare=False)
    single, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    steps = torch.optim.AdamW(single.parameters(), lr=0.01)
    losses, norms = [], []
    for _ in range(4):
        steps.zero_grad()
        loss = squared(single(*batch), batch)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(single.parameters(), 0.5))
        steps.step()
        losses.append(loss.detach())

    def trains(module: ParallelModule) -> None:
        own = torch.optim.AdamW(module.parameters(), lr=0.01)
        for loss, norm in zip(losses, norms, strict=True):
            same("loss", module.step(batch), loss)
            same("norm", module.clip_grad_norm_(0.5).float(), norm)
            own.step()
        state = module.full_state_dict()
        for key, value in single.state_dict().items():
            same(f"after four steps: {key}", state[key], value)

    def work(rank: int) -> None:
        with pytest.raises(PlanError, match="2 stages of a mesh of 1, but the devices form one of 2; make one of 2x1"):
            plan.apply(model, init_device_mesh("cpu", (2,)))
        module = plan.apply(model, init_device_mesh("cpu", (2, 1)))
        assert (module.stage, len(module.ops)) == (rank, 8)
        with pytest.raises(PlanError, match=r"call step\(batch\)"):
            module(batch)
        for wrong, reason in (
            ((batch[0][:4], batch[1]), r"argument 0 was captured as torch.float32 of shape \(2, 8\)"),
            ((batch[0],), "called with None"),
            ((*batch, batch[0]), "captured without a tensor as argument 2"),
        ):
            with pytest.raises(PlanError, match=reason):
                module.step(wrong)
        trains(module)
        trains(whole.apply(model))
        assert all(value.equal(before[key]) for key, value in model.state_dict().items())

    on_processes(2, tmp_path, work)


def test_what_else_a_module_in_stages_does(tmp_path: Path) -> None:
    captured_part, strategy, stage = ready("plain text", resplit(planned("plain text", 2, 4, (2,)), "rows"))
    drops = ready("dropping text", resplit(planned("dropping text", 2, 4, (2,)), "random"))
    dropping, wanted = expected("dropping text", 4), expected("plain text", 1)
    too_small = ready("plain text", planned("plain text", 2, 4, (1,)))

    def text(weights: nn.Module = wanted.model) -> ParallelModule:
        return parallelize(captured_part, strategy, stage, StepOptions(4), weights=weights)

    def shared_weights_stay_equal(rank: int) -> None:
        other = copy.deepcopy(wanted.model)
        with torch.no_grad():
            for value in other.parameters():
                value.add_(rank)  # the first process has the say
        module = text(other)
        steps = torch.optim.AdamW(module.parameters(), lr=0.1)
        weight: Any = module.get_parameter("embed.weight")
        every = [torch.empty_like(weight.to_local()) for _ in range(4)]
        for number in range(3):
            dist.all_gather(every, weight.detach().to_local())
            assert all(each.equal(every[0]) for each in every)
            assert number or every[0].equal(wanted.model.get_parameter("embed.weight"))
            module.step(wanted.batch)
            steps.step()

    def gradients_are_clipped_by_the_norm_of_all_stages(rank: int) -> None:
        gradients = [value for value in wanted.gradients.values() if value is not None]
        norm = torch.linalg.vector_norm(torch.cat([value.flatten() for value in gradients]))
        for limit in (float(norm) / 4, float(norm) * 4):
            module = text()
            module.step(wanted.batch)
            same("norm", module.clip_grad_norm_(limit).float(), norm)
            for key, value in module.named_parameters():
                whole = wanted.gradients[key]
                assert whole is not None
                same(f"clipped: {key}", module.full_tensor(value.grad), whole * min(1, limit / float(norm)))

    def gradients_travel_once_a_step(rank: int) -> None:
        module = text()
        with counted() as found:
            module.step(wanted.batch)
        asked = Counter(size for kind, size in found.elements() if kind is Collective.ALL_REDUCE)
        sizes = Counter(value.numel() for value in module.parameters())
        if module.stage == 0:
            assert asked == sizes
        else:  # the loss of each micro-batch is added up, and its labels are counted
            assert asked[1] == 8
            assert asked - Counter({1: 8}) <= sizes

    def layers_are_computed_again(rank: int) -> None:
        def kept(again: bool) -> int:
            module, sizes = parallelize(*drops, StepOptions(4, again), weights=dropping.model), []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ReshardAfterForward, "hooks", lambda self: nullcontext())  # ours see every tensor
                with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.nbytes), t)[1], lambda t: t):
                    module.step(dropping.batch)
            return sum(sizes)

        torch.manual_seed(SEED)
        assert kept(True) < kept(False)
        module = parallelize(*drops, StepOptions(4, recompute=True), weights=dropping.model)
        check_step(module, dropping, "recomputed")

    def refusals(rank: int) -> None:
        module = parallelize(*drops, StepOptions(4), weights=dropping.model)
        torch.manual_seed(rank)
        with pytest.raises(PlanError, match="generators differ: seed torch alike"):
            module.step(dropping.batch)
        with pytest.raises(PlanError, match=r"for 2 processes \(2 stages of a mesh of 1\), and there are 4"):
            parallelize(*too_small, StepOptions(4), weights=wanted.model)
        moved = list(stage)  # the first stage is told another cut than the second
        if rank < 2:
            border = max(op for op, own in enumerate(stage) if own == 0 and captured_part.graph.operators[op].reads)
            moved[border] = 1
        with pytest.raises(PlanError, match=r"do not agree on what they send|was lost"):
            parallelize(captured_part, strategy, moved, StepOptions(4), weights=wanted.model, timeout=10)

    on_processes(
        4,
        tmp_path,
        shared_weights_stay_equal,
        gradients_are_clipped_by_the_norm_of_all_stages,
        gradients_travel_once_a_step,
        layers_are_computed_again,
        refusals,
    )


@pytest.mark.parametrize("how", ["gone", "stuck"])
def test_a_lost_process_is_reported_and_not_waited_for_for_ever(tmp_path: Path, how: str) -> None:
    program, wanted = ready("perceptron", planned("perceptron", 2, 4, (1,))), expected("perceptron", 1)

    def work(rank: int) -> None:
        module = parallelize(*program, StepOptions(4), weights=wanted.model, timeout=3)
        module.step(wanted.batch)
        if rank == 1:
            if how == "gone":
                os._exit(0)
            while not (tmp_path / "reported").exists():
                time.sleep(0.05)
            return
        with pytest.raises(PlanError, match=r"at 0B0 another process of the plan was lost, or did not answer in time"):
            module.step(wanted.batch)
        (tmp_path / "reported").touch()

    on_processes(2, tmp_path, work)
