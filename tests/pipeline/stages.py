"""Supernets for pipeline tests, and many stages stepped in one process under an adversary's clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.data import MicroBatches
from weft.engine.consistency import parse_consistency
from weft.engine.layer_state import CheckpointPart, capture, layer_digest
from weft.engine.losses import accuracy
from weft.engine.optimizer import Optimizer
from weft.engine.reference import SequentialReference
from weft.engine.train_step import TrainStep
from weft.pipeline.message import Message, pack, unpack
from weft.pipeline.scheduler import SchedulePolicy
from weft.pipeline.stage import Stage
from weft.pipeline.worker import Worker
from weft.space import Space, Stream, Subnet, make_stream
from weft.supernet import Chain, Choice, Optional, Shared, initialise
from weft.supernet.partition import Cut
from weft.trainer.config import consistencies

CPU = torch.device("cpu")
Batch = dict[str, Tensor]


class Listed(Stream):
    """The steps that a test wants, written out."""

    name = "listed"
    summary = "steps given by hand"
    bits = 0.0

    def __init__(self, space: Space, steps: Sequence[tuple[Subnet, ...]]) -> None:
        super().__init__(space)
        self.steps = list(steps)
        self.microbatches = max(len(step) for step in steps) if any(len(step) > 1 for step in steps) else None

    def _step(self, index: int) -> tuple[Subnet, ...]:
        return self.steps[index]


def squares(outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    difference = outputs - batch["y"]
    return (difference * difference).sum()


def make_engine(
    chain: Chain,
    steps: Sequence[tuple[Subnet, ...] | Subnet],
    *,
    consistency: str | Mapping[str, str] = "exact",
    m: int = 1,
    optimizer: Optimizer | None = None,
    schedule: Any = "constant",
    clip: Any = None,
    loss: Any = squares,
    **options: Any,
) -> SequentialReference:
    """An engine over the subnets of each step, ready to train."""
    rules = consistency if isinstance(consistency, Mapping) else dict.fromkeys(chain.layers, consistency)
    config = TrainStep(
        steps=len(steps),
        microbatches=m,
        stream=Listed(chain.space, [step if isinstance(step, tuple) else (step,) for step in steps]),
        consistency={name: parse_consistency(rules.get(name, "exact")) for name in chain.layers},
        loss=loss,
        optimizer=clipped(optimizer or Optimizer("sgd", lr=0.05, momentum=0.9), clip, schedule),
        **options,
    )
    sequential = SequentialReference(chain, config, torch.device("cpu"))
    sequential.train_mode()
    return sequential


class Residual(nn.Module):
    """A convolution with a norm and dropout beside a way around it, which sums two gradients at its input."""

    def __init__(self, size: int, dropout: float = 0.2, inplace: bool = True) -> None:
        super().__init__()
        self.first = nn.ReLU(inplace=inplace)
        self.conv = nn.Conv2d(4, 4, size, padding=size // 2)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.drop(self.norm(self.conv(x)))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x).mean((2, 3)))


def convolutional(blocks: int = 4) -> Chain:
    """Norms, dropout, layers that work in place, a block that may be skipped, and one without weights."""
    space = Space()
    middle: list[Any] = [
        Choice(
            space, f"b{k}", {"c3": lambda: Residual(3), "c1": lambda: Residual(1), "none": nn.Identity, "pool": pooling}
        )
        for k in range(blocks - 1)
    ]
    middle.insert(1, Optional(space, "maybe", lambda: Residual(3, 0.0)))
    return Chain(Shared(lambda: nn.Conv2d(1, 4, 3, padding=1), "stem"), *middle, Shared(Head, "head"))


def pooling() -> nn.Module:
    return nn.AvgPool2d(3, 1, 1)


class Attend(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


def text(blocks: int = 3) -> Chain:
    """Integer inputs, an embedding, attention or a plain layer."""
    space = Space()
    return Chain(
        Shared(lambda: nn.Embedding(11, 8), "embed"),
        *[
            Choice(
                space,
                f"b{k}",
                {
                    "one": lambda: Attend(1),
                    "two": lambda: Attend(2),
                    "mlp": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)),
                },
            )
            for k in range(blocks)
        ],
        Shared(lambda: nn.LayerNorm(8), "norm"),
        Shared(lambda: nn.Linear(8, 11), "out"),
        inputs=("tokens",),
    )


def plain() -> Chain:
    """One network, of layers that every step uses: six blocks."""
    return Chain(
        Shared(lambda: nn.Embedding(11, 8), "embed"),
        *[Shared(lambda: Attend(2), f"layer{k}") for k in range(4)],
        Shared(lambda: nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 11)), "out"),
        inputs=("tokens",),
    )


def tied() -> Chain:
    """As plain, with two ties: tokens and scores share a matrix, and so do two layers, of which the later comes
    first."""
    return Chain(*plain().blocks, inputs=("tokens",), tie=TIED)


TIED = [("embed.weight", "out.2.weight"), ("layer3.qkv.weight", "layer1.qkv.weight")]


class Encode(nn.Module):
    """Changes the source and passes the target's tokens (integers) and a mask on as they are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, width), nn.Linear(width, 6)

    def forward(self, source: Tensor, tokens: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return source + self.down(torch.tanh(self.up(source))) * mask.unsqueeze(-1), tokens, mask


class Begin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)

    def forward(self, source: Tensor, tokens: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return self.embed(tokens), source, mask


class Decode(nn.Module):
    """Reads the memory (which every later block reads too, so its gradients come from many) and an extra input."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = scale

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        context = (self.other(memory) * mask.unsqueeze(-1)).mean(1, keepdim=True)
        return x + self.scale * torch.relu(self.own(x) + context) * weight[:, None, None], memory, mask


class Finish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 7)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        return self.out(x + memory.mean(1, keepdim=True))


def encoder_decoder() -> Chain:
    """A tuple travels: two tensors with gradients, integers, a mask of booleans; extra inputs in the middle."""
    space = Space()
    return Chain(
        *[Choice(space, f"e{k}", {"s": lambda: Encode(4), "l": lambda: Encode(9)}) for k in range(2)],
        Shared(Begin, "begin"),
        *[
            Choice(space, f"d{k}", {"s": lambda: Decode(0.5), "l": lambda: Decode(1.0)}, extra_inputs=("weight",))
            for k in range(2)
        ],
        Shared(Finish, "finish"),
        inputs=("source", "tokens", "mask"),
    )


def images(step: int, rows: int = 4) -> Batch:
    draw = torch.Generator().manual_seed(step)
    return {"x": torch.randn(rows, 1, 5, 5, generator=draw), "label": torch.randint(0, 3, (rows,), generator=draw)}


def words(step: int, rows: int = 4) -> Batch:
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 11, (rows, 6), generator=draw)
    return {"tokens": tokens, "targets": tokens.roll(-1, 1)}


def pairs(step: int, rows: int = 4) -> Batch:
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 7, (rows, 5), generator=draw)
    return {
        "source": torch.randn(rows, 4, 6, generator=draw),
        "tokens": tokens,
        "mask": torch.rand(rows, 4, generator=draw) > 0.3,
        "weight": torch.rand(rows, generator=draw),
        "targets": tokens.roll(1, 1),
    }


KINDS: dict[str, tuple[Callable[[], Chain], Callable[[int], Batch]]] = {
    "convolutional": (convolutional, images),
    "text": (text, words),
    "encoder-decoder": (encoder_decoder, pairs),
    "plain": (plain, words),
}

ALIKE: dict[str, tuple[Callable[[], Chain], Callable[[int], Batch]]] = {"tied": (tied, words)}
"""Kinds whose layers must all have one consistency."""


@dataclass(frozen=True)
class Task:
    """A run, apart from where it runs."""

    kind: str
    config: TrainStep

    def chain(self) -> Chain:
        return initialise((KINDS | ALIKE)[self.kind][0], self.config.seed)

    def batch(self, step: int) -> Batch:
        return (KINDS | ALIKE)[self.kind][1](step)


def make_task(
    kind: str,
    *,
    steps: int = 8,
    m: int = 1,
    consistency: str | Mapping[str, str] = "exact",
    optimizer: Optimizer | None = None,
    stream: str = "iid",
    seed: int = 0,
    clip: float | str | None = None,
    **options: Any,
) -> Task:
    chain = initialise((KINDS | ALIKE)[kind][0], seed)
    config = TrainStep(
        steps=steps,
        microbatches=m,
        stream=make_stream(chain.space, stream if chain.space.choices else chain.space.subnet(), seed),
        consistency=consistencies(chain, consistency),
        optimizer=clipped(optimizer or Optimizer("sgd", lr=0.05, momentum=0.9, weight_decay=1e-3), clip),
        seed=seed,
        **{"metrics": {"accuracy": accuracy}, **options},
    )
    return Task(kind, config)


def clipped(optimizer: Optimizer, clip: Any, schedule: Any = None) -> Optimizer:
    """The optimizer with other clipping and, if given, another schedule."""
    return Optimizer(
        optimizer.kind,
        schedule=schedule or optimizer.schedule,
        clip=clip,
        groups=optimizer.groups,
        others=optimizer.others,
        **optimizer.options,
    )


class Numbered:
    """The batches of a task as a loader gives them."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def iterate(self, start: int, stop: int) -> Any:
        for step in range(start, stop):
            yield self.task.batch(step)


@dataclass
class Outcome:
    """What a run left: a digest of weights, buffers and optimizer state by layer, and every loss."""

    layers: dict[str, str]
    losses: list[float]
    most_in_flight: int = 0
    version_lags: dict[str, dict[int, int]] = field(default_factory=dict)
    most_kept: int = 0
    in_flight: list[int] = field(default_factory=list)
    steps: int = 0


def sequentially(task: Task, steps: int | None = None) -> Outcome:
    return run_engine(SequentialReference(task.chain(), task.config, CPU), task, steps)


def run_engine(engine: SequentialReference, task: Task, steps: int | None = None) -> Outcome:
    """The outcome of a task, or of its first steps."""
    engine.train_mode()
    losses = []
    for step in range(task.config.steps if steps is None else steps):
        losses += [loss.item() for loss in engine.step(step, task.batch(step)).losses]
    engine.eval_mode()
    return Outcome({name: layer_digest(w, engine.optimizer) for name, w in engine.weights.items()}, losses)


def saved_at(snapshots: Sequence[Any], at: int) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, float]]:
    """The tensors, layers and norms of the checkpoint before micro-batch ``at``, from the parts of all stages."""
    own = [snapshot for snapshot in snapshots if snapshot.at == at]
    tensors = {name: tensor for snapshot in own for name, tensor in snapshot.tensors.items()}
    layers = {name: numbers for snapshot in own for name, numbers in snapshot.layers.items()}
    return tensors, layers, {key: norm for snapshot in own for key, norm in snapshot.norms.items()}


