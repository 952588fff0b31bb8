"""Layers that live in pinned memory and come to a GPU: the same bits as without, and never more than the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import stages
import torch
from disturbed import samples
from stages import Outcome, Task, make_task

import weft
from weft.engine.layer_state import layer_digest
from weft.engine.optimizer import Optimizer
from weft.engine.reference import SequentialReference
from weft.engine.rng import deterministic
from weft.offload import OffloadConfig
from weft.offload.copy_engine import CudaCopy
from weft.offload.host_memory import allocate_host
from weft.offload.setup import attach, move_buffers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda")
ADAM = Optimizer("adamw", lr=1e-3, weight_decay=0.01)
CONSISTENCIES = ("exact", "delayed(2)", "lagged(2)", "bounded(2, 3)", "stashed(2, 3)")


def trained(task: Task, config: OffloadConfig | None) -> tuple[Outcome, Any]:
    chain = task.chain()
    if config is None:
        chain = chain.to(CUDA)
    else:
        move_buffers(chain, CUDA)
    sequential = SequentialReference(chain, task.config, CUDA)
    if config is not None:
        attach(sequential, config)
    losses = []
    with deterministic(CUDA):
        sequential.train_mode()
        for step in range(task.config.steps):
            batch = {name: tensor.to(CUDA) for name, tensor in task.batch(step).items()}
            losses += [loss.item() for loss in sequential.step(step, batch).losses]
        sequential.eval_mode()
    layers = {name: layer_digest(w, sequential.optimizer) for name, w in sequential.weights.items()}
    return Outcome(layers, losses), sequential.offload


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("consistency", CONSISTENCIES)
def test_any_budget_gives_the_same_bits_on_a_gpu(consistency: str, precision: str) -> None:
    for optimizer in (ADAM, Optimizer("adamw", lr=1e-3, foreach=True), Optimizer("sgd", lr=0.05, momentum=0.9)):
        task = make_task("text", steps=12, m=2, consistency=consistency, optimizer=optimizer, precision=precision)
        wanted, _ = trained(task, None)
        _, memory = trained(task, OffloadConfig("1GiB"))
        for factor in (1.0, 1.5, 4.0):
            budget = int(memory.least * factor)
            found, small = trained(task, OffloadConfig(budget))
            assert found.losses == wanted.losses
            assert found.layers == wanted.layers
            assert small.stats()["peak"] <= budget
            assert small.device.memory.numel() <= budget


def test_only_layers_that_come_late_count_as_late_however_long_the_device_waits_for_others() -> None:
    mover, there = CudaCopy(CUDA), torch.zeros(1 << 20, device=CUDA)
    here = allocate_host(there.nbytes, pin=True).view(torch.float32)
    with deterministic(CUDA):
        torch.cuda._sleep(200_000_000)  # a device that others keep busy
        mover.wait(mover.to_host(here, there, [mover.record()]))
        torch.cuda.synchronize()
        assert mover.count_late() == 0
        torch.cuda._sleep(200_000_000)
        mover.wait(mover.to_device(there, here, [mover.record()]))
        torch.cuda.synchronize()
        assert mover.count_late() == 1


def test_memory_of_the_host_is_pinned_and_let_go_of() -> None:
    for _ in range(3):
        memory = allocate_host(1 << 20, pin=True)
        assert memory.is_pinned()
        del memory


def test_a_run_on_a_gpu_ends_and_is_searched_as_one_without(tmp_path: Path) -> None:
    told: dict[str, Any] = {"steps": 12, "batch_size": 4, "optimizer": ADAM, "device": "cuda", "validation": 4}
    wanted = weft.train(stages.text, samples("text"), **told, folder=tmp_path, run="all")
    found = weft.train(stages.text, samples("text"), **told, folder=tmp_path, run="small", offload="56KiB")
    assert found.fingerprint == wanted.fingerprint
    best = [(pick.subnet.id, pick.scores) for pick in weft.search(wanted, minimize=["loss", "flops"], budget=6)]
    assert [(p.subnet.id, p.scores) for p in weft.search(found, minimize=["loss", "flops"], budget=6)] == best
