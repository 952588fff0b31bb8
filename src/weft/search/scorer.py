"""The scores of subnets with inherited weights: accuracy on validation data, and what they cost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.data import Batch, IterableLoader, Loader, Source
from weft.elastic import Module
from weft.engine.layer_state import tensors_digest
from weft.errors import SearchError, WeftError
from weft.offload.setup import on_device
from weft.search import cost
from weft.search.cost_model import build_cost_model, plain_inputs
from weft.space import Subnet
from weft.supernet import Chain, extract
from weft.supernet.layer import Layer
from weft.trainer.api import TrainedRun
from weft.trainer.evaluate import evaluate, recalibrated

CHEAP = ("parameters", "flops")
MEASURED = ("latency", "memory")


class Scorer:
    """Scores the subnets of a trained supernet, on validation data alone; training data sets their batch norms."""

    def __init__(self, trained: TrainedRun, bn_batches: int = 2, batch_size: int = 256) -> None:
        data = trained.data
        if data.validation is None:
            raise SearchError(
                "search needs validation data, and this data set has none: split some off with weft.data.split"
            )
        self.chain, self.data = trained.chain.eval(), data
        self._step, self._device = trained.step, trained.device
        # Held once: every subnet is scored on the same batches.
        self._validation = list(self._loader(data.validation, batch_size).all())
        train = self._loader(data.train, batch_size, shuffle=True)
        self.calibration = [train.batch(k) for k in range(bn_batches)]
        self.example = {name: tensor[:1] for name, tensor in self._validation[0].items()}
        self._costs: dict[Subnet, dict[str, float]] = {}

    def quality(self, subnet: Subnet) -> dict[str, float]:
        """Loss and the run's metrics on the validation data."""
        return self._score(subnet, self._validation)

    def test(self, subnet: Subnet) -> dict[str, float]:
        """Loss and the run's metrics on the test data. Take it once, when the search is over."""
        if self.data.test is None:
            raise SearchError("this data set has no test part")
        return self._score(subnet, list(self._loader(self.data.test, 256).all()))

    def cheap(self, subnet: Subnet) -> dict[str, float]:
        """Parameters, and FLOPs of one sample (a multiply-add counts as 2)."""
        if subnet not in self._costs:
            self.layers(subnet)
        return dict(self._costs[subnet])

    def layers(self, subnet: Subnet) -> list[dict[str, Any]]:
        """The layers of the subnet in chain order: block, choice, parameters, FLOPs, and whether every subnet has it.

        Weights that are tied are counted where they come first, so that parameters and FLOPs add up to the subnet's.
        """
        with on_device(self.chain, subnet):
            plain = extract(self.chain, subnet, self.example)
            flops = cost.flops_by_child(plain, self.inputs(subnet))
            self._costs[subnet] = {"parameters": cost.parameters(plain), "flops": sum(flops.values())}
            rows, seen = [], set[int]()
            for layer, (label, module) in zip(self.chain.route(subnet), plain.named_children(), strict=True):
                own = {id(parameter): parameter.numel() for parameter in module.parameters()}
                choice = describe_choice(self.chain, layer, subnet)
                rows.append(
                    {
                        "block": self.chain.blocks[layer.block].name,
                        "choice": choice,
                        "parameters": sum(count for one, count in own.items() if one not in seen),
                        "flops": flops[label],
                        "shared": layer.shared and choice is None,
                    }
                )
                seen |= own.keys()
        return rows

    def measured(self, subnet: Subnet, names: tuple[str, ...]) -> dict[str, float]:
        """Latency of one sample in milliseconds and peak memory of its activations in bytes, as asked for."""
        if not names:
            return {}
        measures: dict[str, Callable[..., float]] = {"latency": cost.latency, "memory": cost.peak_memory}
        with on_device(self.chain, subnet):
            plain = extract(self.chain, subnet, self.example)
            return {name: measures[name](plain, self.inputs(subnet)) for name in names}

    def extract(self, subnet: Subnet) -> nn.Module:
        """The subnet as a plain module, its batch norms set as they were when it was scored."""
        with recalibrated(self.chain, subnet, self.calibration):
            return extract(self.chain, subnet, self.example)

    def inputs(self, subnet: Subnet, batch: Mapping[str, Tensor] | None = None) -> tuple[Tensor, ...]:
        """A batch, or one sample if none is given, as the subnet's plain module takes it."""
        return plain_inputs(self.chain, subnet, self.example if batch is None else batch)

    def _loader(self, source: Source, batch_size: int, shuffle: bool = False) -> Loader | IterableLoader:
        if isinstance(source, IterableLoader):  # a foreign loader has batches of its own
            return source
        seed, size = self._step.seed, min(batch_size, len(source)) if shuffle else batch_size
        return Loader(source, size, seed, shuffle=shuffle, device=self._device)

    def _score(self, subnet: Subnet, batches: list[Batch]) -> dict[str, float]:
        step = self._step
        with recalibrated(self.chain, subnet, self.calibration):
            return evaluate(self.chain, subnet, batches, step.loss, step.metrics, step.precision)


def describe_choice(chain: Chain, layer: Layer, subnet: Subnet) -> str | None:
    """The choice of the subnet for a layer: the name of a candidate, or the values that an elastic layer reads."""
    block, _, candidate = layer.name.partition(".")
    if candidate or not layer.elastic:
        return candidate or None
    modules = chain.module(layer).modules()
    read = {name for part in modules if isinstance(part, Module) for name in part.reads}
    values = {name: value for name, value in subnet.values.items() if name in read}
    texts = (str(value) if name == block else f"{name}={value}" for name, value in values.items())
    return " ".join(texts) or None


def context(trained: TrainedRun, **options: Any) -> dict[str, Any]:
    """All that scores depend on except the subnet, for the cache."""
    loss = trained.step.loss
    return {
        "weights": tensors_digest(trained.chain.state_dict()),
        "data": trained.data.fingerprint(),
        "loss": getattr(loss, "__qualname__", type(loss).__name__),
        "precision": trained.step.precision,
        "device": trained.device.type,
        "threads": torch.get_num_threads(),
        **options,
    }


log = logging.getLogger("weft.search")
MANY = 48
"""Subnets from which on tables are worth their measurement, which takes as long as counting some ten subnets."""


def cost_lookup(scorer: Scorer, most: int) -> Callable[[Subnet], dict[str, float]]:
    """Gives the parameters and FLOPs of a subnet, from tables where ``most`` says that many may be asked for.

    Subnets of a space that has no tables (one with a choice of real numbers, say) are counted one by one.
    """
    if most < MANY:
        return scorer.cheap
    try:
        models = [build_cost_model(scorer.chain, scorer.example, metric) for metric in CHEAP]
    except WeftError as problem:
        log.info("parameters and FLOPs are counted subnet by subnet: %s", problem)
        return scorer.cheap
    return lambda subnet: {model.metric: int(model.of(subnet)) for model in models}
