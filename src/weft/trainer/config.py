"""The configuration of a run, in three parts: what decides its bits, how it is executed, and what is kept of it.

The tables of a configuration file, the options of the command line, the manifest of a run and the reference page are
all derived from these classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from weft.data import Augment
from weft.engine.bilevel import Bilevel
from weft.engine.consistency import Consistency, parse_consistency
from weft.engine.grad_exchange import check_ties, delay_of
from weft.engine.losses import InPlaceDistillation, cross_entropy
from weft.engine.optimizer import GlobalNorm, Optimizer
from weft.engine.train_step import Distill, Loss, Metric, TrainStep
from weft.errors import ConsistencyError, TrainError, nearest
from weft.offload.config import OffloadConfig
from weft.pipeline.scheduler import SchedulePolicy
from weft.space import Stream, Subnet, make_stream
from weft.supernet import Chain


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What decides the bits of a run, beside its supernet and its data; a run is resumed under the same one."""

    steps: int = 1000
    """number of training steps"""
    batch_size: int = 64
    """samples of a step, over all its micro-batches"""
    microbatches: int = 1
    """parts of a batch; they decide the result"""
    stream: str | Stream | Subnet = "spaced"
    """`iid`, `fair`, `spaced:N`, `sandwich:N`, `shrinking:KIND,...`, `fixed`, or a file of subnets"""
    optimizer: Optimizer | str = field(default_factory=Optimizer)
    """the optimizer, with the schedule of its learning rate and its clipping"""
    consistency: str | Consistency | Mapping[str, Any] | None = None
    """one for all layers, or by layer, by block, or for all `shared` ones; `exact` if not given"""
    loss: Loss = cross_entropy
    """`cross_entropy`, `mean_squared_error`, or code"""
    augment: Augment | None = None
    """code that changes batches, with draws that belong to the sample and the epoch"""
    precision: str = "fp32"
    """`fp32` or `bf16`"""
    on_nonfinite: str = "stop"
    """what a loss or gradient that is not finite does: `stop` the run, or `skip` the micro-batch or update"""
    distill: bool | Distill = False
    """with the `sandwich` stream: the other subnets of a step follow the outputs of the largest one"""
    architecture_search: Bilevel | None = None
    """for supernets with architecture parameters, which learn on validation data"""
    init_from: Any = None
    """first weights: a state dict, a safetensors file, or the directory of a run"""
    seed: int = 0
    """seed of weights, stream, batches and all other random draws"""

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, str):
            object.__setattr__(self, "optimizer", Optimizer(self.optimizer))
        for name in ("steps", "batch_size", "microbatches"):
            at_least(name, getattr(self, name), 1)
        one_of("precision", self.precision, ("fp32", "bf16"))
        one_of("on_nonfinite", self.on_nonfinite, ("stop", "skip"))


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a run is executed. None of this changes a bit of the result, but for the kind of device, its threads and
    ``channels_last``, which choose other kernels and are compared when a run is resumed."""

    device: str = "cpu"
    """`cpu`, `cuda`, `cuda:N`"""
    stages: int | None = None
    """parts of the chain, each in a process of its own; one, or as many as torchrun started, if not given"""
    cut: tuple[int, ...] | None = None
    """the first block of every stage after the first; measured costs decide if not given"""
    max_in_flight: int | None = None
    """micro-batches in flight on a stage, which is what activations cost in memory; those of two steps a stage if not
    given"""
    pipeline_schedule: str = "1f1b"
    """what goes first where both are ready: `1f1b` a backward, `gpipe` a forward, `naspipe` one after the other"""
    split_backward: bool = False
    """sends the gradient of the input on before it works on those of the weights, which pays where steps wait for each
    other"""
    offload: OffloadConfig | str | None = None
    """layers live on the host, and on the device while micro-batches need them"""
    data_workers: int = 0
    """threads that load data"""
    threads: int | None = None
    """threads of each process; the bits depend on it"""
    cuda_graphs: bool = True
    """whether candidates become CUDA graphs on a GPU"""
    channels_last: bool | None = None
    """whether images lie with their channels innermost; on a GPU the supernet decides if not given"""
    trace: bool = False
    """writes what every stage did when"""
    max_restarts: int = 3
    """how often all stages are started again after one died"""

    def __post_init__(self) -> None:
        if isinstance(self.offload, str):
            object.__setattr__(self, "offload", OffloadConfig(self.offload))
        try:
            kind = torch.device(self.device).type
        except RuntimeError:
            raise TrainError(f"device='{self.device}' is no device: use cpu, cuda, or cuda:N") from None
        if kind == "cuda" and not torch.cuda.is_available():
            raise TrainError(f"device='{self.device}', but torch sees no CUDA device: use device='cpu'")
        if not isinstance(self.split_backward, bool):
            raise TrainError(f"split_backward={self.split_backward!r}: True or False")
        for name, least in (("stages", 1), ("max_in_flight", 1), ("threads", 1), ("max_restarts", 0)):
            at_least(name, getattr(self, name), least)
        SchedulePolicy(1, self.pipeline_schedule)
        if self.cut is not None:
            object.__setattr__(self, "cut", tuple(self.cut))

    def lay_out(self, chain: Chain) -> Chain:
        """The chain with its filters in the memory format of the run; activations follow the filters."""
        wanted = prefers_channels_last(chain, self.device) if self.channels_last is None else self.channels_last
        return chain.to(memory_format=torch.channels_last) if wanted else chain  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True)
class Validation:
    """Every ``every`` steps the largest, the smallest and ``random`` subnets drawn once are scored on the validation
    data."""

    every: int
    """steps between two validations"""
    random: int = 2
    """subnets drawn once"""
    batch_size: int = 256
    """samples of a batch when subnets are scored"""
    bn_batches: int = 2
    """training batches that set the batch norms of each subnet before it is scored; 0 leaves them as they are"""

    def __post_init__(self) -> None:
        at_least("validation.every", self.every, 1)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run is kept, and what of it."""

    name: str | None = None
    """name of the run; if not given, that of the configuration file, or one made of the date"""
    folder: Path | str = "runs"
    """the directory that holds the runs"""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """what is measured beside the loss: `accuracy`, or code: `module:function`"""
    validation: Validation | int | None = None
    """steps between two, or a table with `every`, `random`, `batch_size`, `bn_batches`; none if not given"""
    checkpoint_every: int | None = None
    """steps between two checkpoints; a tenth of the run if not given"""
    keep_checkpoints: int = 3
    """checkpoints that are kept, the newest ones"""
    source: Mapping[str, Any] | None = None
    """the configuration file that the run comes from, for its manifest"""

    def __post_init__(self) -> None:
        validation_of(self)
        at_least("checkpoint_every", self.checkpoint_every, 1)
        at_least("keep_checkpoints", self.keep_checkpoints, 1)


