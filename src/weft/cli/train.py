"""The verbs ``train`` and ``verify``; what ``train --dry-run`` prints is found from tensors without data."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

import weft
from weft.cli import build
from weft.cli.arguments import AsJson, Target, read_target, resume_hint, stage_counts
from weft.cli.output import console, errors, print_json, show, verified
from weft.cli.progress import Bar
from weft.data import Data
from weft.distributed.env import read_env
from weft.engine.consistency import Delayed, Lagged, VirtualPipeline, version_schedule
from weft.engine.optimizer import LayerOptimizer, Optimizer
from weft.engine.train_step import TrainStep
from weft.errors import WeftError
from weft.search.methods import count
from weft.space import Subnet
from weft.supernet import Chain, Factory, build_on_meta, extract
from weft.trainer.config import TrainConfig, resolve
from weft.utils.units import format_bytes
from weft.verify import verify_run

META = torch.device("meta")


def describe(net: Chain | Factory, data: Data, train: TrainConfig, device: str, path: Path) -> dict[str, Any]:
    """Steps, subnets, parameters, memory in bytes and place of the run that ``weft.train`` would make of this."""
    chain = build_on_meta(net)
    config = resolve(train, chain)
    loader = config.loader(data, torch.device("cpu"))
    per_epoch = getattr(loader, "per_epoch", None)
    batch = {name: tensor.to(META) for name, tensor in loader.batch(0).items()}
    largest, smallest = chain.largest(), chain.smallest()
    subnets = count(chain.space)
    weights = sum(p.numel() * p.element_size() for p in chain.parameters())
    return {
        "run": str(path),
        "device": device,
        "steps": config.steps,
        "batch_size": config.batch_size,
        "microbatches": config.microbatches,
        "epochs": round(config.steps / per_epoch, 2) if per_epoch else None,
        "stream": config.stream.describe(),
        "subnets": "too many to count" if math.isinf(subnets) else int(subnets),
        "blocks": len(chain.blocks),
        "layers": len(chain.layers),
        "parameters": chain.count(),
        "parameters_largest": parameters(chain, largest, batch),
        "parameters_smallest": parameters(chain, smallest, batch),
        "memory_weights": weights,
        "memory_optimizer": int(weights * state_ratio(config.optimizer)),
        "memory_versions": kept_bytes(chain, config),
        "memory_gradients": parameters(chain, largest, batch) * 4,
        "memory_activations": activations(chain, largest, batch, config),
    }


def parameters(chain: Chain, subnet: Subnet, batch: Mapping[str, Tensor]) -> int:
    """The parameters of the subnet alone; of an elastic layer, those of its slice."""
    if not any(layer.elastic for layer in chain.route(subnet)):
        return chain.count(subnet)
    return sum(p.numel() for p in extract(chain, subnet, batch).parameters())


def state_ratio(optimizer: Optimizer) -> float:
    """Elements of optimizer state for each weight, counted after one step of a small matrix."""
    sample = nn.Parameter(torch.zeros(8, 8))
    updater = LayerOptimizer(optimizer, {"sample": sample})
    updater.apply([sample], [torch.zeros(8, 8)], 1.0)
    return sum(value.numel() for value in updater.state(sample).values() if value.dim() > 0) / sample.numel()


def kept_bytes(chain: Chain, config: TrainStep) -> int:
    """The most bytes that older versions of weights take, by the table of consistencies."""
    total = 0
    for name, layer in chain.layers.items():
        promised = config.consistency[name]
        times = 0
        if isinstance(promised, Delayed):
            times = promised.steps
        elif isinstance(promised, Lagged):
            times = 1
        elif isinstance(promised, VirtualPipeline):
            window = version_schedule(
                promised, layer.block, len(chain.blocks), config.microbatches, config.steps
            ).window
            times = -(-(window - 1) // promised.every)
        total += times * sum(p.numel() * p.element_size() for p in chain.module(name).parameters())
    return total


def activations(chain: Chain, subnet: Subnet, batch: Mapping[str, Tensor], config: TrainStep) -> int | str:
    """Bytes that one micro-batch of the largest subnet keeps for its backward, or why they are not known."""
    micro = {name: part.clone() for name, part in config.parts(dict(batch))[0].items()}
    own = {p.untyped_storage()._cdata for p in (*chain.parameters(), *chain.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}  # by address, which no other storage gets as long as it is here

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()  # a view, such as a transposed weight, takes no memory of its own
        if storage._cdata not in own:
            storages[storage._cdata] = storage
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            config.loss(chain.train()(micro, subnet), micro)
    except WeftError:
        raise
    except Exception as problem:  # a layer that needs real values cannot be followed
        return f"unknown: {type(problem).__name__} without data: {' '.join(str(problem).split())[:200]}"
    return sum(storage.nbytes() for storage in storages.values())


def train(
    context: typer.Context,
    config: Target,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest good checkpoint.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what the run would be, and do not run it.")] = False,
    stages: Annotated[int | None, typer.Option(help="Number of processes, each with a part of the chain.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train the supernet that a config names."""
    settings, folder = read_target(config, context, [] if stages is None else [f"--execution.stages={stages}"])
    build.set_threads(settings)
    rank = read_env()
    if rank is not None and rank.rank > 0:  # under torchrun only the first process prints
        console.quiet = errors.quiet = True
    data = build.data_of(settings, folder)
    net = build.supernet_of(settings, folder, data)
    parts, path = build.train_parts(settings, folder), settings.path
    if dry_run:
        show(describe(net, data, parts[0], parts[1].device, path), as_json, "what would be run")
        return
    load = data if (settings.execution.stages or 1) == 1 else partial(build.data_of, settings, folder.resolve())
    typed = [*context.args, *([] if stages is None else [f"--stages={stages}"]), "--resume"]
    again = shlex.join(["weft", "train", config, *typed])
    ended: dict[str, Any] = {}

    def end(event: Mapping[str, Any]) -> None:
        if event["event"] == "finished":
            ended.update(event)

    with resume_hint(path, again), Bar(errors, "train", settings.train.steps) as bar:
        train_config, execution, run = parts
        trained = weft.train(
            net, load, train_config, execution=execution, run=run, callbacks=[bar.train, end], resume=resume
        )
    if rank is not None and rank.rank > 0:
        return
    result = {"run": str(trained.path), "steps": settings.train.steps, "fingerprint": trained.fingerprint}
    show({**result, **offload_summary(ended.get("offload"), as_json)}, as_json, "trained")
    if not as_json:
        next_verb = "weft search" if trained.chain.space.choices else "weft export"
        console.print(
            f"next: {next_verb} {shlex.quote(str(trained.path))}, or weft serve to look at the run", soft_wrap=True
        )


