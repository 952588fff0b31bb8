"""The layers that one process trains: their versions, optimizer, clipping and ties; what both engines have in common.

``SequentialReference`` trains all layers of a chain on one device, a pipeline's ``Stage`` those of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from weft.data import Batch
from weft.engine.consistency import version_schedule
from weft.engine.grad_clip import SMALL, GlobalNorm, GlobalNormClipper, delay_of, span_of
from weft.engine.layer_state import Snapshot, capture
from weft.engine.optimizer import LayerOptimizer
from weft.engine.rng import Seeder
from weft.engine.tied_weights import Ties, ties_of
from weft.engine.train_step import Outputs, TrainStep
from weft.engine.weight_versions import Offload, VersionedLayer
from weft.errors import NonFiniteError, TrainError
from weft.space import Subnet
from weft.supernet import Activations, Chain, Layer, extra_inputs
from weft.utils import foreach


class TrainedLayers:
    """Some layers of a chain in training; ``stages`` gives the stage of every block, and ``index`` this one's."""

    def __init__(
        self,
        chain: Chain,
        config: TrainStep,
        device: torch.device,
        stages: Sequence[int] = (),
        index: int = 0,
    ) -> None:
        self.chain, self.config, self.device = chain, config, device
        self.is_first, self.is_last = index == 0, not stages or index == stages[-1]
        self.blocks = {block for block in range(len(chain.blocks)) if not stages or stages[block] == index}
        """The numbers of the blocks that are trained here."""
        m, compute = config.microbatches, torch.bfloat16 if config.precision == "bf16" else None
        self.weights: dict[str, VersionedLayer] = {}
        for name, layer in chain.layers.items():
            if layer.block in self.blocks:
                versions = version_schedule(config.consistency[name], layer.block, len(chain.blocks), m, config.steps)
                weights = self.weights[name] = VersionedLayer(layer, chain.module(name), versions, compute)
                weights.revocable = config.on_nonfinite == "skip"
                weights.trains = partial(config.trains, layer)
        self.optimizer = self._make_optimizer()
        self.clipper = self._make_clipper()
        self.ties: Ties | None = ties_of(chain, config.consistency.values(), m, stages, index)
        self.seeder = Seeder(config.seed, device)
        self.offload: Offload | None = None
        """What brings layers to the device, where they do not all stay there."""
        self.updates = 0
        """Updates of layers so far."""
        # The mean over the step's micro-batches enters as the gradient of each loss: every layer is divided by m.
        self._loss_gradient = torch.full((), 1.0 / m, device=device)
        self._teacher_outputs: Outputs = None
        self._with_versions: dict[str, VersionedLayer] = {}
        """Layers that keep older versions."""

    def subnet(self, n: int) -> Subnet:
        """The subnet of micro-batch n."""
        m, stream = self.config.microbatches, self.config.stream
        subnets = stream[n // m]
        if len(subnets) not in (1, m):
            raise TrainError(
                f"the stream '{stream.name}' gives {len(subnets)} subnets a step, but a step has {m} micro-batches: "
                f"set microbatches={len(subnets)}"
            )
        return subnets[n % m % len(subnets)]

    def route(self, subnet: Subnet) -> list[Layer]:
        """The layers that a subnet uses here, in chain order."""
        return [layer for layer in self.chain.route(subnet) if layer.block in self.blocks]

    def apply(self, group: Iterable[VersionedLayer], readers: Callable[[VersionedLayer], int]) -> None:
        """The finished slots of these layers become updates, in one call of the optimizer for each learning rate.

        ``readers`` says which micro-batch is the first that may still read what a layer was before.
        """
        by_rate: dict[float, list[VersionedLayer]] = {}
        for weights in group:
            by_rate.setdefault(self.config.lr_factor(weights.clock, weights.slot), []).append(weights)
        for factor, members in by_rate.items():
            apply = partial(self._apply, factor=factor, readers=readers)
            apply(members) if self.offload is None else self.offload.apply_updates(members, apply)
            self._with_versions |= {weights.layer.name: weights for weights in members if weights.kept}
            self.updates += len(members)

    def prune(self, readers: Callable[[VersionedLayer], int]) -> None:
        """Older versions that nobody reads any more go, also of a layer that is not used again."""
        for name, weights in list(self._with_versions.items()):
            weights.prune(readers(weights))
            if not weights.kept:
                del self._with_versions[name]

    def forget_sums(self, before: int) -> None:
        """Norms and sums of ties go that no update from micro-batch ``before`` on needs."""
        if self.clipper is not None:
            self.clipper.forget(before // self.clipper.span)
        if self.ties is not None:
            self.ties.forget(before // self.ties.span)

    def resume(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """After the layers were restored: the optimizer's state comes back too."""
        self.optimizer.load(states)
        self._with_versions = {name: w for name, w in self.weights.items() if w.kept}
        if self.offload is not None:
            self.offload.bind_restored()

    def train_mode(self) -> None:
        """The layers train: their norms write into scratch buffers."""
        for weights in self.weights.values():
            weights.module.train()
            weights.statistics.attach()

    def eval_mode(self) -> None:
        """The layers evaluate, with their running buffers."""
        for weights in self.weights.values():
            weights.statistics.detach()
            weights.module.eval()

    def snapshot(self, at: int) -> Snapshot:
        """All layers as they are before micro-batch ``at``; the tensors are their own, to be read before the next
        step."""
        found = Snapshot(at)
        for weights in self.weights.values():
            self.check_finite(weights, at // self.config.microbatches)
        for name, weights in self.weights.items():
            tensors, found.layers[name] = capture(weights, self.optimizer, at)
            found.tensors.update(tensors)
        if self.clipper is not None:
            found.norms = self.clipper.saved(at)
        if self.ties is not None:
            found.tensors.update(self.ties.saved(at))
        return found

    def check_finite(self, weights: VersionedLayer, step: int) -> None:
        """NonFiniteError for weights that no checkpoint should hold."""
        weights.readable()
        if weights.parameters and not bool(torch.isfinite(foreach.norm(list(weights.parameters)))):
            raise NonFiniteError(
                f"the weights of layer '{weights.layer.name}' are not finite before step {step}, "
                "so no checkpoint is written. Try a lower learning rate or clipping"
            )

    def first_nonfinite(self, n: int, activations: Activations, batch: Batch) -> str:
        """What first makes a number of micro-batch n not finite, found by running its layers again; empty where the
        activations came in so already, or left finite for another stage."""
        if _broken(activations):
            return "the batch itself" if self.is_first else ""
        i, j = divmod(n, self.config.microbatches)
        subnet = self.subnet(n)
        with torch.no_grad(), self.config.autocast(self.device):
            for layer in self.route(subnet):
                self.seeder.set(i, j, layer.name)
                weights = self.weights[layer.name]
                activations, _ = weights.forward(n, activations, extra_inputs(layer, batch, subnet))
                if _broken(activations):
                    broken = any(not torch.isfinite(p).all() for p in weights.parameters)
                    return f"layer '{layer.name}'" + (", whose weights are not finite" if broken else "")
        return "the loss function" if self.is_last else ""

    def nonfinite_loss(self, n: int, where: str) -> NonFiniteError:
        """The error for a loss that is not a number."""
        i, j = divmod(n, self.config.microbatches)
        return NonFiniteError(
            f"the loss is not a number in step {i}, micro-batch {j}, subnet {self.subnet(n)}: "
            f"it first appears in {where or 'another stage'}. "
            "Try a lower learning rate, clipping, or on_nonfinite='skip'"
        )

    def _make_optimizer(self) -> LayerOptimizer:
        """The optimizers of the layers, by the names of their parameters; tied ones have the options of the first."""
        search = self.config.architecture_search
        named: dict[str, nn.Parameter] = {}
        separate = {}
        for name, weights in self.weights.items():
            for path, parameter in zip(weights.names, weights.parameters, strict=True):
                named[f"{name}.{path}"] = parameter
                if search is not None and weights.layer.is_architecture:
                    separate[f"{name}.{path}"] = search.optimizer
        alias = {str(tie.second): str(tie.first) for tie in self.chain.ties}
        return LayerOptimizer(self.config.optimizer, named, separate, alias)

    def _make_clipper(self) -> GlobalNormClipper | None:
        clip, consistency = self.config.optimizer.clip, self.config.consistency
        if not isinstance(clip, GlobalNorm):
            return None
        span = span_of(next(iter(consistency.values())), self.config.microbatches)
        return GlobalNormClipper(clip, delay_of(consistency.values()), span, self.weights, self.is_first, self.is_last)

    def _apply(self, group: Sequence[VersionedLayer], factor: float, readers: Callable[[VersionedLayer], int]) -> None:
        parameters: list[nn.Parameter] = []
        gradients: list[Tensor] = []
        counts = []
        for weights in group:
            changed, clipped, good = self._gradients(weights, readers(weights))
            counts.append(good)
            parameters += changed
            gradients += clipped
        if parameters:
            self.optimizer.apply(parameters, gradients, factor)
        for weights, good in zip(group, counts, strict=True):
            weights.updated(readers(weights), good)

    def _gradients(self, weights: VersionedLayer, oldest: int) -> tuple[list[nn.Parameter], list[Tensor], bool]:
        """The parameters that the update of a layer's finished slot changes, their gradients, clipped, and whether it
        counts: one whose gradients are not finite may be skipped. ``oldest`` is as in ``VersionedLayer.take``."""
        slot = weights.slot
        sums = {} if self.ties is None else self.ties.sums(weights)
        taken = weights.take(oldest)
        rest = [place for place in range(len(taken)) if place not in sums]
        clipped = self._clip([taken[place] for place in rest], slot)
        parameters = [] if clipped is None else [weights.parameters[place] for place in rest]
        gradients = clipped or []
        for place, total in sums.items():
            tied = None if total is None else self._clip([total], slot)
            if tied is not None:
                parameters.append(weights.parameters[place])
                gradients = gradients + tied
        return parameters, gradients, clipped is not None

    def _clip(self, gradients: list[Tensor], slot: int) -> list[Tensor] | None:
        """A layer's gradients, clipped to the run's norm; None where they are not finite and are to be skipped."""
        clip, skips = self.config.optimizer.clip, self.config.on_nonfinite == "skip"
        if not gradients or (clip is None and not skips):
            return gradients
        norm = foreach.norm(gradients) if self.clipper is None or skips else None
        if norm is not None and skips and not bool(torch.isfinite(norm)):
            return None
        if self.clipper is not None:
            return foreach.mul(gradients, self.clipper.factor(slot, gradients))
        if norm is None or not isinstance(clip, float | int):
            return gradients
        return foreach.mul(gradients, torch.clamp(clip / (norm + SMALL), max=1.0))


def _broken(activations: Activations) -> bool:
    return any(not torch.isfinite(x).all() for x in activations if x.is_floating_point())
