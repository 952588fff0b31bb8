"""The likely cause of a difference, found by experiment: do the same thing twice, and see what has moved meanwhile."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.data import Batch, Data, Loader
from weft.pipeline.determinism import deterministic
from weft.pipeline.opening import lay_out
from weft.pipeline.seeding import Seeder
from weft.pipeline.session import Teacher, make_law, make_loader, taught
from weft.pipeline.settings import Settings
from weft.supernet import Carry, Chain, Factory, Layer, as_carry, initialise, run_layer, side_inputs
from weft.verification import hidden
from weft.verification.difference import Difference
from weft.verification.recorder import fresh

RNG = "global RNG"
STATE = "hidden state"
DATA = "impure data"
KERNEL = "nondeterministic kernel"
THREADS = "thread count"
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Cause:
    """Why two runs of one law differ, as far as experiments tell, and what would mend it."""

    kind: str
    why: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Subject:
    """The run that is looked into."""

    net: Chain | Factory
    load: Callable[[], Data]
    settings: Settings
    teacher: Teacher | None = None

    def cause(self, found: Difference) -> Cause | None:
        """The cause of a difference; None where doing it twice in this process shows nothing."""
        with deterministic(self.settings.device), Seeder(self.settings.seed, self.settings.device).preserved():
            if found.place == "batch":
                return self._of_batch(found.step)
            if found.place == "initial weights":
                return self._of_building(str(found.layer))
            return self._of_step(found)

    def without_kernel(self, step: int) -> str | None:
        """The layer of a step that has no deterministic kernel; None where none has, or where it is in the loss."""
        with deterministic(self.settings.device), Seeder(self.settings.seed, self.settings.device).preserved():
            return next((name for name, twice in self._layers(step) if twice.raised), None)

    def _of_step(self, found: Difference) -> Cause | None:
        only = found.place in ("forward", "loss")
        # In a backward, the layers that come last in the chain work first.
        for name, twice in reversed(list(self._layers(found.step))):
            if only and name != found.layer:
                continue
            cause = _judged("the loss" if name is None else f"layer '{name}'", twice)
            if cause is not None:
                return cause
            if twice.differs:
                return self._of_chance(found.step, name)
        return None

    def _of_chance(self, step: int, name: str | None) -> Cause:
        """Of a layer, or the loss, that differs by itself although nothing that can be seen has moved."""
        what, threads = "the loss" if name is None else f"layer '{name}'", torch.get_num_threads()
        with one_thread():
            still = next(twice.differs for other, twice in self._layers(step) if other == name)
        if not still:
            return by_threads(threads)
        if self.settings.device.type == "cpu":
            why = "it must draw from a generator that it seeds by itself, or depend on the time"
            return Cause(RNG, f"{what} gives another result when it is run twice: {why}", DRAW)
        why = "an operator without a deterministic kernel, or a generator that it seeds by itself"
        return Cause(KERNEL, f"{what} gives another result when it is run twice: {why}", DRAW)

    def _layers(self, step: int) -> Iterator[tuple[str | None, Twice]]:
        """Runs the layers of a step, each alone and twice, and at last the loss, whose name is None."""
        s = self.settings
        chain = lay_out(initialise(fresh(self.net), s.seed, s.device), s).train()
        law, seeder, picks = make_law(s), Seeder(s.seed, s.device), s.stream[step]
        whole = taught(chain, self.teacher, make_loader(self.load(), s).batch(step))
        for j, batch in enumerate(law.parts(whole)):
            carry = chain.enter(batch)
            subnet = picks[j % len(picks)]
            for layer in chain.route(subnet):
                side = side_inputs(layer, batch, subnet)
                module = chain.module(layer)
                call: Callable[..., Any] = partial(_run, layer, module, side)
                seeded = partial(seeder.set, step, j, layer.name)
                with law.autocast(s.device)():
                    twice, carry = _twice(call, module, carry, seeded)
                yield layer.name, twice
                if twice.raised:
                    return
            call, seeded = partial(_loss, s.loss, batch), partial(seeder.set, step, j, "loss")
            with law.autocast(s.device)():
                twice, _ = _twice(call, s.loss, carry, seeded)
            yield None, twice

    def _of_building(self, name: str) -> Cause | None:
        factory = getattr(fresh(self.net).module(name), "factory", None)
        before = {**hidden.generators(), **hidden.kept_by(self.net, factory)}
        built = [initialise(lambda: fresh(self.net), self.settings.seed, only=[name]).module(name) for _ in range(2)]
        moved = hidden.moved(before, {**hidden.generators(), **hidden.kept_by(self.net, factory)})
        same = all(_same(a, b) for a, b in zip(*(module.parameters() for module in built), strict=True))
        remedy = "draw initial weights from torch's global generator, which weft seeds for every layer"
        if moved:
            return Cause(
                RNG if moved[0] in hidden.GLOBAL else STATE, f"building layer '{name}' moves {moved[0]}", remedy
            )
        return None if same else Cause(RNG, f"building layer '{name}' twice gives other weights", remedy)

    def _of_batch(self, step: int) -> Cause | None:
        loader = make_loader(self.load(), self.settings)
        before = hidden.generators()
        one, other = loader.batch(step), loader.batch(step)
        drawn = hidden.moved(before, hidden.generators())
        by = f"; they draw from {drawn[0]}" if drawn else ""
        remedy = "take(indices) must give equal samples for equal indices; what is drawn anew belongs into augment"
        keys = _unequal(one, other)
        if keys:
            who = "the data is not pure"
            if self.settings.augment is not None and isinstance(loader, Loader):
                samples = loader.samples(step)
                if not _unequal(loader.source.take(samples), loader.source.take(samples)):
                    who, remedy = "the augmentation is not pure", "draw from the draws that it is given, and no other"
            return Cause(DATA, f"{who}: two reads of batch {step} differ in '{keys[0]}'{by}", remedy)
        keys = _unequal(one, make_loader(self.load(), self.settings).batch(step))
        if keys:
            return Cause(DATA, f"loading the data twice gives another '{keys[0]}' in batch {step}", remedy)
        return None


DRAW = "draw from torch's global generator (torch.rand and the like), which weft seeds for every step and layer"


def kernel(message: str) -> Cause | None:
    """The cause that torch itself names, if its message is about determinism."""
    if "use_deterministic_algorithms" not in message and "is not deterministic because" not in message:
        return None
    operator = re.search(r"(\S+) does not have a deterministic implementation", message)
    why = f"{operator[1]} has no deterministic kernel here" if operator else " ".join(message.split())[:300]
    return Cause(KERNEL, why, "put another operator in its place, or run on a kind of device where it has one")


def by_threads(threads: int) -> Cause:
    """The cause where one thread gives equal bits."""
    why = f"with 1 thread all is equal, with {threads} it is not"
    return Cause(THREADS, why, "set train.threads = 1, or sum in an order that does not depend on the threads")


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the block torch works with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class Twice:
    """What came of doing something twice under the same seeding."""

    differs: bool
    moved: tuple[str, ...] = ()
    raised: str | None = None
    """What torch says of an operator without a deterministic kernel."""


def _judged(what: str, twice: Twice) -> Cause | None:
    if twice.raised:
        return kernel(twice.raised)
    moved = [word for word in twice.moved if twice.differs or not word.endswith(hidden.TENSOR)]
    if not moved:
        return None
    result = "gives another result when it is run twice" if twice.differs else "is not a function of its inputs alone"
    if moved[0] in hidden.GLOBAL:
        return Cause(RNG, f"{what} {result}: it draws from {moved[0]}", DRAW)
    remedy = (
        "let it depend on inputs, weights and buffers alone; what must last from step to step belongs into a buffer"
    )
    return Cause(STATE, f"{what} {result}: it changes {moved[0]}", remedy)


def _twice(call: Callable[..., Any], owner: Any, inputs: Carry, seeded: Callable[[], None]) -> tuple[Twice, Carry]:
    """Forward and backward of a layer or the loss, two times; what its owner keeps is looked at around the first."""
    buffers = [(buffer, buffer.clone()) for buffer in owner.buffers()] if isinstance(owner, nn.Module) else []
    weights = list(owner.parameters()) if isinstance(owner, nn.Module) else []
    results: list[list[Tensor | None]] = []
    moved: list[str] = []
    outputs = inputs
    for first in (True, False):
        leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
        before = {**hidden.generators(), **hidden.kept_by(owner)}
        seeded()
        try:
            outputs = as_carry(call(*(x.clone() for x in leaves)), "it")  # a layer may work in place
            results.append([*(x.detach().clone() for x in outputs), *_gradients(outputs, [*leaves, *weights])])
        except RuntimeError as problem:
            if kernel(str(problem)) is None:
                raise
            return Twice(True, raised=str(problem)), inputs
        if first:
            moved = hidden.moved(before, {**hidden.generators(), **hidden.kept_by(owner)})
        for buffer, value in buffers:  # what a layer keeps in buffers, weft keeps too
            buffer.data.copy_(value)
    differs = not all((a is None and b is None) or _same(a, b) for a, b in zip(*results, strict=True))
    return Twice(differs, tuple(moved)), tuple(x.detach() for x in outputs)


def _run(layer: Layer, module: nn.Module, side: Mapping[str, Any], *carry: Tensor) -> Carry:
    return run_layer(layer, module, carry, side)


def _loss(function: Callable[..., Tensor], batch: Batch, *outputs: Tensor) -> Tensor:
    return function(outputs[0] if len(outputs) == 1 else outputs, batch)


def _gradients(outputs: Carry, sources: list[Tensor]) -> tuple[Tensor | None, ...]:
    wanted, graded = [x for x in sources if x.requires_grad], [x for x in outputs if x.requires_grad]
    if not wanted or not graded:
        return ()
    return torch.autograd.grad(graded, wanted, [torch.ones_like(x) for x in graded], allow_unused=True)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return (
        a is not None
        and b is not None
        and (a.shape, a.dtype) == (b.shape, b.dtype)
        and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    )


def _unequal(one: Batch, other: Batch) -> list[str]:
    return [name for name in one if not _same(one[name], other.get(name))]
