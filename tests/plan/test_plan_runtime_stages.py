"""Plans with stages and micro-batches on real processes: loss, gradients and weights are those of one device."""

from __future__ import annotations

import copy
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing import start_processes
from torch.nn import functional

from weft.errors import PlanError
from weft.plan import Plan
from weft.plan.capture import CapturedModel, capture
from weft.plan.graph import INPUT, PARAMETER, Dim, Graph, Operator, Read
from weft.plan.graph import Tensor as Shape
from weft.plan.planner import plan_captured
from weft.plan.runtime import ParallelModule, StepOptions, parallelize
from weft.plan.runtime.apply import transfer_splits
from weft.plan.runtime.module import StageOp, one_forward_one_backward
from weft.plan.runtime.program import ValueRef, split_batch
from weft.plan.runtime.redistribute import MeshCollectives, ReshardAfterForward
from weft.plan.runtime.stages import StageEdge, StageSection, stage_sections
from weft.plan.sharding import REPLICATED, Mesh, OpSplit, ShardingStrategy, splits
from weft.utils.rng import generator

SEED, ROWS = 5, 8


class Perceptron(nn.Module):
    """Every layer's result is read again by the last: values skip stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(5)])
        self.head, self.scale = nn.Linear(8, 4), nn.Parameter(torch.tensor(1.5))
        self.frozen, self.unused_devices = nn.Parameter(torch.linspace(0.5, 2, 4), requires_grad=False), nn.Linear(2, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        seen = [x]
        for layer in self.layers:
            seen.append(torch.tanh(layer(seen[-1])) * self.scale)
        return functional.cross_entropy(self.head(torch.stack(seen).sum(0)) * self.frozen, y)


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.before, self.after, self.dropout = nn.LayerNorm(width), nn.LayerNorm(width), dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (t.view(b, s, 4, -1).transpose(1, 2) for t in self.qkv(self.before(x)).split(d, -1))
        seen = functional.scaled_dot_product_attention(q, k, v, mask, dropout_p=self.dropout)
        x = x + self.out(seen.transpose(1, 2).reshape(b, s, d))
        return x + functional.dropout(self.narrow(functional.gelu(self.wide(self.after(x)))), self.dropout)


class Text(nn.Module):
    """A transformer whose embedding is its output layer too, with a mask that every block reads."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(16, 16), nn.Parameter(torch.randn(6, 16) * 0.1)
        self.blocks, self.norm = nn.ModuleList([Block(16, dropout) for _ in range(2)]), nn.LayerNorm(16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x) + self.place
        mask = torch.ones(6, 6, dtype=torch.bool).tril() & (x != 3)[:, None, None, :] | torch.eye(6, dtype=torch.bool)
        for block in self.blocks:
            h = block(h, mask)
        scores = self.norm(h) @ self.embed.weight.t()
        return functional.cross_entropy(scores.flatten(0, 1), y.flatten())


