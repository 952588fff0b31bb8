"""Common losses and metrics. Any function of the outputs and the batch can take their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.data import Batch
from weft.errors import TrainError

_TARGETS = ("label", "targets", "y")


def target(batch: Batch) -> Tensor:
    """The entry of a batch that outputs are compared with: ``label``, ``targets`` or ``y``."""
    for name in _TARGETS:
        if name in batch:
            return batch[name]
    raise TrainError(
        f"the batch has {', '.join(sorted(batch))}, and none of {', '.join(_TARGETS)}: give a loss of your own"
    )


def cross_entropy(outputs: Tensor, batch: Batch) -> Tensor:
    """For classes (n, classes) and for sequences of them (n, length, classes)."""
    return F.cross_entropy(outputs.flatten(0, -2), target(batch).flatten())


def mean_squared_error(outputs: Tensor, batch: Batch) -> Tensor:
    """The mean of the squared differences between outputs and targets."""
    return F.mse_loss(outputs, target(batch))


def accuracy(outputs: Tensor, batch: Batch) -> tuple[Tensor, float]:
    """The number of targets with the highest output, and the number of all; a metric for classifiers."""
    wanted = target(batch)
    return (outputs.argmax(-1) == wanted).sum(), wanted.numel()


def counted(name: str, result: Any) -> tuple[Tensor, float]:
    """The result of a metric; raises TrainError unless it is a sum and a count."""
    if isinstance(result, tuple) and len(result) == 2:
        return result
    raise TrainError(
        f"metric '{name}' returned {type(result).__name__} and must return (sum, count) over the samples of a batch, "
        "such as ((outputs.argmax(-1) == target).sum(), len(target))"
    )


def follow(outputs: Tensor, teacher_outputs: Tensor, batch: Batch) -> Tensor:
    """The cross-entropy with the probabilities of the teacher, which is the largest subnet of the step."""
    wanted = F.softmax(teacher_outputs.flatten(0, -2), -1)
    return F.cross_entropy(outputs.flatten(0, -2), wanted)


@dataclass(frozen=True, slots=True)
class InPlaceDistillation:
    """One half is the run's loss, the other half follows the teacher.

    With the teacher alone a supernet may diverge while its largest subnet has not learned yet: all subnets follow it,
    and it changes with the weights that they share.
    """

    loss: Callable[[Tensor, Batch], Tensor]

    def __call__(self, outputs: Tensor, teacher_outputs: Tensor, batch: Batch) -> Tensor:
        return (self.loss(outputs, batch) + follow(outputs, teacher_outputs, batch)) / 2


@dataclass(frozen=True, eq=False)
class Distillation:
    """A loss that also follows a teacher: 1 - ``weight`` of it is ``loss``, and ``weight`` the distance from the
    teacher's outputs, both softened by a ``temperature``.

    ``teacher`` is a function of the batch; or a module, which gets the ``inputs`` of the batch (its first entry if not
    given), in evaluation mode and on the device of the outputs. It computes in full precision and has no gradients. On
    several stages it is pickled, and runs on the last one.
    """

    teacher: nn.Module | Callable[[Batch], Tensor]
    loss: Callable[[Tensor, Batch], Tensor] = cross_entropy
    weight: float = 0.5
    temperature: float = 2.0
    inputs: str | Sequence[str] | None = None

    def __call__(self, outputs: Tensor, batch: Batch) -> Tensor:
        student = F.log_softmax(outputs.flatten(0, -2) / self.temperature, -1)
        with torch.no_grad(), torch.autocast(outputs.device.type, enabled=False):
            teacher_outputs = self._teacher_outputs(batch, outputs.device)
        teacher = F.log_softmax(teacher_outputs.flatten(0, -2) / self.temperature, -1)
        soft = F.kl_div(student, teacher, reduction="batchmean", log_target=True) * self.temperature**2
        return (1.0 - self.weight) * self.loss(outputs, batch) + self.weight * soft

    def _teacher_outputs(self, batch: Batch, device: torch.device) -> Tensor:
        if not isinstance(self.teacher, nn.Module):
            return self.teacher(batch)
        names = (self.inputs,) if isinstance(self.inputs, str) else self.inputs or tuple(batch)[:1]
        missing = [name for name in names if name not in batch]
        if missing:
            raise TrainError(f"the teacher takes {', '.join(names)}, but the batch has {', '.join(batch)}")
        teacher_outputs: Tensor = self.teacher.to(device).eval()(*(batch[name] for name in names))
        return teacher_outputs