OLD_FIELDS = {
    "validate": "validation",
    "runs": "folder",
    "keep": "keep_checkpoints",
    "init": "init_from",
    "distil": "distill",
    "bilevel": "architecture_search",
    "nonfinite": "on_nonfinite",
    "window": "max_in_flight",
    "prefer": "pipeline_schedule",
    "restarts": "max_restarts",
    "residency": "offload",
    "workers": "data_workers",
    "config": "source",
}
"""What fields were called before, and are called now."""

MOVED_TO_OPTIMIZER = {"schedule": "schedule", "warmup": "warmup_steps", "clip": "clip"}
"""What is an argument of Optimizer now, by its old name."""

Parts = tuple[TrainConfig, Execution, RunConfig]
Part = TypeVar("Part", TrainConfig, Execution, RunConfig)


def merge_fields(parts: Parts, options: Mapping[str, Any]) -> Parts:
    """The three parts with some of their fields changed, by name; raises TrainError for a name that is none."""
    known = {entry.name for part in parts for entry in fields(part)}
    for name in options:
        if name not in known:
            refuse_unknown(name, known)
    config, execution, run = parts
    return _changed(config, options), _changed(execution, options), _changed(run, options)


def _changed(part: Part, options: Mapping[str, Any]) -> Part:
    changes = {entry.name: options[entry.name] for entry in fields(part) if entry.name in options}
    return replace(part, **changes)


def refuse_unknown(name: str, known: set[str]) -> NoReturn:
    """TrainError for an option that there is not, with its new name or the nearest one."""
    if name in MOVED_TO_OPTIMIZER:
        raise TrainError(f"'{name}' belongs to the optimizer: Optimizer(..., {MOVED_TO_OPTIMIZER[name]}=...)")
    if name in OLD_FIELDS:
        raise TrainError(f"the option '{name}' is called '{OLD_FIELDS[name]}' now")
    raise TrainError(f"unknown option '{name}'{nearest(name, known)}")


