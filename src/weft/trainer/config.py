"""The settings of a training run as values: checked once, told in the manifest, compared on resume."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weft.data import Augment, Data
from weft.engine.bilevel import Bilevel
from weft.engine.consistency import Consistency, Exact, parse_consistency
from weft.engine.grad_clip import GlobalNorm, delay_of, make_clip
from weft.engine.losses import InPlaceDistillation, cross_entropy
from weft.engine.optimizer import Optimizer, Schedule, make_schedule
from weft.engine.tied_weights import check_ties
from weft.engine.train_step import Distil, Loss, Metric
from weft.errors import ConsistencyError, TrainError, nearest
from weft.offload.config import OffloadConfig
from weft.space import Stream, Subnet, make_stream
from weft.supernet import Chain
from weft.utils.names import without_modules


@dataclass(frozen=True, slots=True)
class Validation:
    """Every ``every`` steps the largest, the smallest and ``random`` subnets drawn once are scored on the validation
    data."""

    every: int
    random: int = 2
    batch_size: int = 256
    recalibrate: int = 2
    """How many training batches set the batch norms of each subnet before it is scored; 0 leaves them as they are."""


@dataclass(frozen=True)
class Settings:
    """Everything that the result depends on beside the chain and the data, and where it runs."""

    steps: int
    loss: Loss
    stream: Stream
    optimizer: Optimizer
    schedule: Schedule
    schedule_name: str
    batch_size: int
    microbatches: int
    seed: int
    device: torch.device
    consistency: Mapping[str, Consistency]
    augment: Augment | None = None
    clip: float | GlobalNorm | None = None
    precision: str = "fp32"
    nonfinite: str = "stop"
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    validate: Validation | None = None
    workers: int = 0
    cuda_graphs: bool = True
    channels_last: bool = False
    bilevel: Bilevel | None = None
    distil: Distil | None = None
    rescale: int | None = None
    residency: OffloadConfig | None = None
    """Where layers lie; like the device's number, no part of what a run is."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1 or self.microbatches < 1:
            raise TrainError(
                "steps, batch_size and microbatches are 1 or more, "
                f"not {self.steps}, {self.batch_size}, {self.microbatches}"
            )
        if self.distil is not None and not self.stream.name.startswith("sandwich"):
            raise TrainError(
                f"distil: the largest subnet of a step teaches the others, so the stream must be 'sandwich', "
                f"not '{self.stream.name}'"
            )
        if self.distil is None and self.batch_size % self.microbatches:
            raise TrainError(
                f"batch_size={self.batch_size} cannot be split into {self.microbatches} micro-batches of equal size: "
                "use a multiple"
            )
        wanted = self.stream.microbatches
        if wanted is not None and wanted != self.microbatches:
            raise TrainError(
                f"the stream '{self.stream.name}' gives {wanted} subnets a step: "
                f"set microbatches={wanted}, not {self.microbatches}"
            )
        if self.stream.length is not None and self.stream.length < self.steps:
            raise TrainError(
                f"the stream '{self.stream.name}' has {self.stream.length} steps, fewer than the run's {self.steps}"
            )
        if self.validate is not None and self.validate.every < 1:
            raise TrainError(f"validate={self.validate.every}: a number of steps, 1 or more, or None for no validation")
        if self.rescale is not None and self.rescale < 1:
            raise TrainError(f"rescale={self.rescale}: a number of steps, 1 or more")
        one_of("precision", self.precision, ("fp32", "bf16"))
        one_of("nonfinite", self.nonfinite, ("stop", "skip"))
        if isinstance(self.clip, GlobalNorm):
            delay_of(self.consistency.values())

    def law(self, chain: Chain, data: Data) -> dict[str, Any]:
        """What must be equal for a resumed run to be the same run, for the manifest."""
        return {
            "steps": self.steps,
            "batch_size": self.batch_size,
            "microbatches": self.microbatches,
            "seed": self.seed,
            "stream": self.stream.to_json(),
            "space": chain.space.id,
            "layers": len(chain.layers),
            "data": data.fingerprint(),
            "loss": describe(self.loss),
            "optimizer": self.optimizer.describe(),
            "schedule": self.schedule_name,
            "clip": str(self.clip) if isinstance(self.clip, GlobalNorm) else self.clip,
            "precision": self.precision,
            "nonfinite": self.nonfinite,
            "channels_last": self.channels_last,
            "device": self.device.type,
            "threads": torch.get_num_threads() if self.device.type == "cpu" else None,
            "augment": None if self.augment is None else describe(self.augment),
            "consistency": {name: str(c) for name, c in sorted(self.consistency.items()) if c != Exact()},
            **({} if self.rescale is None else {"rescale": self.rescale}),
            **({} if not chain.ties else {"ties": [f"{first} = {second}" for first, second in chain.ties]}),
            **({} if self.distil is None else {"distil": describe(self.distil)}),
            **({} if self.bilevel is None else {"bilevel": self.bilevel.describe()}),
        }


