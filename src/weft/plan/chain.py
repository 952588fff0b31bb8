"""Where a supernet is cut into stages: for the subnets that are to come, as a machine would run them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from weft.errors import PlanError
from weft.hardware.machine import Machine
from weft.hardware.machine import machine as machine_of
from weft.plan.capture import capture
from weft.plan.costs import TrainingSpec, tables
from weft.plan.sharding import Mesh
from weft.space import Subnet
from weft.space.choice import Choice
from weft.space.expression import Value
from weft.supernet import Chain, extract
from weft.supernet.partition import Cut, best_cut, stage_of
from weft.utils.rng import generator

SAMPLES = 256  # subnets that the expectation is taken over
CAPTURED = 12  # the most of them that are captured; more bring layers that were not seen


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """A cut of a chain for as many stages as there are devices.

    ``blocks`` are expected seconds of a block in one step; ``seconds`` and ``memory`` (weights, gradients and state of
    every candidate, in bytes) are of each stage. ``weft.train(build, data, stages=len(seconds), cut=cut)`` uses it.
    """

    machine: str
    blocks: tuple[float, ...]
    cut: Cut
    seconds: tuple[float, ...]
    memory: tuple[float, ...]

    @property
    def balance(self) -> float:
        """The mean stage over the slowest: 1 is even."""
        return sum(self.seconds) / len(self.seconds) / max(self.seconds)


def plan_chain(
    chain: Chain,
    batch: Mapping[str, Tensor],
    machine: str | Machine = "h100",
    *,
    devices: int,
    mixture: Mapping[str, Sequence[float]] | None = None,
    dtype: str = "float32",
    optimizer_bytes: float = 8.0,
    seed: int = 0,
) -> ChainPlan:
    """The cut whose slowest stage is fastest for the expected subnet.

    Subnets are drawn evenly, or by ``mixture``: a probability for each option of a choice, as a search has narrowed it.
    Plan again when it has, and resume with the new cut: the result is the same to the bit.
    """
    machine_spec = machine_of(machine)
    if not 1 <= devices <= len(chain.blocks):
        raise PlanError(f"{len(chain.blocks)} blocks are cut into 1 to {len(chain.blocks)} stages, not {devices}")
    subnets = _drawn(chain, mixture, seed)
    costs = _layer_seconds(chain, batch, subnets, machine_spec, TrainingSpec(dtype, optimizer_bytes))
    blocks = [0.0] * len(chain.blocks)
    for subnet in subnets:
        for layer in chain.route(subnet):
            blocks[layer.block] += costs.get(layer.name, 0.0) / len(subnets)
    cut = best_cut(blocks, devices)
    of = stage_of(cut, len(blocks))
    held = [0.0] * len(blocks)
    for name, layer in chain.layers.items():
        held[layer.block] += sum(
            p.numel() * (2 * p.element_size() + optimizer_bytes) for p in chain.module(name).parameters()
        )
    return ChainPlan(
        machine_spec.name,
        tuple(blocks),
        cut,
        tuple(math.fsum(c for c, s in zip(blocks, of, strict=True) if s == stage) for stage in range(devices)),
        tuple(math.fsum(h for h, s in zip(held, of, strict=True) if s == stage) for stage in range(devices)),
    )


def _drawn(chain: Chain, mixture: Mapping[str, Sequence[float]] | None, seed: int) -> list[Subnet]:
    space, rng = chain.space, generator(seed, "plan")
    if not space.choices:
        return [space.subnet()]
    if mixture is None:
        return [space.sample(rng) for _ in range(SAMPLES)]
    chances: dict[str, NDArray[np.float64]] = {}
    for name, choice in space.choices.items():
        if choice.options is None:
            raise PlanError(f"choice '{name}' is of real numbers: a mixture has a probability for each option")
        given = np.asarray(mixture.get(name, np.ones(len(choice.options))), dtype=np.float64)
        if given.shape != (len(choice.options),) or not (given >= 0).all() or not given.sum() > 0:
            raise PlanError(f"choice '{name}' has {len(choice.options)} options: give each a probability, not {given}")
        chances[name] = given / given.sum()
    if unknown := [name for name in mixture if name not in chances]:
        raise PlanError(f"the space has no choice '{unknown[0]}'")

    def pick(name: str, choice: Choice) -> Value:
        assert choice.options is not None
        return choice.options[int(rng.choice(len(choice.options), p=chances[name]))]

    found: list[Subnet] = []
    for _ in range(100 * SAMPLES):
        settled = space.rules.settle(pick)
        if space.rules.broken(settled) is None:
            found.append(space.rules.subnet(settled))
        if len(found) == SAMPLES:
            break
    if not found:
        raise PlanError("no subnet that the mixture makes likely keeps the constraints of the space")
    return found


def _layer_seconds(
    chain: Chain, batch: Mapping[str, Tensor], subnets: Sequence[Subnet], machine: Machine, training: TrainingSpec
) -> dict[str, float]:
    """Seconds of each layer in a step, the mean over the subnets that were captured with it."""
    found: dict[str, list[float]] = {}
    captured = 0
    for subnet in dict.fromkeys(subnets):
        route = chain.route(subnet)
        if captured == CAPTURED or (captured >= 3 and all(layer.name in found for layer in route)):
            continue
        captured += 1
        plain = extract(chain, subnet, {name: tensor[:1] for name, tensor in batch.items()})
        extra = (name for layer in route for name in layer.extra_inputs)
        names = dict.fromkeys((*(chain.inputs or tuple(batch)[:1]), *extra))
        graph = capture(plain, tuple(batch[name] for name in names)).graph
        roots = {layer.name.replace(".", "_"): layer.name for layer in route}  # as an extracted module calls them
        own = dict.fromkeys(roots.values(), 0.0)
        for operator, costs in zip(graph.operators, tables(graph, Mesh((1,)), machine, training).compute, strict=True):
            if name := roots.get(operator.module.split(".")[0]):
                own[name] += float(costs[0])
        for name, seconds in own.items():
            found.setdefault(name, []).append(seconds)
    return {name: sum(every) / len(every) for name, every in found.items()}