class Pictures(nn.Module):
    """Batch normalisation in training, and a mask with no gradient that comes from what has one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.other = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=0.3)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = functional.relu(self.norm(self.first(x)))
        high = h > 0.5
        h = functional.relu(self.other(self.second(h))).masked_fill(high, 0.1)
        return functional.cross_entropy(self.head((h * high).mean((2, 3))), y, label_smoothing=0.1)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 16, "vocab_size": 64}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**size, **still, bos_token_id=0, eos_token_id=0))


def _words() -> dict[str, Any]:
    words = [torch.randint(0, 64, (ROWS, 8)) for _ in range(2)]
    return {"input_ids": words[0], "labels": words[1], "use_cache": False}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "perceptron": (Perceptron, lambda: (torch.randn(ROWS, 8), torch.randint(0, 4, (ROWS,)))),
    "text": (Text, lambda: (torch.randint(0, 16, (ROWS, 6)), torch.randint(0, 16, (ROWS, 6)))),
    "dropping": (lambda: Text(0.2), lambda: (torch.randint(0, 16, (ROWS, 6)), torch.randint(0, 16, (ROWS, 6)))),
    "pictures": (Pictures, lambda: (torch.randn(ROWS, 4, 8, 8), torch.randint(0, 4, (ROWS,)))),
    "gpt2": (gpt2, _words),
}
APART = ("dropping", "pictures")  # of which a batch is not the sum of its micro-batches


@dataclass(frozen=True)
class Case:
    """A model and its batch, and what one device makes of them: loss, gradients, and the state after a step."""

    model: nn.Module
    batch: Any
    loss: Tensor
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]


@cache
def made(name: str) -> tuple[nn.Module, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    build, make = MODELS[name]
    return build().train(), make()


@cache
def whole(name: str) -> CapturedModel:
    model, batch = made(name)
    return capture(model, batch)


@cache
def case(name: str, count: int = 1) -> Case:
    """One device with the whole batch; or, where that is something else, with micro-batches one after the other."""
    model, batch = made(name)
    single = copy.deepcopy(model)
    torch.manual_seed(SEED)
    total = torch.zeros(())
    for part in split_batch(batch, ROWS, count):
        out = single(**part) if isinstance(part, dict) else single(*part)
        loss = out if isinstance(out, Tensor) else out.loss
        (loss / count).backward()
        total = total + loss.detach() / count
    gradients = {key: None if value.grad is None else value.grad.clone() for key, value in single.named_parameters()}
    optimizer(single).step()
    return Case(model, batch, total, gradients, single.state_dict())


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


@cache
def planned(name: str, stages: int, count: int, mesh: tuple[int, ...]) -> Plan:
    devices = stages * Mesh(mesh).devices
    return plan_captured(
        whole(name),
        "cpu",
        devices=devices,
        stages=stages,
        microbatches=count,
        mesh=mesh,
        recompute=False,
        compare=False,
    )


def resplit(plan: Plan, how: str) -> Plan:
    """The plan with other splits: along the batch, or any at random."""
    numbers = generator(how, plan.model, str(plan.mesh), plan.stages)
    found: list[OpSplit] = []
    for operator in plan.graph.operators:
        allowed = list(splits(operator, plan.mesh))
        wanted = (_rows(operator),) * len(plan.mesh.sizes)
        if how == "random":
            found.append(allowed[int(numbers.integers(len(allowed)))])
        else:
            found.append(wanted if wanted in allowed else allowed[0])
    return replace(plan, splits=tuple(found))


def _rows(operator: Operator) -> int:
    tensors = [read.tensor for read in operator.reads if read.tensor.shape[:1] not in ((), (1,))]
    if operator.target.startswith(("aten.embedding", "aten.addmm")):
        tensors = tensors[1:]
    return REPLICATED if not tensors or tensors[0].dims[0] is None else tensors[0].dims[0]


@cache
def micro(name: str, count: int) -> CapturedModel:
    """One of so many micro-batches, captured once for all plans."""
    model, batch = made(name)
    return whole(name) if count == 1 else capture(model, split_batch(batch, ROWS, count)[0])


def ready(name: str, plan: Plan) -> tuple[CapturedModel, ShardingStrategy, tuple[int | None, ...]]:
    """What a plan's processes run, as ``microbatch_of`` gives it."""
    found = micro(name, plan.microbatches)
    moved, stage = transfer_splits(plan.graph, plan.splits, plan.stage, found.graph, plan.mesh)
    return found, ShardingStrategy(plan.mesh, moved), stage


def same(told: str, found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda text: f"{told}: {text}")


def check(module: ParallelModule, expected: Case, told: str) -> None:
    """A step, compared with one device in every element; then a step of the optimizer."""
    steps = optimizer(module)
    torch.manual_seed(SEED)
    loss = module.step(expected.batch)
    same(f"{told}: loss", loss, expected.loss)
    held = dict(module.named_parameters())
    for key, value in held.items():
        wanted = expected.gradients[key]
        assert (value.grad is None) == (wanted is None), f"{told}: {key}"
        if wanted is not None and value.grad is not None:
            assert isinstance(value.grad, DTensor)
            same(f"{told}: gradient of {key}", module.full_tensor(value.grad), wanted)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, sorted(held))
    assert {key for keys in every for key in keys} == set(expected.gradients), told
    steps.step()
    state = module.full_state_dict()
    assert state.keys() == expected.state.keys()
    for key, value in state.items():
        same(f"{told}: {key} after a step", value.float(), expected.state[key].float())


