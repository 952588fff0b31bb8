"""weft.train: a supernet, its data and a stream in; a run directory with trained weights out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from weft.data import Augment, Data, as_data
from weft.distributed.env import read_env
from weft.distributed.store import refuse_inside_a_stage
from weft.engine.bilevel import Bilevel
from weft.engine.consistency import Consistency
from weft.engine.grad_clip import GlobalNorm
from weft.engine.losses import cross_entropy
from weft.engine.optimizer import Optimizer, Schedule
from weft.engine.train_step import Distil, Loss, Metric
from weft.errors import CheckpointError, TrainError
from weft.offload import OffloadConfig
from weft.pipeline.scheduler import SchedulePolicy
from weft.runs import Run
from weft.runs.events import Callback
from weft.runs.run import unique_name
from weft.space import Stream, Subnet
from weft.supernet import Chain, Factory, initialise
from weft.supernet.partition import check_cut, check_stages
from weft.trainer.checkpointing import load_initial
from weft.trainer.config import Settings, Validation, make_settings
from weft.trainer.run_setup import on_device, open_run, to_memory_format
from weft.trainer.trainer import Trainer


@dataclass(frozen=True)
class TrainedRun:
    """A run with its supernet in memory, trained; what ``weft.search`` and ``weft.retrain`` start from."""

    run: Run
    chain: Chain
    data: Data
    settings: Settings
    net: Chain | Factory
    fingerprint: str | None = None
    """Over all weights, optimizer states and losses; None for a run that was loaded and not trained here."""

    @property
    def path(self) -> Path:
        return self.run.path


def train(
    net: Chain | Factory,
    data: Any,
    *,
    steps: int,
    loss: Loss = cross_entropy,
    stream: str | Stream | Subnet = "spaced",
    batch_size: int = 64,
    microbatches: int = 1,
    optimizer: Optimizer | str | None = None,
    schedule: str | Schedule = "cosine",
    warmup: int = 0,
    clip: float | str | GlobalNorm | None = None,
    consistency: str | Consistency | Mapping[str, Any] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    validate: int | Validation | None = None,
    augment: Augment | None = None,
    precision: str = "fp32",
    nonfinite: str = "stop",
    device: str | torch.device = "cpu",
    init: Any = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 0,
    run: str | None = None,
    runs: Path | str = "runs",
    resume: bool = False,
    checkpoint_every: int | None = None,
    keep: int = 3,
    workers: int = 0,
    cuda_graphs: bool = True,
    channels_last: bool | None = None,
    bilevel: Bilevel | None = None,
    distil: bool | Distil = False,
    rescale: int | None = None,
    config: Mapping[str, Any] | None = None,
    stages: int | None = None,
    cut: Sequence[int] | None = None,
    window: int | None = None,
    split_backward: bool = False,
    prefer: str = "backward",
    trace: bool = False,
    restarts: int = 3,
    residency: OffloadConfig | str | None = None,
) -> TrainedRun:
    """Trains a supernet and returns the finished run.

    ``net`` is a Chain, trained in place, or a function that makes one. A step is ``microbatches`` parts of one batch;
    each layer is updated as its consistency says. The result depends on these arguments alone, never on time, workers
    or graphs.

    ``run`` names the directory under ``runs``. With ``resume`` an existing run of that name goes on from its newest
    good checkpoint and ends with the fingerprint of an undisturbed run; arguments that would change the result are
    refused. ``checkpoint_every`` is a number of steps (a tenth of the run if not given). ``channels_last`` lays images
    and filters out with the channels innermost, which is up to twice as fast on a GPU and gives a fingerprint of its
    own; if not given, this is done on a GPU where the supernet has 2-d convolutions, and never on a CPU. ``bilevel`` is
    for supernets with architecture parameters, as ``weft.search`` trains them. With ``distil`` and the sandwich stream
    every micro-batch of a step sees the whole batch, and all but the first, which is the largest subnet, follow its
    outputs as much as the labels (``distil`` may be a loss of outputs, the largest's outputs and the batch). Over the
    first ``rescale`` steps layers that see old weights learn at a smaller rate.

    With ``stages`` the chain is cut into that many parts, each in a process of its own, with the same result to the
    last bit. The processes are started here, which needs ``net``, ``data`` and whatever else is given to be importable
    or picklable, or by torchrun, under which every process runs the same script. ``cut`` gives the first block of every
    stage after the first (measured costs decide if not given), ``window`` how many micro-batches may be in flight on a
    stage (those of two steps a stage if not given), ``split_backward`` sends the gradient of a stage's input on before
    it works on those of its weights, which pays where steps wait for each other, ``prefer`` what a stage does first
    where both are ready (``forward`` is GPipe's order, for windows of a step), ``trace`` writes what each stage did
    when, and ``restarts`` says how often all stages are started again after one died.

    Ctrl-C finishes the step, writes a checkpoint and raises KeyboardInterrupt; a second Ctrl-C stops at once.
    """
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise TrainError(f"device='{device}', but torch sees no CUDA device: use device='cpu'")
    given: dict[str, Any] = {
        "steps": steps,
        "loss": loss,
        "stream": stream,
        "batch_size": batch_size,
        "microbatches": microbatches,
        "optimizer": optimizer,
        "schedule": schedule,
        "warmup": warmup,
        "clip": clip,
        "consistency": consistency,
        "metrics": metrics,
        "validate": validate,
        "augment": augment,
        "precision": precision,
        "nonfinite": nonfinite,
        "device": where,
        "seed": seed,
        "workers": workers,
        "cuda_graphs": cuda_graphs,
        "channels_last": channels_last,
        "bilevel": bilevel,
        "distil": distil,
        "rescale": rescale,
        "residency": OffloadConfig(residency) if isinstance(residency, str) else residency,
    }
    every = checkpoint_every or max(1, steps // 10)
    numbers = (("stages", stages, 1), ("window", window, 1), ("restarts", restarts, 0))
    if not isinstance(split_backward, bool):
        raise TrainError(f"split_backward={split_backward!r}: True or False")
    SchedulePolicy(1, prefer)
    for name, value, least in numbers:
        if value is not None and value < least:
            raise TrainError(f"{name}={value}: a whole number, {least} or more")
    me = read_env()
    count = stages or (me.world if me else 1)
    if me is not None and me.world != count:
        raise TrainError(
            f"stages={count}, but {me.world} processes were started: give torchrun as many, or leave it out"
        )
    if me is not None and count > 1:
        from weft.trainer.partitioning import LaunchSpec
        from weft.trainer.rank_main import run_stage

        job = LaunchSpec(
            *(net, data, given, init, run, runs, resume, every, keep, config),
            *(cut, window, trace, split_backward, prefer),
        )
        path, digest = run_stage(job, me, callbacks)
        return replace(load_run(path, net, data, built=me.rank == 0, **given), fingerprint=digest)
    if count > 1:
        refuse_inside_a_stage()
    # Where stages train, the whole supernet is needed here for its shape, and at the end for its weights.
    chain = initialise(net, seed, where if count == 1 and residency is None else torch.device("cpu"))
    check_stages(count, len(chain.blocks))
    if cut is not None:
        check_cut(cut, count, len(chain.blocks))
    settings = make_settings(chain, **given)
    to_memory_format(chain, settings)
    loaded = as_data(data, seed)
    session = Trainer(chain, loaded, settings)
    load_initial(chain, init)
    law = settings.law(chain, loaded)
    if count > 1:
        from weft.trainer.partitioning import LaunchSpec
        from weft.trainer.rank_main import run_stages

        name = run or unique_name("run")
        job = LaunchSpec(
            *(net, data, given, init, name, runs, True, every, keep, config),
            *(cut, window, trace, split_backward, prefer),
        )
        opened: list[Run] = []

        def open_it() -> Run:
            opened.append(open_run(runs, name, resume, law, config, where, keep))
            return opened[0]

        digest = run_stages(count, job, open_it, callbacks, restarts)
        load_initial(chain, opened[0])
        return TrainedRun(opened[0], on_device(chain, settings).eval(), loaded, settings, net, digest)
    session.reside()
    folder = open_run(runs, run, resume, law, config, where, keep)
    with folder.locked():
        session.open(folder, callbacks)
        if resume:
            session.restore()
        digest = session.run_to_end(every)
    return TrainedRun(folder, chain, loaded, settings, net, digest)


def load_run(path: Path | str, net: Chain | Factory, data: Any, *, built: bool = True, **options: Any) -> TrainedRun:
    """A run from disk with the weights of its newest good checkpoint, ready to be searched.

    ``net``, ``data`` and the options of ``train`` are those that the run was made with. Unless ``built``, the chain has
    no weights: stages but the first do without, since the whole supernet may be too large to have it everywhere.
    """
    run = Run.open(path)
    seed = int(options.get("seed", run.manifest.get("seed") or 0))
    options = {
        **options,
        "seed": seed,
        "steps": options.get("steps") or int((run.manifest.get("law") or {}).get("steps", 1)),
    }
    apart = options.get("residency") is not None
    chain = initialise(net, seed, torch.device("cpu" if apart else options.get("device", "cpu")), None if built else ())
    if run.manifest.get("space") not in (None, chain.space.id):
        raise CheckpointError(
            f"run '{run.name}' is of the space {run.manifest['space']}, not of this supernet's {chain.space.id}"
        )
    if built:
        load_initial(chain, run)
    settings = make_settings(chain, **options)
    to_memory_format(chain, settings)
    return TrainedRun(
        run, (on_device(chain, settings) if apart and built else chain).eval(), as_data(data, seed), settings, net
    )


def retrain(
    pick: Any,
    subnet: Subnet | None = None,
    *,
    steps: int | None = None,
    inherit: bool = False,
    run: str | None = None,
    **changes: Any,
) -> TrainedRun:
    """Trains one subnet alone, with the settings of the run that it was found in unless they are given anew.

    ``pick`` comes from a front, as ``weft.retrain(front.best())``, or is a trained run, with the subnet beside it. With
    ``inherit`` it goes on from the supernet's weights; else it starts from scratch, for which the run must have been
    started from a function that makes the supernet, not from a Chain. The supernet itself stays as it is.
    """
    trained = pick if isinstance(pick, TrainedRun) else getattr(pick, "origin", None)
    subnet = subnet or getattr(pick, "subnet", None)
    if not isinstance(trained, TrainedRun) or subnet is None:
        raise TrainError("retrain takes a pick from a front that weft.search made, or a trained run and a subnet")
    if isinstance(trained.net, Chain):
        raise TrainError(
            "retrain needs the function that makes the supernet: start the run with train(build, ...), not with a Chain"
        )
    old = trained.settings
    weights = {name: tensor.clone() for name, tensor in trained.chain.state_dict().items()} if inherit else None
    settings: dict[str, Any] = {
        "loss": old.loss,
        "stream": subnet,
        "batch_size": old.batch_size,
        "microbatches": old.microbatches,
        "optimizer": old.optimizer,
        "schedule": old.schedule,
        "clip": old.clip,
        "consistency": old.consistency,
        "nonfinite": old.nonfinite,
        "workers": old.workers,
        "cuda_graphs": old.cuda_graphs,
        "metrics": old.metrics,
        "augment": old.augment,
        "precision": old.precision,
        "channels_last": old.channels_last,
        "device": old.device,
        "seed": old.seed,
        "runs": trained.run.path.parent,
        "run": run or f"{trained.run.name}-{subnet.id}",
        "init": weights,
    }
    return train(trained.net, trained.data, steps=steps or old.steps, **{**settings, **changes})