def layer_contents(engine: SequentialReference, name: str) -> dict[str, Tensor]:
    """Everything that a layer is, copied: weights, buffers, optimizer state, older versions, gradients that wait."""
    tensors, _ = capture(engine.weights[name], engine.optimizer, 0)
    return {key: tensor.detach().clone() for key, tensor in tensors.items()}


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def through_bytes(message: Message) -> Message:
    """The message as it arrives on the other side of a wire."""
    return unpack(pack(message), CPU)


def in_stages(
    task: Task,
    cut: Cut,
    max_in_flight: int | Sequence[int],
    seed: int = 0,
    *,
    until: int | None = None,
    every: int | None = None,
    saved: Any = None,
    first_step: int = 0,
    split: bool = False,
    stop_after: int | None = None,
) -> tuple[Outcome, list[Any]]:
    """Steps the stages in an order drawn from the seed, messages late as it likes; also the snapshots, if asked for.

    With ``saved`` (tensors, layers) it begins at ``first_step`` from there. The first stage is told to stop after so
    many operations of all. Links keep their order, as wires do.
    """
    rng = random.Random(seed)
    m, stages = task.config.microbatches, len(cut) + 1
    total = (task.config.steps if until is None else until) * m
    links: dict[tuple[int, int], list[Message]] = {}

    def sender(source: int) -> Callable[[int, Message], None]:
        return lambda to, message: links.setdefault((source, to), []).append(through_bytes(message))

    workers = []
    for index in range(stages):
        stage = Stage(task.chain(), task.config, CPU, cut, index, split_backward=split)
        if saved is not None:
            stage.restore(CheckpointPart(first_step * m, *saved))
        stage.train_mode()
        limit = max_in_flight if isinstance(max_in_flight, int) else max_in_flight[index]
        parts = MicroBatches(Numbered(task), first_step, task.config.steps, m, task.config.parts)
        workers.append(Worker(stage, SchedulePolicy(limit), first_step * m, total, parts, sender(index), every))
    snapshots: list[Any] = []
    reports: dict[int, float] = {}
    most_kept = ops = 0
    while not all(worker.done for worker in workers):
        if ops == stop_after:
            workers[0].end(-(-workers[0].scheduler.known // m) * m)
            stop_after = None
        progress = False
        choices: list[Any] = list(workers) + [link for link, queue in links.items() if queue]
        rng.shuffle(choices)
        for choice in choices:
            if isinstance(choice, Worker):
                done = choice.work()
                if done is None:
                    continue
                ops += 1
                snapshots += done.snapshots
                most_kept = max(most_kept, *(len(w.kept) for w in choice.stage.weights.values()))
            else:
                workers[choice[1]].receive(links[choice].pop(0))
            progress = True
            break
        assert progress or any(links.values()), "no stage can go on"
    losses = []
    for worker in workers:
        snapshots += worker.finish()
        worker.stage.eval_mode()
    for n, report in workers[0].reports:
        reports[n] = float(report[0])
    losses = [reports[n] for n in sorted(reports)]
    layers = {name: layer_digest(w, wk.stage.optimizer) for wk in workers for name, w in wk.stage.weights.items()}
    lags = {name: dict(w.version_lags) for wk in workers for name, w in wk.stage.weights.items()}
    peaks = [worker.peak for worker in workers]
    (total,) = {worker.scheduler.total for worker in workers}
    return Outcome(layers, losses, max(peaks), lags, most_kept, peaks, total // m), snapshots