def on_processes(count: int, store: Path, work: Callable[..., None]) -> None:
    """Runs a function on so many processes, which find each other through a file."""
    start_processes(_begin, (count, str(store / "store"), work), nprocs=count, start_method="fork")


def _begin(rank: int, count: int, store: str, work: Callable[[int], None]) -> None:
    torch.set_num_threads(1)
    patience = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=patience)
    try:
        work(rank)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("stages", "count", "mesh"),
    [
        *(pytest.param(*case, marks=pytest.mark.long) for case in [(2, 4, (2,)), (4, 4, (1,))]),
        (2, 4, (1,)),
        (1, 2, (2,)),
        (3, 1, (1,)),
    ],
    ids=str,
)
def test_stages_and_micro_batches_give_what_one_device_gives(
    tmp_path: Path, stages: int, count: int, mesh: tuple[int, ...]
) -> None:
    cases = []
    for name in MODELS:
        plan = planned(name, stages, count, mesh)
        assert (plan.stages, plan.microbatches, plan.unsupported()) == (stages, count, [])
        plans = {"planned": plan}
        if mesh != (1,):
            plans |= {how: resplit(plan, how) for how in ("rows", "random")}
        for told, each in plans.items():
            cases.append((f"{name}, {told}", count, case(name, count if name in APART else 1), ready(name, each)))

    def work(rank: int) -> None:
        for told, count, expected, (captured, strategy, stage) in cases:
            check(parallelize(captured, strategy, stage, StepOptions(count), weights=expected.model), expected, told)

    on_processes(stages * Mesh(mesh).devices, tmp_path, work)


def test_micro_batches_of_one_sample_run_though_their_program_is_another(tmp_path: Path) -> None:
    plan = resplit(planned("gpt2", 2, ROWS, (2,)), "random")
    captured, strategy, stage = ready("gpt2", plan)
    assert [each.name for each in captured.graph.operators] != [each.name for each in plan.graph.operators]
    assert any(each is None for each in stage) or len(captured.graph) < len(plan.graph)
    cut = sum(any(place >= 0 for place in split) for split in strategy.splits)
    assert cut > len(captured.graph) // 4  # most splits are carried over
    expected = case("gpt2")
    on_processes(
        4,
        tmp_path,
        lambda rank: check(
            parallelize(captured, strategy, stage, StepOptions(ROWS), weights=expected.model), expected, "one by one"
        ),
    )