def resolve(config: TrainConfig, chain: Chain, metrics: Mapping[str, Metric] | None = None) -> TrainStep:
    """What a configuration means for a chain; raises where the two do not go together."""
    search, stream = config.architecture_search, config.stream
    if (search is None) == any(layer.is_architecture for layer in chain.layers.values()):
        raise TrainError(
            "a supernet with architecture parameters is trained on two levels, and only such a one: give train() "
            "architecture_search=Bilevel(...) and what weft.supernet.make_mixed_chain makes, or neither"
        )
    if not chain.space.choices and isinstance(stream, str):
        stream = chain.space.subnet()  # one network, and nothing to choose: every step trains it
    kind = stream.partition(":")[0] if isinstance(stream, str) else ""
    extremes: dict[str, Any] = {}
    if kind == "sandwich":
        extremes = {"largest": chain.largest(), "smallest": chain.smallest()}
    if kind == "shrinking":
        extremes = {"steps": config.steps}
    consistency = consistencies(chain, config.consistency)
    check_ties(chain, consistency.values())
    if chain.ties and search is not None:
        raise TrainError(
            "tied weights have one learning rate and learn in every step: leave tie= out of the Chain, or "
            "architecture_search out of the run"
        )
    optimizer, distill = config.optimizer, config.distill
    assert isinstance(optimizer, Optimizer)
    if isinstance(optimizer.clip, GlobalNorm):
        delay_of(consistency.values())
    resolved = make_stream(chain.space, stream, config.seed, **extremes)
    _check_stream(config, resolved)
    values = {entry.name: getattr(config, entry.name) for entry in fields(config) if entry.name != "init_from"}
    values |= {"stream": resolved, "consistency": consistency, "metrics": dict(metrics or {})}
    values["distill"] = InPlaceDistillation(config.loss) if distill is True else distill or None
    return TrainStep(**values)


def _check_stream(config: TrainConfig, stream: Stream) -> None:
    if config.distill and not stream.name.startswith("sandwich"):
        raise TrainError(
            f"distill: the largest subnet of a step teaches the others, so the stream must be 'sandwich', "
            f"not '{stream.name}'"
        )
    if not config.distill and config.batch_size % config.microbatches:
        raise TrainError(
            f"batch_size={config.batch_size} cannot be split into {config.microbatches} micro-batches of equal size: "
            "use a multiple"
        )
    wanted = stream.microbatches
    if wanted is not None and wanted != config.microbatches:
        raise TrainError(
            f"the stream '{stream.name}' gives {wanted} subnets a step: "
            f"set microbatches={wanted}, not {config.microbatches}"
        )
    if stream.length is not None and stream.length < config.steps:
        raise TrainError(f"the stream '{stream.name}' has {stream.length} steps, fewer than the run's {config.steps}")


def prefers_channels_last(chain: Chain, device: str | torch.device) -> bool:
    """Whether a run lays images out with the channels innermost if it is not told: where 2-d convolutions run on a GPU,
    which are up to twice as fast so."""
    convolved = any(isinstance(part, (nn.Conv2d, nn.ConvTranspose2d)) for part in chain.modules())
    # torch has no such layout for volumes, and refuses to bring a chain that holds any into it.
    volumes = any(tensor.dim() > 4 for tensor in (*chain.parameters(), *chain.buffers()))
    return torch.device(device).type == "cuda" and convolved and not volumes


def consistencies(chain: Chain, consistency: str | Consistency | Mapping[str, Any] | None) -> dict[str, Consistency]:
    """The consistency of every layer: what the run says of it by name or block, else what the block says, else
    ``exact``.

    A text such as ``lagged(4)``, or what it stands for, holds for all layers. In a mapping, a key is the name of a
    layer or of a block, or ``shared`` for all layers that every subnet uses.
    """
    rules = {name: str(rule) for name, rule in consistency.items()} if isinstance(consistency, Mapping) else {}
    if consistency is not None and not isinstance(consistency, Mapping):
        rules[""] = str(consistency)
    blocks = [block.name for block in chain.blocks]
    for name in rules:
        if name and name != "shared" and name not in chain.layers and name not in blocks:
            raise ConsistencyError(
                f"no layer or block is named '{name}'{nearest(name, [*chain.layers, *blocks, 'shared'])}"
            )
    by_layer: dict[str, Consistency] = {}
    for name, layer in chain.layers.items():
        block = blocks[layer.block]
        rule = rules.get(name) or rules.get(block) or (rules.get("shared") if layer.shared else None) or rules.get("")
        by_layer[name] = parse_consistency(rule or layer.consistency or "exact")
    return by_layer


def checkpoint_every(config: TrainConfig, run: RunConfig) -> int:
    return run.checkpoint_every or max(1, config.steps // 10)


def validation_of(run: RunConfig) -> Validation | None:
    """How the run is validated; None for not at all."""
    return Validation(run.validation) if isinstance(run.validation, int) else run.validation


def at_least(name: str, value: Any, least: int) -> None:
    """TrainError for a number below the least, or no whole one; None passes."""
    if value is not None and (not isinstance(value, int) or value < least):
        raise TrainError(f"{name}={value!r}: a whole number, {least} or more")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """TrainError for a value that is none of the allowed ones."""
    if value not in allowed:
        raise TrainError(f"{name}='{value}' is unknown{nearest(str(value), allowed)}")
