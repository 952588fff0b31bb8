"""Clipping by the norm over all layers: the reference is written down from the definition, with every gradient kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from stages import CPU, Task, in_stages, make_task, sequentially
from torch import Tensor

from weft.engine.consistency import parse_consistency
from weft.engine.grad_exchange import delay_of
from weft.engine.optimizer import GlobalNorm, Optimizer
from weft.engine.reference import SequentialReference
from weft.engine.weight_versions import VersionedLayer
from weft.errors import TrainError


def task_of(consistency: str, *, steps: int = 10, m: int = 1, limit: float = 0.5, **options: object) -> Task:
    return make_task("plain", steps=steps, m=m, consistency=consistency, clip=GlobalNorm(limit), **options)


def norm(tensors: Sequence[Tensor], origin: Sequence[Tensor]) -> float:
    """The distance of the first from the second."""
    return sum(float((a.detach() - b).double().square().sum()) for a, b in zip(tensors, origin, strict=True)) ** 0.5


def test_the_delay_is_the_time_that_a_sum_takes_through_the_virtual_pipeline() -> None:
    assert delay_of([parse_consistency("exact")] * 3) == 0
    assert delay_of([parse_consistency("bounded(4, 3)")]) == 1
    assert delay_of([parse_consistency("bounded(4, 8)")]) == 2
    assert delay_of([parse_consistency("stashed(3, 8)")]) == 3
    for mixed in (["exact", "bounded(4, 3)"], ["lagged(2)"], ["delayed(1)"]):
        with pytest.raises(TrainError, match="one consistency for all layers"):
            delay_of(map(parse_consistency, mixed))


def test_under_exact_it_is_what_torch_does() -> None:
    task = task_of("exact", steps=4, limit=0.05, optimizer=Optimizer("sgd", lr=0.5))
    chain = task.chain()
    ours = SequentialReference(task.chain(), task.config, CPU)
    ours.train_mode()
    chain.train()
    optimizer = torch.optim.SGD(chain.parameters(), lr=0.5)
    subnet = chain.space.subnet()
    for module in (*chain.modules(), *ours.chain.modules()):
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for step in range(4):
        batch = task.batch(step)
        optimizer.zero_grad()
        task.config.loss(chain(batch, subnet), batch).backward()
        norm = torch.nn.utils.clip_grad_norm_(chain.parameters(), 0.05)
        assert norm > 0.05, "nothing was clipped"
        for group in optimizer.param_groups:
            group["lr"] = 0.5 * task.config.optimizer.lr_factor(step, 4)
        optimizer.step()
        ours.step(step, batch)
    for own, true in zip(ours.chain.parameters(), chain.parameters(), strict=True):
        torch.testing.assert_close(own, true, rtol=1e-5, atol=1e-7)


def test_update_u_is_scaled_by_the_norm_of_update_u_minus_the_delay() -> None:
    """SGD without momentum at rate 1: what an update did to a weight is its clipped gradient."""
    limit, depth, every = 0.3, 3, 2
    optimizer = Optimizer("sgd", lr=1.0)
    free = make_task("plain", steps=8, consistency=f"bounded({every}, {depth})", optimizer=optimizer)
    task = task_of(f"bounded({every}, {depth})", steps=8, limit=limit, optimizer=optimizer)
    assert delay_of(task.config.consistency.values()) == 2
    run = SequentialReference(task.chain(), task.config, CPU)
    run.train_mode()
    seen: list[dict[str, float]] = []
    changes: list[dict[str, float]] = []
    assert run.clipper is not None
    record = run.clipper.record

    def spy(weights: VersionedLayer) -> None:
        while len(seen) <= weights.slot:
            seen.append({})
        gradients = weights.mean_gradients()
        seen[weights.slot][weights.layer.name] = norm(gradients, [torch.zeros(())] * len(gradients))
        record(weights)

    run.clipper.record = spy  # type: ignore[method-assign]
    for step in range(8):
        before = {name: [p.detach().clone() for p in w.parameters] for name, w in run.weights.items()}
        run.step(step, task.batch(step))
        if step % every == every - 1:
            rate = task.config.optimizer.lr_factor(step, 8)
            changes.append({name: norm(w.parameters, before[name]) / rate for name, w in run.weights.items()})
    totals = [sum(x * x for x in slot.values()) ** 0.5 for slot in seen]
    assert max(totals) > limit
    for u, change in enumerate(changes):
        for layer, moved in change.items():
            own = seen[u][layer]
            scale = min(1.0, limit / (own + 1e-6), limit / (totals[u - 2] + 1e-6) if u >= 2 else 1.0)
            assert moved == pytest.approx(own * scale, rel=2e-3), (u, layer)
    assert sequentially(free).layers != sequentially(task).layers


def test_a_supernet_is_clipped_by_the_norm_of_what_a_step_used() -> None:
    task = make_task("text", steps=8, m=2, clip=GlobalNorm(0.2))
    alone = sequentially(task)
    for cut in ((2,), (1, 3, 4)):
        assert in_stages(task, cut, 4, 1)[0].layers == alone.layers
    assert sequentially(make_task("text", steps=8, m=2)).layers != alone.layers