def squared(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (output - batch[0]).square().mean()


class Plain(nn.Module):
    """Without a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layers(x) + y


@cache
def plain() -> tuple[nn.Module, tuple[Tensor, Tensor], CapturedModel]:
    torch.manual_seed(1)
    model, batch = Plain(), (torch.randn(ROWS, 8), torch.randn(ROWS, 8))
    return model, batch, capture(model, batch, loss=squared)


def test_a_plan_is_applied_to_a_model_and_trains_it_as_one_device_would(tmp_path: Path) -> None:
    model, batch, captured = plain()
    plan = plan_captured(captured, "cpu", devices=2, stages=2, microbatches=4, compare=False)
    alone = plan_captured(captured, "cpu", devices=1, compare=False)
    single = copy.deepcopy(model)
    steps = torch.optim.AdamW(single.parameters(), lr=0.01)
    losses, norms = [], []
    for _ in range(4):
        steps.zero_grad()
        loss = squared(single(*batch), batch)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(single.parameters(), 0.5))
        steps.step()
        losses.append(loss.detach())

    def work(rank: int) -> None:
        with pytest.raises(PlanError, match="the plan is for 1 processes"):
            alone.apply(model)
        other = init_device_mesh("cpu", (2,))
        with pytest.raises(PlanError, match="2 stages of a mesh of 1, but the devices form one of 2; make one of 2x1"):
            plan.apply(model, other)
        module = plan.apply(model, init_device_mesh("cpu", (2, 1)))
        assert isinstance(module, ParallelModule)
        assert (module.stage, len(module.ops)) == (rank, 8)
        with pytest.raises(PlanError, match=r"call step\(batch\)"):
            module(batch)
        with pytest.raises(PlanError, match=r"argument 0 was captured as torch.float32 of shape \(2, 8\)"):
            module.step((batch[0][:4], batch[1]))
        own = torch.optim.AdamW(module.parameters(), lr=0.01)
        for loss, norm in zip(losses, norms, strict=True):
            same("loss", module.step(batch), loss)
            same("norm", module.clip_grad_norm_(0.5).float(), norm)
            own.step()
        found = module.full_state_dict()
        for key, value in single.state_dict().items():
            same(f"after four steps: {key}", found[key], value)

    on_processes(2, tmp_path, work)


def test_a_plan_of_one_stage_and_one_batch_takes_steps_too_where_a_batch_is_given(tmp_path: Path) -> None:
    model, batch, captured = plain()
    plan = plan_captured(captured, "cpu", devices=1, stages=1, microbatches=1, compare=False)
    single = copy.deepcopy(model)
    expected = squared(single(*batch), batch)
    expected.backward()

    def work(rank: int) -> None:
        module = plan.apply(model)
        assert isinstance(module, ParallelModule)
        same("loss", module.step(batch), expected.detach())
        for key, value in single.named_parameters():
            assert value.grad is not None
            same(key, module.full_tensor(module.get_parameter(key).grad), value.grad)

    on_processes(1, tmp_path, work)


def test_the_rest_of_what_a_model_in_stages_does(tmp_path: Path) -> None:
    plan = resplit(planned("text", 2, 4, (2,)), "rows")
    captured, strategy, stage = ready("text", plan)
    drops, dropping = ready("dropping", resplit(planned("dropping", 2, 4, (2,)), "random")), case("dropping", 4)
    expected = case("text")

    def shared_weights_stay_equal(rank: int) -> None:
        other = copy.deepcopy(expected.model)
        with torch.no_grad():
            for value in other.parameters():
                value.add_(rank)
        module = parallelize(captured, strategy, stage, StepOptions(4), weights=other)
        steps = torch.optim.AdamW(module.parameters(), lr=0.1)
        weight: Any = module.get_parameter("embed.weight")
        every = [torch.empty_like(weight.to_local()) for _ in range(4)]
        for number in range(3):
            dist.all_gather(every, weight.detach().to_local())
            assert all(each.equal(every[0]) for each in every)
            if number == 0:
                assert every[0].equal(expected.model.get_parameter("embed.weight"))
            module.step(expected.batch)
            steps.step()

    def gradients_are_clipped_by_the_norm_of_all_stages(rank: int) -> None:
        gradients = [value for value in expected.gradients.values() if value is not None]
        norm = torch.linalg.vector_norm(torch.cat([value.flatten() for value in gradients]))
        for limit in (float(norm) / 4, float(norm) * 4):
            module = parallelize(captured, strategy, stage, StepOptions(4), weights=expected.model)
            module.step(expected.batch)
            same("norm", module.clip_grad_norm_(limit).float(), norm)
            for key, value in module.named_parameters():
                wanted = expected.gradients[key]
                assert wanted is not None
                same(f"clipped: {key}", module.full_tensor(value.grad), wanted * min(1, limit / float(norm)))

    def gradients_travel_once_a_step(rank: int) -> None:
        module = parallelize(captured, strategy, stage, StepOptions(4), weights=expected.model)
        asked: list[int] = []
        before = MeshCollectives._all_reduce
        MeshCollectives._all_reduce = lambda self, tensor, axis: (
            asked.append(tensor.numel()),
            before(self, tensor, axis),
        )[1]  # type: ignore[method-assign]
        try:
            module.step(expected.batch)
        finally:
            MeshCollectives._all_reduce = before  # type: ignore[method-assign]
        sizes = Counter(value.numel() for value in module.parameters())
        if module.stage == 0:
            assert Counter(asked) == sizes
        else:  # the loss of each micro-batch is added up, and its labels are counted
            assert Counter(asked)[1] == 8
            assert Counter(asked) - Counter({1: 8}) <= sizes

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
        check(parallelize(*drops, StepOptions(4, recompute=True), weights=dropping.model), dropping, "recomputed")

    def refusals(rank: int) -> None:
        module = parallelize(*drops, StepOptions(4), weights=dropping.model)
        torch.manual_seed(rank)
        with pytest.raises(PlanError, match="generators differ: seed torch alike"):
            module.step(dropping.batch)
        one = planned("text", 2, 4, (1,))
        with pytest.raises(PlanError, match=r"for 2 processes \(2 stages of a mesh of 1\), and there are 4"):
            parallelize(*ready("text", one), StepOptions(4), weights=expected.model)
        # The first stage is told another cut than the second.
        moved = list(stage)
        if rank < 2:
            border = max(
                place for place, each in enumerate(stage) if each == 0 and captured.graph.operators[place].reads
            )
            moved[border] = 1
        with pytest.raises(PlanError, match=r"do not agree on what they send|was lost"):
            parallelize(captured, strategy, moved, StepOptions(4), weights=expected.model, timeout=10)

    def work(rank: int) -> None:
        shared_weights_stay_equal(rank)
        gradients_are_clipped_by_the_norm_of_all_stages(rank)
        gradients_travel_once_a_step(rank)
        layers_are_computed_again(rank)
        refusals(rank)

    on_processes(4, tmp_path, work)


@pytest.mark.parametrize("way", ["gone", "stuck"])
def test_a_lost_process_is_told_and_not_waited_for_for_ever(tmp_path: Path, way: str) -> None:
    plan = planned("perceptron", 2, 4, (1,))
    captured, strategy, stage = ready("perceptron", plan)
    expected = case("perceptron")

    def work(rank: int) -> None:
        module = parallelize(captured, strategy, stage, StepOptions(4), weights=expected.model, timeout=3)
        module.step(expected.batch)
        if rank == 1:
            if way == "gone":
                os._exit(0)
            while not (tmp_path / "told").exists():
                time.sleep(0.05)
            return
        with pytest.raises(PlanError, match=r"at 0B0 another process of the plan was lost, or did not answer in time"):
            module.step(expected.batch)
        (tmp_path / "told").touch()

    on_processes(2, tmp_path, work)


def test_a_plan_that_cannot_be_run_says_why() -> None:
    class Silent(Plain):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.layers(x)

    batch = (torch.randn(ROWS, 8), torch.randn(ROWS, 8))
    plan = plan_captured(capture(Silent(), batch), "cpu", devices=2, stages=2, microbatches=2, compare=False)
    assert plan.unsupported()[0].startswith("'Silent' returns no loss, which micro-batches and stages need")
    with pytest.raises(PlanError, match="'Silent' returns no loss"):
        plan.apply(Silent())
    with pytest.raises(PlanError, match="a batch of 8 is not 3 equal micro-batches"):
        split_batch(batch, ROWS, 3)


def test_a_batch_is_cut_where_it_has_rows_and_given_whole_elsewhere() -> None:
    rows, table = torch.arange(6).view(6, 1), torch.arange(4)
    parts = split_batch({"rows": rows, "table": table, "flag": True}, 6, 3)
    assert [part["rows"].flatten().tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]  # type: ignore[index, call-overload]
    assert all(part["table"] is table and part["flag"] is True for part in parts)  # type: ignore[index, call-overload]
    assert [part.flatten().tolist() for part in split_batch(rows, 6, 2)] == [[0, 1, 2], [3, 4, 5]]  # type: ignore[union-attr]
    assert [len(part) for part in split_batch((rows, None), 6, 2)] == [2, 2]


def test_a_schedule_drawn_by_hand() -> None:
    assert [" ".join(map(str, one_forward_one_backward(stage, 3, 4))) for stage in range(3)] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    assert " ".join(map(str, one_forward_one_backward(0, 4, 1))) == "0F0 0B0"
    with pytest.raises(PlanError, match="no such schedule"):
        one_forward_one_backward(2, 2, 1)


@given(st.integers(1, 6), st.integers(1, 9))
def test_a_schedule_never_stops_holds_no_more_than_it_may_and_is_as_short_as_can_be(stages: int, count: int) -> None:
    orders = [list(one_forward_one_backward(stage, stages, count)) for stage in range(stages)]
    for stage, ops in enumerate(orders):
        assert sorted(ops) == sorted(StageOp(stage, kind, number) for kind in "FB" for number in range(count))  # type: ignore[arg-type]
        flying = most = 0
        for op in ops:
            flying += 1 if op.kind == "F" else -1
            most = max(most, flying)
        assert most == min(count, stages - stage)
    done: set[StageOp] = set()
    ticks = 0
    while any(orders):
        ready = [ops[0] for ops in orders if ops and _needs(ops[0], stages) <= done]
        assert ready
        for op in ready:
            orders[op.stage].pop(0)
        done.update(ready)
        ticks += 1
    assert ticks == 2 * (count + stages - 1)


def _needs(op: StageOp, stages: int) -> set[StageOp]:
    if op.kind == "F":
        return {StageOp(op.stage - 1, "F", op.microbatch)} if op.stage else set()
    own = StageOp(op.stage, "F", op.microbatch)
    return {own, StageOp(op.stage + 1, "B", op.microbatch)} if op.stage + 1 < stages else {own}


def node(name: str, *sources: int, gradient: bool = True, kind: str = "x") -> Operator:
    reads = tuple(Read(source, 0, Shape((2,), 4, (0,))) for source in sources)
    return Operator(name, kind, name, (Dim.free("n", 2),), reads, (Shape((2,), 4, (0,), gradient),))


def drawn() -> tuple[Graph, tuple[int | None, ...]]:
    """A weight that the first and the last of three stages read, a mask that all read, a value that skips a stage, and
    a sign of what has a gradient, which two stages read."""
    operators = (
        node("weight", kind=PARAMETER),
        node("input", kind=INPUT, gradient=False),
        node("mask", 1, gradient=False),
        node("first", 0, 2),
        node("sign", 3, gradient=False),
        node("second", 3, 2, 4),
        node("idle", 5),
        node("last", 0, 5, 3, 2, 4),
    )
    return Graph("drawn", operators), (0, 0, 0, 0, 2, 1, 1, 2)


def test_sections_drawn_by_hand() -> None:
    graph, stage = drawn()
    found = stage_sections(graph, stage, range(2, 8), [ValueRef(7, 0)], {})
    first, second = ValueRef(3, 0), ValueRef(5, 0)
    sign = StageEdge(ValueRef(4, 0), 1, 2, False)  # computed where it is first read, and not where the plan has it
    up = [StageEdge(first, 0, 1, True), StageEdge(first, 0, 2, True), StageEdge(second, 1, 2, True)]
    assert found == (
        StageSection(frozenset({2, 3}), frozenset({0, 1}), (), (), tuple(up[:2])),
        StageSection(frozenset({2, 4, 5}), frozenset({1}), (), (up[0],), (sign, up[2])),
        StageSection(frozenset({2, 7}), frozenset({0, 1}), (ValueRef(7, 0),), (up[1], sign, up[2]), ()),
    )
    at_random = stage_sections(graph, stage, range(2, 8), [ValueRef(7, 0)], {}, random={2})
    assert [2 in each.operators for each in at_random] == [True, False, False]
    with pytest.raises(PlanError, match="operator 'sign' of stage 0 reads 'first' of stage 1, which comes later"):
        stage_sections(graph, (0, 0, 0, 1, 1, 0, 1, 2), range(2, 8), [ValueRef(7, 0)], {})


def test_a_buffer_changes_in_the_one_stage_that_reads_it() -> None:
    operators = (
        node("count", kind="constant", gradient=False),
        node("weight", kind=PARAMETER),
        node("next", 0, gradient=False),
        node("first", 0, 1),
        node("last", 3),
    )
    graph = Graph("counting", operators)
    found = stage_sections(graph, (0, 0, 1, 0, 1), range(2, 5), [ValueRef(4, 0)], {})
    assert [each.leaves for each in found] == [{0, 1}, set()]
    one = stage_sections(graph, (0, 0, 0, 0, 1), range(2, 5), [ValueRef(4, 0)], {0: ValueRef(2, 0)})
    assert [each.ends for each in one] == [(ValueRef(2, 0),), (ValueRef(4, 0),)]
    with pytest.raises(PlanError, match="buffer 'count' changes in stage 1 and is read in stage 0"):
        stage_sections(graph, (0, 0, 1, 0, 1), range(2, 5), [ValueRef(4, 0)], {0: ValueRef(2, 0)})


@given(st.data())
def test_every_stage_has_what_it_reads_and_nothing_with_a_gradient_is_computed_twice(data: st.DataObject) -> None:
    leaves = data.draw(st.integers(1, 4))
    count = data.draw(st.integers(leaves + 1, 16))
    learns = [data.draw(st.booleans()) for _ in range(count)]
    operators = []
    for place in range(count):
        sources = data.draw(st.lists(st.integers(0, place - 1), min_size=1, max_size=3)) if place >= leaves else []
        operators.append(node(f"n{place}", *sources, gradient=learns[place] or place == count - 1))
    last = data.draw(st.integers(0, 3))
    cuts = sorted(data.draw(st.lists(st.integers(0, last), min_size=count - leaves, max_size=count - leaves)))
    stage = [0] * leaves + cuts
    stage[-1] = last
    graph = Graph("any", tuple(operators))
    found = stage_sections(graph, stage, range(leaves, count), [ValueRef(count - 1, 0)], {})
    assert len(found) == last + 1
    for number, section in enumerate(found):
        came = {each.value.source for each in section.receives}
        for place in section.operators:
            for read in operators[place].reads:
                assert read.source in section.operators | section.leaves | came
        for each in section.receives:
            assert each.source < each.target == number
            assert each.value.source in found[each.source].operators
            assert each in found[each.source].sends
    computed = [place for section in found for place in section.operators if operators[place].outputs[0].gradient]
    assert len(computed) == len(set(computed))
    assert count - 1 in found[last].operators


def test_splits_follow_the_axes_of_a_program_with_other_dimensions() -> None:
    def reshape(dims: tuple[str, ...], of: tuple[int | None, ...], shape: tuple[int, ...]) -> Graph:
        made = tuple(Dim.free(name, 4) for name in dims)
        read = Read(0, 0, Shape(shape, 4, of))
        out = Shape(shape, 4, of)
        return Graph("g", (node("p", kind=PARAMETER), Operator("v", "view", "reshape", made, (read,), (out,))))

    before, after = reshape(("a", "b", "c"), (0, 1, 2), (4, 4, 4)), reshape(("b", "c"), (None, 0, 1), (1, 4, 4))
    mesh = Mesh((2, 2))
    assert transfer_splits(before, [(0, -1), (2, 1)], (0, 1), after, mesh) == (((0, -1), (1, 0)), (0, 1))
    assert transfer_splits(before, [(-1, -1), (0, 2)], (0, 1), after, mesh) == (((-1, -1), (-1, 1)), (0, 1))
    other = Graph("g", (before.operators[0], replace(before.operators[1], target="permute")))
    with pytest.raises(PlanError, match=r"a micro-batch runs 'v' \(reshape\) where the plan has 'v' \(permute\)"):
        transfer_splits(other, [(-1, -1)] * 2, (0, 1), before, mesh)
