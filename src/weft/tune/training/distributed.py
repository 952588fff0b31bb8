"""The training of one trial over several devices, each a process, as its plan says; to the losses of a single device
within float tolerance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor

from weft.data import Batch
from weft.distributed.store import ControlStore
from weft.errors import TuneError
from weft.nn.state import non_persistent_buffers, restore
from weft.plan.planner import load as load_plan
from weft.tune.fit.peaks import LossModule
from weft.tune.jobs import Fit
from weft.tune.recipe import TrialConfig
from weft.tune.training.checkpoint import TrialCheckpoint, load_latest, save
from weft.tune.training.memory_limit import MemoryLimit
from weft.tune.training.trainer import Report, Result, TrainingLoop, TrialOptimizer, run_limited


def train_split(
    config: TrialConfig,
    fit: Fit,
    *,
    device: torch.device | str,
    memory: int | None = None,
    directory: Path,
    report: Report,
) -> Result:
    """Trains a trial with the other processes of its job, each of which makes the same call.

    It is ``train`` otherwise; only the report of the first process counts, and only it writes checkpoints. RANK,
    WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which processes those are.
    """
    if fit.plan is None or fit.devices < 2:
        raise TuneError("a trial is split as its plan says, and this one has none")
    limit = MemoryLimit(torch.device(device), memory)
    store, rank, world = next(rendezvous("env://"))
    backend = "nccl" if limit.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    control = ControlStore(store, rank, world)
    try:
        return run_limited(limit, lambda: DistributedTrainer(config, fit, limit, directory, control).run(report))
    finally:
        dist.destroy_process_group()


class DistributedTrainer(TrainingLoop):
    """A process's part of a trial."""

    def __init__(self, config: TrialConfig, fit: Fit, limit: MemoryLimit, directory: Path, store: ControlStore) -> None:
        super().__init__(config, fit, limit, torch.device("cpu"), directory)
        self._store = store
        self._contract["degree"] = fit.devices
        self._checkpoint = load_latest(self._directory, self._contract)
        if self._checkpoint is None:
            self._check_loss()
        else:  # a graph has the attributes as they are when it is made
            restore(self.model, self._checkpoint.weights, self._checkpoint.buffers, {})
        batch = self._loader.batch(0)
        self._whole = LossModule(config, self.model, tuple(batch))
        assert fit.plan is not None
        planned = load_plan(fit.plan, self._whole, self._whole.tensors(batch), compare=False)
        sizes = (planned.stages, *planned.mesh.sizes)
        mesh = init_device_mesh(self.device.type, sizes if planned.stages > 1 else sizes[1:])
        self.parallel = planned.apply(self._whole, mesh)
        self._shards = {name: p for name, p in self.parallel.named_parameters() if p.requires_grad}
        # The parts themselves: optimizers that work element by element need not know of what they are parts.
        self._parts = {name: nn.Parameter(_local(p.detach())) for name, p in self._shards.items()}
        self.optimizer = TrialOptimizer(config.optimizer, self._parts)

    def run(self, report: Report) -> Result:
        return super().run(lambda done, values: self._report(report, done, values))

    def evaluate(self) -> tuple[float, ...]:
        """In host memory: the model is whole there, and on no device."""
        config = self.config
        with self._limit.pause():
            restore(self._whole, *self._state(), {})
            values = torch.zeros(len(config.objectives), dtype=torch.float64)
            if dist.get_rank() == 0:
                found = config.evaluate(self.model, self._validation, config.batch_size, torch.device("cpu"))
                values.copy_(torch.tensor(found, dtype=torch.float64))
            return tuple(self._from_first(values).tolist())

    def _resume(self) -> TrialCheckpoint | None:
        checkpoint = self._checkpoint
        if checkpoint is not None:
            self.losses[: checkpoint.step].copy_(checkpoint.losses)
            self.optimizer.load({n: self._spread(n, s) for n, s in checkpoint.states.items() if n in self._parts})
        return checkpoint

    def _held(self) -> list[Tensor]:
        return [*self._parts.values(), *self.parallel.buffers()]

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The model's state_dict, whole, and the hidden buffers that training changes; on every process."""
        hidden = non_persistent_buffers(self._whole)
        extra = {name: value for name, value in self._whole.state_dict().items() if not isinstance(value, Tensor)}
        shared = {name: one for name, one in self.parallel.full_state_dict().items() if name not in hidden}
        names = [name for name in self.parallel.changing if name in hidden]
        beyond = self.parallel.gather_full(
            names, lambda name: self.parallel.full_tensor(self.parallel.get_buffer(name))
        )
        return {**extra, **shared}, beyond

    def _step(self, step: int, batch: Batch) -> None:
        loss = self.parallel.step(self._whole.tensors(batch), lambda number: self._seeder.set(step, number, "model"))
        self.losses[step] = loss.detach().float().cpu()
        for name, shard in self._shards.items():
            self._parts[name].grad = None if shard.grad is None else _local(shard.grad)
            shard.grad = None
        self.optimizer.step(self.config.lr_schedule(step, self.config.steps))

    def _report(self, report: Report, done: int, values: tuple[float, ...]) -> bool:
        """The first process reports, and all get the answer."""
        answer = torch.zeros(1, dtype=torch.float64)
        if dist.get_rank() == 0:
            answer[0] = float(report(done, values))
        return bool(self._from_first(answer)[0])

    def _from_first(self, values: Tensor) -> Tensor:
        there = values.to(self.device)
        dist.broadcast(there, src=0)
        return there.cpu()

    def _save(self, step: int, values: tuple[float, ...] | None) -> None:
        """The trial's checkpoint is whole, like that of a single device."""
        with self._limit.pause():
            weights, buffers = (
                {name.removeprefix("model."): value for name, value in found.items()} for found in self._state()
            )
            states = {} if values is not None else self._states(step)
            if dist.get_rank() == 0:
                checkpoint = TrialCheckpoint(step, weights, states, self.losses[:step], values, buffers)
                save(self._directory, self._contract, checkpoint)
            dist.barrier()

    def _states(self, step: int) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state of every parameter, whole, gathered from the stages that hold them. A parameter that
        never had a gradient has none, and a stage that trains nothing knows of none."""
        own = {name: self.optimizer.state(part) for name, part in self._parts.items()}
        counts = {n: {k: _count(t) for k, t in state.items()} for n, state in own.items()}
        known = {n: state for one in self._store.gather(f"states/{step}", counts) for n, state in one.items()}
        found = {
            name: {key: torch.tensor(count[0], dtype=getattr(torch, count[1])) for key, count in state.items() if count}
            for name, state in known.items()
        }
        for key in sorted({key for state in known.values() for key in state}):
            names = sorted(name for name, state in known.items() if key in state and not state[key])
            gathered = self.parallel.gather_full(names, lambda name, key=key: self._gathered(name, own[name][key]))  # type: ignore[misc]
            for name, tensor in gathered.items():
                found[name][key] = tensor
        return found

    def _gathered(self, name: str, part: Tensor) -> Tensor:
        shard: Any = self._shards[name]
        return self.parallel.full_tensor(DTensor.from_local(part, shard.device_mesh, shard.placements, run_check=False))

    def _spread(self, name: str, state: Any) -> dict[str, Tensor]:
        """This process's part of a saved state."""
        shard: Any = self._shards[name]
        return {
            key: tensor
            if tensor.dim() == 0
            else _local(distribute_tensor(tensor.to(self.device), shard.device_mesh, shard.placements)).clone()
            for key, tensor in state.items()
        }


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _count(tensor: Tensor) -> tuple[float, str] | None:
    """A number, such as of steps, with its type; None for what has the shape of its parameter."""
    return None if tensor.dim() else (tensor.item(), str(tensor.dtype).removeprefix("torch."))
