"""The likely cause of a difference: the work of the step in which two runs differ is done twice in one process, to see
whether it is a function of its inputs alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.data import Batch, Data
from weft.engine.rng import Seeder, deterministic
from weft.engine.train_step import TrainStep
from weft.supernet import Activations, Chain, Factory, as_activations, extra_inputs, initialise, run_layer
from weft.trainer.config import Execution
from weft.verify.record import Difference, fresh

IMPURE = "impure"
KERNEL = "nondeterministic kernel"
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Cause:
    """Why two runs differ, as far as the experiment shows, and what to do about it."""

    kind: str
    why: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Suspect:
    net: Chain | Factory
    load: Callable[[], Data]
    config: TrainStep
    execution: Execution

    @property
    def device(self) -> torch.device:
        return torch.device(self.execution.device)

    def cause(self, found: Difference) -> Cause | None:
        """The cause of a difference; None where doing it twice in this process gives equal bits."""
        if found.place == "batch":
            return self._of_batch(found.step)
        if found.place == "initial weights":
            return self._of_building(str(found.layer))
        only = found.place in ("forward", "loss")
        # In a backward, the layers that come last in the chain work first.
        for name, cause in reversed(self.layers(found.step)):
            if cause is not None and (not only or name == found.layer):
                return cause
        return None

    def layers(self, step: int) -> list[tuple[str | None, Cause | None]]:
        """What is wrong with each layer of a step, and at last with the loss, whose name is None: each runs alone and
        twice, forward and backward, from the same inputs, weights, buffers and seeds."""
        config, device, found = self.config, self.device, list[tuple[str | None, Cause | None]]()
        seeder = Seeder(config.seed, device)
        with deterministic(device), seeder.preserved(), config.autocast(device):
            chain = self.execution.lay_out(initialise(fresh(self.net), config.seed, device)).train()
            for j, batch in enumerate(config.parts(config.loader(self.load(), device).batch(step))):
                carry, subnet = chain.enter(batch), config.subnet(step * config.microbatches + j)
                for layer in chain.route(subnet):
                    module, seeded = chain.module(layer), partial(seeder.set, step, j, layer.name)
                    run = partial(run_layer, layer, module, extras=extra_inputs(layer, batch, subnet))
                    cause, carry = _twice(f"layer '{layer.name}'", run, module, carry, seeded)
                    found.append((layer.name, cause))
                    if cause is not None and cause.kind == KERNEL:
                        return found
                seeded = partial(seeder.set, step, j, "loss")
                found.append((None, _twice("the loss", partial(_loss, config, batch), None, carry, seeded)[0]))
        return found

    def _of_building(self, name: str) -> Cause | None:
        seed = self.config.seed
        with Seeder(seed, self.device).preserved():
            built = [initialise(lambda: fresh(self.net), seed, only=[name]).module(name) for _ in range(2)]
        if _equal(*(list(module.parameters()) for module in built)):
            return None
        remedy = "draw initial weights from torch's global generator, which weft seeds for every layer"
        return Cause(IMPURE, f"building layer '{name}' twice gives other weights", remedy)

    def _of_batch(self, step: int) -> Cause | None:
        one, other = (self.config.loader(self.load(), self.device).batch(step) for _ in range(2))
        name = next((name for name in one if not _equal([one[name]], [other.get(name)])), None)
        if name is None:
            return None
        remedy = (
            "take(indices) must give equal samples for equal indices; what is drawn anew belongs into augment, and "
            "comes from the draws that it is given"
        )
        return Cause(IMPURE, f"two reads of batch {step} differ in '{name}'", remedy)


def kernel_cause(message: str) -> Cause | None:
    """The cause that torch itself names, if its message is about determinism."""
    if "use_deterministic_algorithms" not in message and "is not deterministic because" not in message:
        return None
    operator = re.search(r"(\S+) does not have a deterministic implementation", message)
    why = f"{operator[1]} has no deterministic kernel here" if operator else " ".join(message.split())[:300]
    return Cause(KERNEL, why, "put another operator in its place, or run on a kind of device where it has one")


def _twice(
    what: str,
    run: Callable[[Activations], Any],
    module: nn.Module | None,
    inputs: Activations,
    seeded: Callable[[], None],
) -> tuple[Cause | None, Activations]:
    """Why something is not the same when it is done twice, and what it gives."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()] if module is not None else []
    weights = list(module.parameters()) if module is not None else []
    results: list[list[Tensor | None]] = []
    outputs = inputs
    for _ in range(2):
        leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
        seeded()
        try:
            outputs = as_activations(run(tuple(x.clone() for x in leaves)), "it")  # a layer may work in place
            results.append([*(x.detach().clone() for x in outputs), *_gradients(outputs, [*leaves, *weights])])
        except RuntimeError as problem:
            cause = kernel_cause(str(problem))
            if cause is None:
                raise
            return cause, inputs
        for buffer, value in buffers:  # what a layer keeps in buffers, weft keeps too
            buffer.data.copy_(value)
    carry = tuple(x.detach() for x in outputs)
    if _equal(*results):
        return None, carry
    why = f"{what} gives another result when it is run twice from the same inputs, weights, buffers and seeds"
    remedy = (
        "let it depend on nothing else: draw from torch's global generator, which weft seeds for every step and layer, "
        "and keep what must last from step to step in a buffer"
    )
    return Cause(IMPURE, why, remedy), carry


def _loss(config: TrainStep, batch: Batch, outputs: Activations) -> Tensor:
    return config.loss(outputs[0] if len(outputs) == 1 else outputs, batch)


def _gradients(outputs: Activations, sources: list[Tensor]) -> tuple[Tensor | None, ...]:
    wanted, graded = [x for x in sources if x.requires_grad], [x for x in outputs if x.requires_grad]
    if not wanted or not graded:
        return ()
    return torch.autograd.grad(graded, wanted, [torch.ones_like(x) for x in graded], allow_unused=True)


def _equal(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    def same(a: Tensor | None, b: Tensor | None) -> bool:
        if a is None or b is None:
            return a is b
        return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))

    return all(same(a, b) for a, b in zip(one, other, strict=True))
