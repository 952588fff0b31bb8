"""weft.train: a supernet, its data and a configuration in; a run directory with trained weights out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.data import Data, as_data
from weft.distributed.env import read_env
from weft.distributed.store import ControlStore, refuse_inside_a_stage
from weft.engine.train_step import TrainStep
from weft.errors import CheckpointError, TrainError
from weft.offload.setup import attach_for_scoring, move_buffers
from weft.runs import Run
from weft.runs.events import Callback
from weft.runs.run import unique_name
from weft.space import Subnet
from weft.supernet import Chain, Factory, initialise
from weft.supernet.partition import check_cut, check_stages
from weft.trainer.checkpointing import load_initial
from weft.trainer.config import (
    Execution,
    Parts,
    RunConfig,
    TrainConfig,
    checkpoint_every,
    merge_fields,
    resolve,
    validation_of,
)
from weft.trainer.manifest import config_of, describe_run, open_run, opened
from weft.trainer.partitioning import LaunchSpec
from weft.trainer.rank_main import run_stage, run_stages
from weft.trainer.trainer import DeviceEngine, Trainer, check_validation, stop_requests


@dataclass(frozen=True)
class TrainedRun:
    """A run with its supernet in memory, trained; what ``weft.search`` and ``weft.retrain`` start from."""

    run: Run
    chain: Chain
    data: Data
    config: TrainConfig
    execution: Execution
    step: TrainStep
    """What the configuration means for this supernet."""
    net: Chain | Factory
    fingerprint: str | None = None
    """Over all weights, optimizer states and losses; None for a run that was loaded and not trained here."""

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def device(self) -> torch.device:
        """Where the supernet is scored."""
        return torch.device(self.execution.device)


def train(
    net: Chain | Factory,
    data: Any,
    config: TrainConfig | None = None,
    *,
    execution: Execution | None = None,
    run: RunConfig | str | None = None,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    **options: Any,
) -> TrainedRun:
    """Trains a supernet and returns the finished run.

    ``net`` is a Chain, trained in place, or a function that makes one. ``config`` decides the bits of the result,
    ``execution`` never does, ``run`` says what is kept of it, and where (a name alone is enough). ``options`` are
    fields of the three by name: ``weft.train(build, data, steps=2000, stages=4, validation=100)``.

    With ``resume`` an existing run of that name goes on from its newest good checkpoint and ends with the fingerprint
    of an undisturbed run; a configuration that would change the result is refused.

    With ``stages`` the chain is cut into that many parts, each in a process of its own, with the same result to the
    last bit. The processes are started here, which needs ``net``, ``data`` and whatever else is given to be importable
    or picklable, or by torchrun, under which every process runs the same script.

    Ctrl-C finishes the step, writes a checkpoint and raises KeyboardInterrupt; a second Ctrl-C stops at once.
    """
    kept = _run_config(run)
    parts = merge_fields((config or TrainConfig(), execution or Execution(), kept), options)
    config, execution, kept = parts
    if execution.threads is not None:
        torch.set_num_threads(execution.threads)
    me = read_env()
    stages = execution.stages or (me.world if me else 1)
    if me is not None and me.world != stages:
        raise TrainError(
            f"stages={stages}, but {me.world} processes were started: give torchrun as many, or leave it out"
        )
    if stages == 1:
        return _train_here(net, data, parts, callbacks, resume)
    job = LaunchSpec(net, data, config, execution, kept, resume)
    if me is None:
        return _start_stages(job, stages, callbacks)
    path, digest = run_stage(job, me, callbacks)
    directory = Run.open(path, keep=kept.keep_checkpoints)
    # Only the first process gets all weights back: the whole supernet may be too large to have it everywhere.
    return _finished(directory, job, as_data(data, config.seed), digest, built=me.rank == 0)


def load_run(path: Path | str, net: Chain | Factory, data: Any, **options: Any) -> TrainedRun:
    """A run from disk with the weights of its newest good checkpoint, ready to be searched.

    ``net`` and ``data`` are those that the run was made with; its configuration is in its manifest. ``options`` are
    fields of TrainConfig, Execution and RunConfig that are to differ, such as ``device``; code of your own (a loss, a
    metric) must be among them, since nothing is imported because a file names it.
    """
    run = Run.open(path)
    seed = int(options.get("seed", run.manifest.get("seed") or 0))
    shape = initialise(net, seed, only=())
    if run.manifest.get("space") not in (None, shape.space.id):
        raise CheckpointError(
            f"run '{run.name}' is of the space {run.manifest['space']}, not of this supernet's {shape.space.id}"
        )
    config, execution, kept = config_of(run, shape, {**options, "seed": seed})
    chain = _chain(shape, seed, execution, run)
    step = resolve(config, chain, kept.metrics)
    return TrainedRun(run, chain, as_data(data, seed), config, execution, step, net)


def retrain(
    member: Any,
    subnet: Subnet | None = None,
    *,
    inherit: bool = False,
    run: RunConfig | str | None = None,
    **options: Any,
) -> TrainedRun:
    """Trains one subnet alone, with the configuration of the run that it was found in but for ``options``.

    ``member`` comes from a front, as ``weft.retrain(front.best())``, or is a trained run, with the subnet beside it.
    With ``inherit`` it goes on from the supernet's weights; else it starts from scratch, for which the run must have
    been started from a function that makes the supernet, not from a Chain. The supernet itself stays as it is.
    """
    trained = member if isinstance(member, TrainedRun) else getattr(member, "origin", None)
    subnet = subnet or getattr(member, "subnet", None)
    if not isinstance(trained, TrainedRun) or subnet is None:
        raise TrainError("retrain takes a member of a front that weft.search made, or a trained run and a subnet")
    if isinstance(trained.net, Chain):
        raise TrainError(
            "retrain needs the function that makes the supernet: start the run with train(build, ...), not with a Chain"
        )
    weights = {name: tensor.clone() for name, tensor in trained.chain.state_dict().items()} if inherit else None
    config = replace(
        trained.config,
        stream=subnet,
        consistency=trained.step.consistency,
        distill=False,
        architecture_search=None,
        init_from=weights,
    )
    execution = replace(trained.execution, stages=None, cut=None, offload=None)
    kept = _run_config(run)
    if run is None or isinstance(run, str):
        name = kept.name or f"{trained.run.name}-{subnet.id}"
        kept = replace(kept, name=name, folder=trained.run.path.parent, metrics=trained.step.metrics)
    return train(trained.net, trained.data, config, execution=execution, run=kept, **options)


def _run_config(run: RunConfig | str | None) -> RunConfig:
    return RunConfig(name=run) if isinstance(run, str) else run or RunConfig()


def _train_here(
    net: Chain | Factory, data: Any, parts: Parts, callbacks: Sequence[Callback], resume: bool
) -> TrainedRun:
    """Trains in this process, on one device."""
    config, execution, kept = parts
    device = torch.device(execution.device)
    chain = initialise(net, config.seed, device if execution.offload is None else torch.device("cpu"))
    if execution.cut is not None:
        check_cut(execution.cut, 1, len(chain.blocks))
    step = resolve(config, chain, kept.metrics)
    execution.lay_out(chain)
    loaded = as_data(data, config.seed)
    engine = DeviceEngine(chain, loaded, step, execution)
    extremes = {"largest": chain.largest(), "smallest": chain.smallest()}
    trainer = Trainer(chain, loaded, step, engine, ControlStore.alone(), extremes, validation_of(kept))
    load_initial(chain, config.init_from)
    engine.start_offload(trainer.subnets)
    described = describe_run(chain, loaded, step, execution, config.init_from)
    with opened(kept, described, device, resume) as (run, at), stop_requests() as stopping:
        trainer.open(run, callbacks, at)
        digest = trainer.run_to_end(checkpoint_every(config, kept), stopping)
    return TrainedRun(run, chain, loaded, config, execution, step, net, digest)


def _start_stages(job: LaunchSpec, stages: int, callbacks: Sequence[Callback]) -> TrainedRun:
    """Trains on stages that are started here, each in a process of its own."""
    refuse_inside_a_stage()
    config, execution, resume = job.config, job.execution, job.resume
    kept = replace(job.run, name=job.run.name or unique_name("run"))
    # The whole supernet is needed here for its shape, so that mistakes show before anything is started.
    chain = initialise(job.net, config.seed)
    check_stages(stages, len(chain.blocks))
    if execution.cut is not None:
        check_cut(execution.cut, stages, len(chain.blocks))
    step = resolve(config, chain, kept.metrics)
    data = as_data(job.data, config.seed)
    check_validation(validation_of(kept), data)
    load_initial(chain, config.init_from)
    described = describe_run(chain, data, step, execution, config.init_from)
    del chain
    open_it = partial(open_run, kept, described, torch.device(execution.device), resume)
    run, digest = run_stages(stages, replace(job, run=kept, resume=True), open_it, callbacks)
    return _finished(run, job, data, digest)


def _finished(run: Run, job: LaunchSpec, data: Data, digest: str, built: bool = True) -> TrainedRun:
    """The run of a job with its weights, or without where it is not ``built``."""
    config, execution = job.config, job.execution
    chain = _chain(job.net, config.seed, execution, run if built else None)
    step = resolve(config, chain, job.run.metrics)
    return TrainedRun(run, chain, data, config, execution, step, job.net, digest)


def _chain(net: Chain | Factory, seed: int, execution: Execution, weights: Run | None) -> Chain:
    """The chain with the weights of a run, where a run is scored; without any where there is no run to take them
    from. Where layers are offloaded they stay on the host until a subnet is scored."""
    device = torch.device(execution.device)
    where = device if execution.offload is None else torch.device("cpu")
    chain = initialise(net, seed, where, None if weights is not None else ())
    if weights is not None:
        load_initial(chain, weights)
    execution.lay_out(chain)
    if execution.offload is not None and weights is not None:
        assert not isinstance(execution.offload, str)
        move_buffers(chain, device)
        attach_for_scoring(chain, device, execution.offload)
    return chain.eval()