def offload_summary(stages: Sequence[Mapping[str, Any]] | None, as_json: bool) -> dict[str, Any]:
    """What an offload has moved: every stage's numbers as they are, or their sum for a person."""
    if not stages or as_json:
        return {} if not stages else {"offload": stages}
    uses, misses, loaded, evicted = (
        sum(stage[key] for stage in stages) for key in ("uses", "misses", "loaded_bytes", "evicted_bytes")
    )
    largest = max(stages, key=lambda stage: stage["peak"])
    total = f", {format_bytes(largest['device_peak'])} with all else" if largest["device_peak"] else ""
    return {
        "layers on the device": f"at most {format_bytes(largest['peak'])} of {format_bytes(largest['budget'])}{total}",
        "loaded in time": f"{100 * (1 - misses / uses) if uses else 100:.1f} % of {uses} uses",
        "moved": f"{format_bytes(loaded)} to the device, {format_bytes(evicted)} back",
    }


def verify(
    context: typer.Context,
    config: Target,
    stages: Annotated[str, typer.Option(help="Numbers of stages, separated by commas.")] = "1,2",
    steps: Annotated[int, typer.Option(help="Steps of the run that are trained at most.", min=1)] = 50,
    as_json: AsJson = False,
) -> None:
    """Check that stages do not change the bits.

    Trains the first steps on several numbers of stages. If the results differ, prints where and why, and exits with 1.
    """
    settings, folder = read_target(config, context)
    counts = stage_counts(stages)
    build.set_threads(settings)
    net, load = build.supernet_of(settings, folder), partial(build.data_of, settings, folder.resolve())
    parts = build.train_parts(settings, folder)
    with errors.status("verify") as status:
        found = verify_run(
            net, load, parts, counts, steps=steps, on_variant=lambda variant: status.update(f"verify: {variant}")
        )
    print_json(found) if as_json else verified(console, found)
    if not found["equal"]:
        raise typer.Exit(1)