def make_settings(
    chain: Chain,
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
    seed: int = 0,
    workers: int = 0,
    cuda_graphs: bool = True,
    channels_last: bool | None = None,
    bilevel: Bilevel | None = None,
    distil: bool | Distil = False,
    rescale: int | None = None,
    residency: OffloadConfig | str | None = None,
) -> Settings:
    """The settings that these arguments, as ``train`` takes them, mean for a chain."""
    if (bilevel is None) == any(layer.arch for layer in chain.layers.values()):
        raise TrainError(
            "a supernet with architecture parameters is trained on two levels, and only such a one: "
            "give train() bilevel=Bilevel(...) and what weft.supernet.mix makes, or neither"
        )
    if not chain.space.choices and isinstance(stream, str):
        stream = chain.space.subnet()  # one network, and nothing to choose: every step trains it
    extremes: dict[str, Any] = {}
    if isinstance(stream, str) and stream.partition(":")[0] == "sandwich":
        extremes = {"largest": chain.largest(), "smallest": chain.smallest()}
    if isinstance(stream, str) and stream.partition(":")[0] == "shrinking":
        extremes = {"steps": steps}
    promises = consistencies(chain, consistency)
    check_ties(chain, promises.values())
    if chain.ties and (bilevel is not None or rescale is not None):
        raise TrainError(
            "tied weights have one learning rate and learn in every step: leave tie= out of the Chain, or "
            "bilevel and rescale out of the run"
        )
    named = schedule if isinstance(schedule, str) else describe(schedule)
    if optimizer is None:
        optimizer = Optimizer("sgd", lr=0.05, momentum=0.9, weight_decay=5e-4)
    return Settings(
        steps=steps,
        loss=loss,
        stream=make_stream(chain.space, stream, seed, **extremes),
        optimizer=Optimizer(optimizer) if isinstance(optimizer, str) else optimizer,
        schedule=make_schedule(schedule, warmup),
        schedule_name=f"{named}, warm-up {warmup}",
        batch_size=batch_size,
        microbatches=microbatches,
        seed=seed,
        device=torch.device(device),
        consistency=promises,
        augment=augment,
        clip=make_clip(clip),
        precision=precision,
        nonfinite=nonfinite,
        metrics=dict(metrics or {}),
        validate=Validation(validate) if isinstance(validate, int) else validate,
        workers=workers,
        cuda_graphs=cuda_graphs,
        channels_last=prefers_channels_last(chain, device) if channels_last is None else channels_last,
        bilevel=bilevel,
        distil=InPlaceDistillation(loss) if distil is True else distil or None,
        rescale=rescale,
        residency=OffloadConfig(residency) if isinstance(residency, str) else residency,
    )


def prefers_channels_last(chain: Chain, device: str | torch.device) -> bool:
    """Whether a run lays images out with the channels innermost if it is not told: where 2-d convolutions run on a GPU,
    which are up to twice as fast so."""
    convolved = any(isinstance(part, (nn.Conv2d, nn.ConvTranspose2d)) for part in chain.modules())
    # torch has no such layout for volumes, and refuses to bring a chain that holds any into it.
    volumes = any(tensor.dim() > 4 for tensor in (*chain.parameters(), *chain.buffers()))
    return torch.device(device).type == "cuda" and convolved and not volumes


def consistencies(chain: Chain, given: str | Consistency | Mapping[str, Any] | None) -> dict[str, Consistency]:
    """The consistency of every layer: what the run says of it by name or block, else what the block says, else
    ``exact``.

    A text such as ``lagged(4)``, or what it stands for, holds for all layers. In a mapping, a key is the name of a
    layer or of a block, or ``shared`` for all layers that every subnet uses.
    """
    rules = {name: str(said) for name, said in given.items()} if isinstance(given, Mapping) else {}
    if given is not None and not isinstance(given, Mapping):
        rules[""] = str(given)
    blocks = [block.name for block in chain.blocks]
    for name in rules:
        if name and name != "shared" and name not in chain.layers and name not in blocks:
            raise ConsistencyError(
                f"no layer or block is named '{name}'{nearest(name, [*chain.layers, *blocks, 'shared'])}"
            )
    found: dict[str, Consistency] = {}
    for name, layer in chain.layers.items():
        block = blocks[layer.block]
        said = rules.get(name) or rules.get(block) or (rules.get("shared") if layer.shared else None) or rules.get("")
        found[name] = parse_consistency(said or layer.consistency or "exact")
    return found


def one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise TrainError(f"{what}='{value}' is unknown{nearest(str(value), allowed)}")


def describe(thing: Any) -> str:
    name = getattr(thing, "__qualname__", None)
    # An address in memory is another one in the process that resumes, and a script is called otherwise in its children.
    found = f"{thing.__module__}.{name}" if name else re.sub(r" at 0x[0-9a-fA-F]+", "", repr(thing))
    return str(without_modules(found.replace("__mp_main__", "__main__")))
